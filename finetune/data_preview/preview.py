"""What ``finetune data`` shows: the rows of one training stage as its model will see them."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from finetune.data.dataset import TokenDataset
from finetune.data.formats import Preference
from finetune.data.sources import read_examples
from finetune.data.tokens import tokenize_dataset
from finetune.data_preview.leakage import HeldOut, Leakage, text_file_passages
from finetune.data_preview.lengths import Batching, Lengths, batching_of, lengths_of
from finetune.data_preview.repeats import Repeats
from finetune.data_preview.samples import Sample, row_encoder, sample_of, ways_on
from finetune.data_preview.survey import SourceSurvey, survey_sources
from finetune.data_preview.tokenizer import stage_tokenizer
from finetune.errors import RecipeError, did_you_mean
from finetune.evaluate.settings import EvaluateSettings
from finetune.recipe import LoadedRecipe, Stage, check_files_exist
from finetune.train.settings import TrainSettings

DEFAULT_SIMILARITY = 0.7
CHUNK_ROWS = 1000
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
    counts: dict[str, dict[str, int]]
    """Rows and tokens by cause, of the whole as ``data`` and ``eval_data``, or of preference rows' ``chosen`` and
    ``rejected``."""
    seconds: float
    """What reading, rendering and tokenizing took."""
    tokens_per_second: float
    lengths: dict[str, Lengths]
    """Of the rows that are kept, under the names of ``counts``."""
    batching: Batching | None
    """None for preference rows, which no stage trains on."""
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
    tokenizer, origin = stage_tokenizer(loaded, chosen)
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
    started = time.perf_counter()
    if survey.all_preferences:
        counts, lengths = _prepare_preferences(settings, tokenizer)
        datasets = {}
    else:
        datasets = _prepare(settings, tokenizer, show_progress=show_progress)
        counts = {name: dict(dataset.counts) for name, dataset in datasets.items()}
        lengths = {name: dataset.lengths for name, dataset in datasets.items()}
    seconds = time.perf_counter() - started
    return Preview(
        recipe=loaded.recipe.name,
        stage=chosen.name,
        kind=chosen.kind,
        training_stages=training,
        tokenizer=origin,
        settings={name: getattr(settings, name) for name in SHOWN_SETTINGS},
        sources=survey.sources,
        counts=counts,
        seconds=seconds,
        tokens_per_second=sum(int(values.sum(dtype=np.int64)) for values in lengths.values()) / seconds,
        lengths={name: lengths_of(values) for name, values in lengths.items() if len(values)},
        batching=_batching(loaded, settings, datasets.get("data")),
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


def _prepare(settings: TrainSettings, tokenizer: Any, *, show_progress: bool) -> dict[str, TokenDataset]:
    """``data``, and ``eval_data`` where there is any, as the training prepares them."""
    return {
        name: tokenize_dataset(
            sources,
            tokenizer=tokenizer,
            max_seq_length=settings.max_seq_length,
            overlong=settings.overlong,
            train_on=settings.train_on,
            chat=settings.chat_options,
            max_dropped_share=settings.max_dropped_share,
            show_progress=show_progress,
        )
        for name, sources in (("data", settings.data), ("eval_data", settings.eval_data))
        if sources
    }


def _batching(loaded: LoadedRecipe, settings: TrainSettings, dataset: TokenDataset | None) -> Batching | None:
    if dataset is None:
        return None
    world_size = loaded.recipe.launch.num_processes or 1
    return batching_of(dataset, settings, world_size=world_size, seed=loaded.recipe.seed)


def _prepare_preferences(
    settings: TrainSettings, tokenizer: Any
) -> tuple[dict[str, dict[str, int]], dict[str, np.ndarray]]:
    """(counts, lengths int64 (N,)) of the chosen and of the rejected ways on, each with its prompt."""
    encoders = {name: row_encoder(tokenizer, settings) for name in ("chosen", "rejected")}
    lengths: dict[str, list[int]] = {name: [] for name in encoders}
    for source in settings.data:
        examples = read_examples(source)
        while chunk := list(islice(examples, CHUNK_ROWS)):
            pairs = [(ways_on(row) if isinstance(row, Preference) else row, place) for row, place in chunk]
            for name, encoder in encoders.items():
                rows = [(row[name] if isinstance(row, dict) else row, place) for row, place in pairs]
                encoder.add(rows, skip_invalid=source.invalid_rows == "skip")
                lengths[name] += [len(row.input_ids) for row in encoder.rows]
                encoder.rows.clear()
    counts = {name: encoder.finish() for name, encoder in encoders.items()}
    return counts, {name: np.array(values, dtype=np.int64) for name, values in lengths.items()}
