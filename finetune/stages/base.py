"""What every stage kind tells the pipeline, and what the pipeline hands to a stage that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from finetune.config.registry import Registry
from finetune.config.section import Section
from finetune.engine.settings import LaunchSettings, ZeroSettings
from finetune.model.settings import ModelSettings

BASE_MODEL = "model"
"""The name under which a stage's ``from:`` reaches the recipe's own ``model:``."""


class StageSettings(Section):
    """Keys that every stage has."""

    not_deciding: ClassVar[frozenset[str]] = frozenset({"name", "from"})
    """Keys that don't change a stage's result. (Its parents enter the fingerprint by their own.)"""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """The stage's name, unique in the recipe; by default its kind."""
    from_: str | None = Field(None, alias="from")
    """The earlier stage whose model this one takes; by default the closest one before. `model` is the recipe's own."""


@dataclass(frozen=True)
class StageContext:
    """All that a running stage may know. Paths of models are plain Hugging Face folders."""

    name: str
    settings: Any
    seed: int
    model: ModelSettings
    launch: LaunchSettings
    zero: ZeroSettings
    run_dir: Path
    folder: Path
    input_model: Path | None
    """The model of ``from:``; None only for a stage that builds the recipe's ``scratch`` model."""
    models: dict[str, Path] = field(default_factory=dict)
    """The models of all earlier stages, by stage name."""
    history: tuple[dict[str, Any], ...] = ()
    """What the earlier stages' manifests say: name, kind, settings, metrics, seconds; in order."""
    recipe_name: str = ""
    accept_changes: bool = False
    """Go on from checkpoints that were written with other settings."""

    def rank_arguments(self) -> list[str]:
        """What python is started with to run one rank of this stage."""
        return ["-m", "finetune.worker", "rank", str(self.run_dir), self.name]


@dataclass(frozen=True)
class StageKind:
    """A kind of stage. ``run`` fills ``context.folder`` and returns the metrics of the stage's manifest."""

    settings: type[StageSettings]
    run: Callable[[StageContext], dict[str, Any]]
    yields_model: bool
    """Whether ``folder/model`` is a model that later stages can take."""
    complete: Callable[[Any, Sequence[Any]], Any] = lambda settings, ancestors: settings
    """``complete(settings, ancestors)`` fills in what the settings leave to the stages whose model this one's comes
    from (their settings, the closest first). Raises ValueError where something is missing."""
    data_files: Callable[[Any], list[str]] = lambda settings: []
    """The data files whose content decides the result, those of folders and patterns each."""
    extra_inputs: Callable[[Any], Sequence[str]] = lambda settings: ()
    """Names of stages it reads besides ``from:``."""
    batch: Callable[[Any, int], dict[str, Any]] = lambda settings, world_size: {}
    """What decides the result by a product only, of settings and the number of ranks."""
    run_rank: Callable[[StageContext], None] | None = None
    """What each rank does, for a stage that starts several."""
    can_build_model: bool = False
    """Whether it can start from the recipe's ``scratch`` model."""


STAGES: Registry[StageKind] = Registry("stage kind", package="finetune.stages")
