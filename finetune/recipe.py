"""Recipe: one YAML file, typed; and the plan of its stages with their inputs found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from finetune.config.section import Section, parse_section
from finetune.config.source import Source, apply_overrides, load_yaml
from finetune.data.files import find_data_files, is_pattern
from finetune.data.settings import DatasetSettings
from finetune.engine.settings import LaunchSettings, ZeroSettings
from finetune.errors import DataError, RecipeError, did_you_mean
from finetune.files import sha256_json
from finetune.model.settings import ModelSettings
from finetune.stages.base import BASE_MODEL, STAGES, StageKind, StageSettings


class Recipe(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """The run's name; its results go to `<output_dir>/<name>`."""
    output_dir: str = "outputs"
    """Where runs are kept, relative to the current directory (as every path in a recipe is)."""
    seed: int = Field(17, ge=0, lt=2**31)
    """Decides initial weights, the order of the data and the choice of calibration samples."""
    model: ModelSettings
    launch: LaunchSettings = LaunchSettings()
    zero: ZeroSettings = ZeroSettings()


@dataclass(frozen=True)
class Stage:
    """One stage of a recipe with its inputs resolved to the names of earlier stages."""

    index: int
    name: str
    kind: str
    settings: StageSettings
    input: str | None
    """Name of the stage whose model it takes, BASE_MODEL for the recipe's own, None to build the scratch model."""
    extra_inputs: tuple[str, ...]
    where: str

    @property
    def implementation(self) -> StageKind:
        return STAGES[self.kind]

    @property
    def folder_name(self) -> str:
        return f"{self.index:02d}-{self.name}"


@dataclass(frozen=True)
class LoadedRecipe:
    recipe: Recipe
    stages: tuple[Stage, ...]

    @property
    def run_dir(self) -> Path:
        return Path(self.recipe.output_dir) / self.recipe.name

    def stage(self, name: str, *, flag: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise RecipeError(
            f"there is no stage `{name}`", where=flag, fix=did_you_mean(name, [stage.name for stage in self.stages])
        )

    def resolved(self) -> dict[str, Any]:
        """The recipe as plain values with every default, as written to the run's ``recipe.yaml``."""
        stages = []
        for stage in self.stages:
            settings = {**stage.settings.resolved(), "name": stage.name, "from": stage.input}
            stages.append({stage.kind: settings})
        return {**self.recipe.resolved(), "stages": stages}

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.resolved(), sort_keys=False, allow_unicode=True, width=120)

    def sha256(self) -> str:
        return sha256_json(self.resolved())


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read and validate a recipe. Raises RecipeError with the file and line of the first fault; loads no model."""
    source = load_yaml(path)
    if not isinstance(source.value, dict):
        raise RecipeError("a recipe holds keys and values", where=path, fix="start with `name:`, `model:`, `stages:`")
    apply_overrides(source, overrides)
    value = dict(source.value)
    stages = value.pop("stages", None)
    allowed = [*Recipe.model_fields, "stages"]
    for key in value:
        if key not in Recipe.model_fields:
            raise RecipeError(f"unknown key `{key}`", where=source.place((key,)), fix=did_you_mean(key, allowed))
    if not isinstance(stages, list) or not stages:
        raise RecipeError(
            "`stages` must be a list of stages", where=source.place(("stages",)), fix="stages:\n         - sft: {…}"
        )
    # Stages first: most of a recipe is there, and so are most misspelt keys.
    parsed = [_parse_stage(source, index, entry) for index, entry in enumerate(stages)]
    recipe = parse_section(Recipe, source, (), value)
    return LoadedRecipe(recipe=recipe, stages=_connect(recipe, parsed))


def _parse_stage(source: Source, index: int, entry: Any) -> tuple[str, StageSettings, str]:
    path = ("stages", index)
    where = source.place(path)
    if isinstance(entry, str):
        entry = {entry: {}}
    if not isinstance(entry, dict) or len(entry) != 1:
        raise RecipeError(
            "a stage is one kind with its settings", where=where, fix="- sft: {…}, with the settings indented under it"
        )
    kind, value = next(iter(entry.items()))
    if kind not in STAGES:
        raise RecipeError(f"unknown stage kind `{kind}`", where=where, fix=did_you_mean(kind, STAGES))
    return kind, parse_section(STAGES[kind].settings, source, (*path, kind), value), source.place((*path, kind))


def _connect(recipe: Recipe, parsed: list[tuple[str, StageSettings, str]]) -> tuple[Stage, ...]:
    """Give each stage its name and its input."""
    stages: list[Stage] = []
    models = {BASE_MODEL: "model"} if recipe.model.path is not None else {}
    for index, (kind, settings, where) in enumerate(parsed, start=1):
        name = settings.name or kind
        if name == BASE_MODEL or any(stage.name == name for stage in stages):
            raise RecipeError(
                f"two stages are called `{name}`" if name != BASE_MODEL else f"a stage can't be called `{name}`",
                where=where,
                fix="give it another `name:`",
            )
        implementation = STAGES[kind]
        source = settings.from_ or (list(models)[-1] if models else None)
        if source is None and not implementation.can_build_model:
            raise RecipeError(
                f"stage `{name}` has no model to start from", where=where, fix="put a training stage before it"
            )
        extra_inputs = tuple(implementation.extra_inputs(settings))
        for wanted in [*([source] if source else []), *extra_inputs]:
            if wanted not in models:
                raise RecipeError(
                    f"stage `{name}` takes the model of `{wanted}`, which no earlier stage yields",
                    where=where,
                    fix=did_you_mean(wanted, models),
                )
        stages.append(
            Stage(
                index=index,
                name=name,
                kind=kind,
                settings=_completed(implementation, settings, _ancestors(stages, source), where),
                input=source,
                extra_inputs=extra_inputs,
                where=where,
            )
        )
        if implementation.yields_model:
            models[name] = name
    return tuple(stages)


def _ancestors(stages: Sequence[Stage], name: str | None) -> list[StageSettings]:
    """The settings of stage ``name`` and of those whose model it comes from, the closest first."""
    by_name = {stage.name: stage for stage in stages}
    found = []
    while name in by_name:
        found.append(by_name[name].settings)
        name = by_name[name].input
    return found


def _completed(
    implementation: StageKind, settings: StageSettings, ancestors: list[StageSettings], where: str
) -> StageSettings:
    try:
        completed: StageSettings = implementation.complete(settings, ancestors)
        return completed
    except ValueError as cause:
        what, _, advice = str(cause).partition("; set ")
        raise RecipeError(what, where=where, fix=f"set {advice}" if advice else "correct the value") from None


def data_files(loaded: LoadedRecipe, stage: Stage) -> list[str]:
    """The files besides models whose content decides the stage's result: its data, and what a new model's tokenizer is
    made from."""
    files = list(stage.implementation.data_files(stage.settings))
    scratch = loaded.recipe.model.scratch
    if stage.input is None and scratch is not None:
        for source in scratch.tokenizer.data or []:
            files += DatasetSettings.model_validate(source.model_dump()).data_files()
        if scratch.tokenizer.chat_template:
            files.append(scratch.tokenizer.chat_template)
    return files


def check_files_exist(loaded: LoadedRecipe) -> None:
    """Raise before any work when a file that some stage will read isn't there, or a folder isn't one data set."""
    for stage in loaded.stages:
        for name in data_files(loaded, stage):
            if Path(name).is_file():
                continue
            if not Path(name).exists() and not is_pattern(name):
                raise DataError(
                    f"stage `{stage.name}` reads `{name}`, which isn't there",
                    where=stage.where,
                    fix="correct the path (paths start at the current directory), or make the file; a data set of the "
                    "Hugging Face Hub needs its `split:` too",
                )
            try:
                find_data_files(name)
                what, fix = "is a folder, not a file", "name a file in it"
            except DataError as error:
                what, fix = error.what, error.fix or ""
            raise DataError(f"stage `{stage.name}` reads `{name}`: {what}", where=stage.where, fix=fix)
