"""What a checkpoint says about the run that wrote it, and whether a run may go on from it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from finetune.data.tokens import TokenDataset
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
    "epochs",
    "max_steps",
}


def deciding_settings(
    settings: TrainSettings, *, dataset: TokenDataset, num_steps: int, world_size: int, seed: int
) -> dict[str, Any]:
    """Plain JSON: everything that decides the weights of each step, the data by its tokens and not by its path."""
    names = sorted(set(TrainSettings.model_fields) - _FREE)
    resolved = {name: value for name, value in settings.resolved().items() if name in names}
    rows_a_step = settings.micro_batch_size * settings.gradient_accumulation_steps * world_size
    return {
        **resolved,
        "micro_batch_size x gradient_accumulation_steps x num_processes": rows_a_step,
        "num_steps": num_steps,
        "seed": seed,
        "data (sha256 of the tokens)": _digest(dataset),
    }


def _digest(dataset: TokenDataset) -> str:
    digest = hashlib.sha256()
    for row in dataset.rows:
        digest.update(len(row.input_ids).to_bytes(8, "little"))
        digest.update(row.input_ids.tobytes())
        digest.update(row.loss_mask.tobytes())
    return digest.hexdigest()[:16]


def require_same_settings(saved: dict[str, Any], present: dict[str, Any], checkpoint: Path) -> None:
    """Raise CheckpointError that shows each difference as ``key: old → new``: a resumed run must be the same run."""
    differences = [
        f"{key}: {saved.get(key)} → {present.get(key)}"
        for key in sorted(saved.keys() | present.keys())
        if saved.get(key) != present.get(key)
    ]
    if differences:
        raise CheckpointError(
            f"the checkpoint was written with other settings; {'; '.join(differences)}",
            where=checkpoint,
            fix="restore the settings to go on, or remove the checkpoints (--force) to start anew",
        )
