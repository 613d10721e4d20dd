"""From a recipe to its finished stages: the done are skipped, the unfinished go on, the changed run again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finetune import errors
from finetune.artifact import BEFORE_NAME, check_files, read_manifest
from finetune.engine.choice import choose_engine, require_installed
from finetune.engine.deepspeed_config import refusal
from finetune.engine.settings import world_size
from finetune.errors import CheckpointError, FinetuneError, RecipeError, ResourceError
from finetune.files import require_folder, write_json, write_text
from finetune.fingerprint import Fingerprints, changes
from finetune.processes import run_lock
from finetune.recipe import LoadedRecipe, Stage, check_files_exist
from finetune.worker import ERROR_VARIABLE, STARTED_NAME, begin_stage

OTHER_ZERO = "set zero.engine: auto, or another zero.stage, zero.offload or mixed_precision"

State = Literal["done", "new", "unfinished", "changed", "damaged"]


@dataclass(frozen=True)
class PlannedStage:
    stage: Stage
    state: State
    """done: nothing to do; new: never begun; unfinished: goes on; changed: was made with other settings; damaged."""
    fingerprint: str
    deciding: dict[str, Any]
    parents: dict[str, str]
    differences: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        return self.state != "done"


def plan_stages(loaded: LoadedRecipe) -> list[PlannedStage]:
    """What each stage's folder holds, compared with what the recipe asks for. Reads files, loads no model."""
    fingerprints = Fingerprints(loaded)
    planned: list[PlannedStage] = []
    for stage in loaded.stages:
        deciding, parents = fingerprints.deciding(stage), fingerprints.parents_content(stage)
        fingerprint = fingerprints.of(stage.name)
        state, differences = _state(loaded.run_dir / stage.folder_name, fingerprint, deciding, parents)
        changing = [plan.stage.name for plan in planned if plan.stage.name in parents and plan.runs]
        if state == "done" and changing:
            state, differences = "changed", tuple(f"`{name}` runs again" for name in changing)
        planned.append(PlannedStage(stage, state, fingerprint, deciding, parents, differences))
    fingerprints.save()
    return planned


_EARLIER = "an earlier stage changed"


def _state(
    folder: Path, fingerprint: str, deciding: dict[str, Any], parents: dict[str, str]
) -> tuple[State, tuple[str, ...]]:
    try:
        manifest = read_manifest(folder)
        if manifest is not None:
            differences = changes(manifest.settings, deciding)
            differences += tuple(f"`{name}` changed" for name in parents if manifest.parents.get(name) != parents[name])
            if manifest.fingerprint != fingerprint or differences:
                return "changed", differences or (_EARLIER,)
            check_files(folder, manifest.files)
            return "done", ()
    except CheckpointError as error:
        return "damaged", (f"{error.what}: {error.where}",)
    started = folder / STARTED_NAME
    if (folder / BEFORE_NAME).is_file():
        started = folder / BEFORE_NAME
    if not started.is_file():
        return "new", ()
    try:
        begun = json.loads(started.read_text(encoding="utf-8"))
        differences = changes(begun["deciding"], deciding)
        begun_as = begun["fingerprint"]
    except (ValueError, KeyError, TypeError, AttributeError):
        # Not "damaged": its checkpoints, if any, are only dropped when the user says so.
        return "unfinished", (f"what it was begun with can't be read: {started}",)
    if begun_as != fingerprint and not differences:
        differences = (_EARLIER,)
    return "unfinished", differences


@dataclass(frozen=True)
class RunOptions:
    from_stage: str | None = None
    until_stage: str | None = None
    force: bool = False
    accept_changes: bool = False
    """An unfinished training goes on from its checkpoint although it was begun with other settings."""


Start = Callable[[LoadedRecipe, "PlannedStage", RunOptions], None]
"""Runs one planned stage to its manifest; the options say what becomes of earlier work in its folder."""


def run_recipe(
    loaded: LoadedRecipe, options: RunOptions, *, say: Callable[[str], None], start: Start | None = None
) -> dict[str, Any]:
    """Run all stages that aren't done; return the summary. Raises the first FinetuneError of any stage."""
    check_files_exist(loaded)
    require_engine(loaded)
    first = loaded.stage(options.from_stage, flag="--from").index if options.from_stage else 1
    last = loaded.stage(options.until_stage, flag="--until").index if options.until_stage else len(loaded.stages)
    if first > last:
        raise RecipeError("`--from` comes after `--until`", where="--from, --until", fix="swap them")
    with run_lock(loaded.run_dir):
        planned = plan_stages(loaded)
        for plan in planned[: first - 1]:
            if plan.runs:
                raise RecipeError(
                    f"stage `{plan.stage.name}`, which comes before `--from {options.from_stage}`, is {plan.state}"
                    + (f": {'; '.join(plan.differences)}" if plan.differences else ""),
                    where=loaded.run_dir / plan.stage.folder_name,
                    fix="run without --from",
                )
        todo = [plan for plan in planned[first - 1 : last] if plan.runs or options.force]
        if not (options.force or options.accept_changes):
            _refuse_changed_unfinished(loaded, todo)
        write_text(loaded.run_dir / "recipe.yaml", loaded.to_yaml())
        if not todo:
            names = ", ".join(plan.stage.name for plan in planned[first - 1 : last])
            what = "every stage" if (first, last) == (1, len(planned)) else names
            say(f"nothing to do: {what} is done in {loaded.run_dir}")
        for index in range(first - 1, last):
            # Looked at again, since the stages before it have run by now.
            plan = plan_stages(loaded)[index]
            label = f"[{index + 1}/{len(loaded.stages)}] {plan.stage.name}"
            if not plan.runs and not options.force:
                if todo:
                    say(f"{label}: done before")
                continue
            say(f"{label}: {_reason(plan, options)}")
            if plan.stage.implementation.run_rank is not None:
                say("{}: by the {} engine: {}".format(label, *_engine(loaded)))
            (start or run_stage)(loaded, plan, options)
            write_summary(loaded)
            say(f"{label}: {describe(loaded, plan.stage)}")
        return write_summary(loaded)


def _engine(loaded: LoadedRecipe) -> tuple[str, str]:
    """(engine, why) of the recipe's trainings."""
    recipe = loaded.recipe
    return choose_engine(recipe.zero, world_size=world_size(recipe.launch), device=recipe.launch.device or "cpu")


def require_engine(loaded: LoadedRecipe) -> None:
    """Raise before anything runs when a training needs an engine that isn't installed (MissingDependencyError) or that
    can't do exactly what is asked (RecipeError)."""
    zero = loaded.recipe.zero
    for stage in loaded.stages:
        if stage.implementation.run_rank is None:
            continue
        name, _ = _engine(loaded)
        require_installed(name)
        if zero.offload.nvme_path and "nvme" in (zero.offload.optimizer, zero.offload.parameters):
            require_folder(Path(zero.offload.nvme_path), where="zero.offload.nvme_path")
        settings: Any = stage.settings
        if name == "deepspeed" and (why := refusal(zero, precision=settings.mixed_precision)):
            raise RecipeError(
                f"no engine does this exactly; of DeepSpeed: {why}",
                where=f"zero (stage `{stage.name}`)",
                fix=OTHER_ZERO,
            )


def _refuse_changed_unfinished(loaded: LoadedRecipe, todo: list[PlannedStage]) -> None:
    """Unfinished work begun with other settings isn't continued, nor are its checkpoints or blocks dropped unasked."""
    for plan in todo:
        folder = loaded.run_dir / plan.stage.folder_name
        if plan.state != "unfinished" or not plan.differences:
            continue
        is_training = any(folder.glob("checkpoints/step-*"))
        # Blocks of another model than the one that comes now are of no use to anyone.
        if is_training or (any(folder.glob("*.work/block-*")) and plan.differences != (_EARLIER,)):
            raise CheckpointError(
                f"stage `{plan.stage.name}` is unfinished and was begun with other settings:\n       "
                + "\n       ".join(plan.differences),
                where=folder,
                fix=(
                    "put them back to go on; "
                    + ("or go on with the new ones: --accept-changes; " if is_training else "")
                    + f"or start the stage over: --from {plan.stage.name} --force"
                ),
            )


def _reason(plan: PlannedStage, options: RunOptions) -> str:
    if options.force and plan.state != "new":
        return "runs again (--force)"
    shown = "; ".join(plan.differences[:4]) + ("; …" if len(plan.differences) > 4 else "")
    over = "goes on with other settings" if keeps_work(plan, options) else "starts over"
    return {
        "done": "runs again",
        "new": "starts",
        "unfinished": f"{over} ({shown})" if plan.differences else "goes on where it was",
        "changed": f"runs again ({shown})",
        "damaged": f"runs again ({shown})",
    }[plan.state]


def keeps_work(plan: PlannedStage, options: RunOptions) -> bool:
    """Whether a stage goes on from what an earlier try left in its folder."""
    if plan.state != "unfinished" or options.force:
        return False
    return not plan.differences or (options.accept_changes and plan.stage.implementation.run_rank is not None)


def begin(loaded: LoadedRecipe, plan: PlannedStage, options: RunOptions) -> None:
    """Make a planned stage's folder ready for its work."""
    keep = keeps_work(plan, options)
    begin_stage(
        loaded.run_dir / plan.stage.folder_name,
        fingerprint=plan.fingerprint,
        deciding=plan.deciding,
        parents=plan.parents,
        keep=keep,
        accept_changes=keep and options.accept_changes,
    )


def run_stage(loaded: LoadedRecipe, plan: PlannedStage, options: RunOptions) -> None:
    """Run one stage in a worker process of its own."""
    folder = loaded.run_dir / plan.stage.folder_name
    begin(loaded, plan, options)
    with tempfile.TemporaryDirectory(prefix="finetune-") as scratch:
        error_file = Path(scratch) / "error.json"
        arguments = [sys.executable, "-m", "finetune.worker", "stage", str(loaded.run_dir), plan.stage.name]
        process = subprocess.Popen(arguments, env={**os.environ, ERROR_VARIABLE: str(error_file)})
        try:
            code = process.wait()
        except BaseException:
            # The terminal's ^C has reached the worker too: let it end by itself, but not for long.
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise
        if error_file.exists():
            raise _read_error(error_file)
    if code == 0:
        return
    if code < 0:
        raise ResourceError(
            f"the process of stage `{plan.stage.name}` was ended by {signal.Signals(-code).name}",
            where=folder,
            fix="give the same command again: it goes on where it was (SIGKILL often means: out of memory)",
        )
    raise StageFailedError(f"stage `{plan.stage.name}` failed unexpectedly (see the traceback above)", where=folder)


class StageFailedError(FinetuneError):
    """A worker ended with a traceback of its own, which it has printed already."""


def _read_error(path: Path) -> FinetuneError:
    raw = json.loads(path.read_text(encoding="utf-8"))
    kind: type[FinetuneError] = getattr(errors, raw["kind"], FinetuneError)
    return kind(raw["what"], where=raw["where"], fix=raw["fix"])


def write_summary(loaded: LoadedRecipe) -> dict[str, Any]:
    """Collect the finished stages' manifests in ``summary.json``."""
    stages: list[dict[str, Any]] = []
    for stage in loaded.stages:
        try:
            manifest = read_manifest(loaded.run_dir / stage.folder_name)
        except CheckpointError:
            continue  # a later stage's, which is damaged: it runs again when its turn comes
        if manifest is not None:
            stages.append(
                {
                    "name": stage.name,
                    "kind": stage.kind,
                    "path": str(loaded.run_dir / stage.folder_name),
                    "seconds": manifest.seconds,
                    "metrics": manifest.metrics,
                }
            )
    summary = {
        "name": loaded.recipe.name,
        "recipe_sha256": loaded.sha256(),
        "finished": len(stages) == len(loaded.stages),
        "seconds": round(sum(float(stage["seconds"]) for stage in stages), 3),
        "stages": stages,
    }
    write_json(loaded.run_dir / "summary.json", summary)
    return summary


def describe(loaded: LoadedRecipe, stage: Stage) -> str:
    """One line on a finished stage: seconds and its headline figures."""
    manifest = read_manifest(loaded.run_dir / stage.folder_name)
    assert manifest is not None
    figures = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in manifest.metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and not key.endswith("_bytes")
    ]
    return f"done in {manifest.seconds:.1f} s" + (f" ({', '.join(figures[:6])})" if figures else "")
