"""What ``finetune data`` shows: the rows of one training stage as its model will see them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from finetune.data.encoding import first_skipped
from finetune.data.loader import StepLoader
from finetune.data.sources import read_examples
from finetune.data_preview.leakage import HeldOut, Leakage, text_file_passages
from finetune.data_preview.lengths import Batching, Lengths, batching_of, lengths_of
from finetune.data_preview.model import stage_model
from finetune.data_preview.prepared import Prepared, prepare
from finetune.data_preview.repeats import Repeats
from finetune.data_preview.samples import Sample, encoding_of, sample_of
from finetune.data_preview.survey import SourceSurvey, survey_sources
from finetune.errors import RecipeError, did_you_mean
from finetune.evaluate.settings import EvaluateSettings
from finetune.recipe import LoadedRecipe, Stage, check_files_exist
from finetune.train.data import make_loader
from finetune.train.settings import TrainSettings

DEFAULT_SIMILARITY = 0.7
SHOWN_SETTINGS = ("max_seq_length", "packing", "overlong", "train_on", "history", "allow_control_tokens")


@dataclass(frozen=True)
class Preview:
    recipe: str
    stage: str
    kind: str
    training_stages: list[str]
    tokenizer: str
    """Where the tokenizer comes from."""
    settings: dict[str, Any]
    """Those of the stage that decide what a row becomes."""
    sources: list[SourceSurvey]
    first_refused: str
    """The place and the fault of the first row that is skipped though it can be read; empty where none is."""
    counts: dict[str, dict[str, int]]
    """Rows and tokens by cause, of the whole as ``data`` and ``eval_data``, or of preference rows' ``chosen`` and
    ``rejected``."""
    seconds: float
    """What reading, rendering and tokenizing took."""
    tokens_per_second: float
    lengths: dict[str, Lengths]
    """Of the rows that are kept, under the names of ``counts``."""
    batching: Batching | None
    """None where rows are streamed, and for preference rows, which no stage trains on."""
    similarity: float
    repeats: Repeats
    leakage: list[Leakage]
    samples: list[Sample]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def preview_data(
    loaded: LoadedRecipe,
    *,
    stage: str | None = None,
    num_rows: int = 3,
    seed: int | None = None,
    similarity: float = DEFAULT_SIMILARITY,
    show_progress: bool = True,
) -> Preview:
    """Read, encode and compare all rows of a training stage (the first, where ``stage`` doesn't name one).

    ``seed`` (the recipe's by default) decides which ``num_rows`` rows are shown. Raises the errors that a run would
    raise before it trains.
    """
    chosen, training = _choose_stage(loaded, stage)
    settings = chosen.settings
    assert isinstance(settings, TrainSettings)
    check_files_exist(loaded)
    tokenizer, config, origin = stage_model(loaded, chosen)
    survey = survey_sources(
        settings.data,
        held_out_sets(loaded, settings),
        num_samples=num_rows,
        seed=loaded.recipe.seed if seed is None else seed,
        similarity=similarity,
        show_progress=show_progress,
    )
    samples = [
        sample_of(sampled.example, sampled.place, tokenizer, settings, skip_invalid=sampled.skip_invalid)
        for sampled in survey.sampled
    ]
    prepared = prepare(settings, tokenizer, config, preferences=survey.all_preferences, show_progress=show_progress)
    skipped = prepared.counts.get("data", {}).get("skipped_invalid", 0)
    refuses = skipped > sum(source.num_invalid for source in survey.sources)
    return Preview(
        recipe=loaded.recipe.name,
        stage=chosen.name,
        kind=chosen.kind,
        training_stages=training,
        tokenizer=origin,
        settings={name: getattr(settings, name) for name in SHOWN_SETTINGS},
        sources=survey.sources,
        first_refused=(first_skipped(settings.data, tokenizer, encoding_of(settings)) if refuses else None) or "",
        counts=prepared.counts,
        seconds=prepared.seconds,
        tokens_per_second=sum(counts["tokens"] for counts in prepared.counts.values()) / prepared.seconds,
        lengths={name: lengths_of(values) for name, values in prepared.lengths.items() if len(values)},
        batching=_batching(loaded, settings, tokenizer, config, prepared),
        similarity=similarity,
        repeats=survey.repeats,
        leakage=survey.leakage,
        samples=samples,
    )


def _choose_stage(loaded: LoadedRecipe, name: str | None) -> tuple[Stage, list[str]]:
    """(the stage, the names of all training stages). Raises RecipeError where there is none, or ``name`` isn't one."""
    training = [stage for stage in loaded.stages if isinstance(stage.settings, TrainSettings)]
    names = [stage.name for stage in training]
    if not training:
        raise RecipeError(
            "the recipe has no training stage, whose data could be shown", where="stages", fix="add one, such as `sft`"
        )
    if name is None:
        return training[0], names
    stage = loaded.stage(name, flag="--stage")
    if stage not in training:
        raise RecipeError(f"stage `{name}` trains nothing", where="--stage", fix=did_you_mean(name, names))
    return stage, names


def held_out_sets(loaded: LoadedRecipe, settings: TrainSettings) -> list[HeldOut]:
    """The stage's ``eval_data``, and what the recipe's evaluations measure on."""
    found = [HeldOut("eval_data", source.shown, read_examples(source)) for source in settings.eval_data]
    for stage in loaded.stages:
        if isinstance(stage.settings, EvaluateSettings):
            if stage.settings.exact_match is not None:
                source = stage.settings.exact_match
                found.append(HeldOut(f"{stage.name}.exact_match", source.shown, read_examples(source)))
            if stage.settings.perplexity is not None:
                path = stage.settings.perplexity
                found.append(HeldOut(f"{stage.name}.perplexity", path, text_file_passages(path)))
    return found


def _batching(
    loaded: LoadedRecipe, settings: TrainSettings, tokenizer: Any, config: Any, prepared: Prepared
) -> Batching | None:
    if prepared.data is None:
        return None
    world_size = loaded.recipe.launch.num_processes or 1
    loader, held_out = make_loader(
        prepared.data,
        settings,
        tokenizer,
        config,
        seed=loaded.recipe.seed,
        rank=0,
        world_size=world_size,
        say=lambda text: None,
    )
    assert isinstance(loader, StepLoader)
    held_out_rows = len(held_out) if settings.eval_rows and held_out is not None else 0
    return batching_of(loader, settings, world_size=world_size, held_out_rows=held_out_rows)
