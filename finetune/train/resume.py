"""What a checkpoint says about the run that wrote it, and whether a run may go on from it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from finetune.artifact import BEFORE_NAME
from finetune.checkpoint.commit import Found
from finetune.errors import CheckpointError
from finetune.train.settings import TrainSettings

# These don't change what is learned. Rows a step depend on the product of the batch factors, which is compared.
_FREE = {
    "save_every_steps",
    "keep_checkpoints",
    "eval_data",
    "eval_rows",
    "eval_every_steps",
    "dtype",
    "max_shard_size",
    "gradient_checkpointing",
    "activation_offload",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "data",
    "data_workers",
    "epochs",
    "max_steps",
}


_ROWS = "micro_batch_size x gradient_accumulation_steps x num_processes"
_DATA = "data (sha256 of the tokens)"


def deciding_settings(
    settings: TrainSettings, *, data_digest: str, num_steps: int, world_size: int, seed: int
) -> dict[str, Any]:
    """Plain JSON: everything that decides the weights of each step, the data by its tokens and not by its path."""
    names = sorted(set(TrainSettings.model_fields) - _FREE)
    resolved = {name: value for name, value in settings.resolved().items() if name in names}
    rows_a_step = settings.micro_batch_size * settings.gradient_accumulation_steps * world_size
    return {
        **resolved,
        _ROWS: rows_a_step,
        "num_steps": num_steps,
        "seed": seed,
        _DATA: data_digest[:16],
    }


def settings_changed(found: Found, present: dict[str, Any], *, accepts: bool) -> bool:
    """Whether the checkpoint was written with other settings.

    Raises CheckpointError that shows each difference as ``key: old → new``, unless the user ``accepts`` them.
    """
    saved = found.extra["settings"]
    differences = [
        f"{key}: {saved.get(key)} → {present.get(key)}"
        for key in sorted(saved.keys() | present.keys())
        if saved.get(key) != present.get(key)
    ]
    if differences and not accepts:
        raise CheckpointError(
            f"the checkpoint was written with other settings; {'; '.join(differences)}",
            where=found.path,
            fix="restore the settings to go on, go on with the new ones (--accept-changes), or start anew (--force)",
        )
    return bool(differences)


def step_under(found: Found, present: dict[str, Any], *, num_sequences: int | None) -> int:
    """How many steps of the ``present`` rows a step the checkpoint's progress is, rounded down: no row is left out.

    ``num_sequences``: of an epoch, whose last step takes what is left; None where rows are streamed, whose place in the
    data the checkpoint knows without the number of steps. Raises CheckpointError when the data are others,
    where a place in the old ones means nothing, or all is done.
    """
    saved = found.extra["settings"]
    if saved.get(_DATA) != present[_DATA]:
        raise CheckpointError(
            "the checkpoint was written while training on other data, so there is no place to go on from",
            where=found.path,
            fix="restore the data, or start anew (--force), for example from the consolidated model",
        )
    before, now = int(saved[_ROWS]), int(present[_ROWS])
    if num_sequences is None:
        step = found.step * before // now
    else:
        epoch, index = divmod(found.step, math.ceil(num_sequences / before))
        step = epoch * math.ceil(num_sequences / now) + index * before // now
    if step >= present["num_steps"]:
        raise CheckpointError(
            f"the checkpoint is at step {step} of the new settings, which end with step {present['num_steps']}",
            where=found.path,
            fix="give more epochs or max_steps, or restore the settings",
        )
    return step


def taken(folder: Path) -> None:
    """Forget what the stage was begun with before the changes that are accepted now: its checkpoints are of these."""
    (folder / BEFORE_NAME).unlink(missing_ok=True)


def set_aside(folder: Path, *, found_step: int, step: int) -> None:
    """Keep the metrics so far under another name where steps are counted anew."""
    metrics = folder / "metrics.jsonl"
    if step != found_step and metrics.is_file():
        metrics.replace(folder / f"metrics-until-step-{found_step}.jsonl")
