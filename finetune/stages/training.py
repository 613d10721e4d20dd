"""``pretrain`` and ``sft``: the same loop on text or on conversations, then the consolidated model."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from finetune.data.settings import DatasetSettings
from finetune.errors import RecipeError
from finetune.files import published_folder
from finetune.model.settings import ScratchSettings
from finetune.stages.base import STAGES, StageContext, StageKind, StageSettings
from finetune.train.settings import TrainSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHECKPOINTS, INITIAL = "checkpoints", "initial"


class TrainStage(TrainSettings, StageSettings):
    not_deciding: ClassVar[frozenset[str]] = StageSettings.not_deciding | {
        *("save_every_steps", "keep_checkpoints", "gradient_checkpointing", "activation_offload"),
        *("micro_batch_size", "gradient_accumulation_steps", "data_workers"),
    }


def batch(settings: TrainStage, world_size: int) -> dict[str, Any]:
    rows = settings.micro_batch_size * settings.gradient_accumulation_steps * world_size
    return {"micro_batch_size x gradient_accumulation_steps x ranks": rows}


def run(context: StageContext) -> dict[str, Any]:
    """Prepare on one process, train on all ranks, consolidate on one process."""
    from finetune.engine.launch import run_ranks, under_torchrun

    if under_torchrun():
        return _run_joined(context)
    model_folder = starting_model(context)
    num_processes = context.launch.num_processes or 1
    if num_processes == 1:
        train_rank(context)
    else:
        _prepare_rows(context, model_folder)
        run_ranks(
            context.rank_arguments(),
            num_processes=num_processes,
            device=context.launch.device or "cpu",
            log_dir=context.folder / "logs",
        )
    return finish(context)


def _run_joined(context: StageContext) -> dict[str, Any]:
    """The same under an outside torchrun: this process is one rank, rank 0 does what one process does."""
    import torch.distributed as dist

    from finetune.engine.launch import process_group

    with process_group(context.launch.device or "cpu", timeout_seconds=context.launch.timeout_seconds):
        if dist.get_rank() == 0:
            starting_model(context)
        else:
            _wait_for_starting_model(context)
        train_rank(context)
        # No barrier behind it: to consolidate a large model takes longer than a collective may wait.
        return finish(context) if dist.get_rank() == 0 else {}


def _prepare_rows(context: StageContext, model_folder: Path) -> None:
    """Leave the rows in the token cache before there are ranks that could wait for one another."""
    from finetune.model.load import load_config, load_tokenizer
    from finetune.train.data import prepare_data

    prepare_data(context.settings, load_tokenizer(model_folder), load_config(model_folder))


def _wait_for_starting_model(context: StageContext) -> None:
    """Not in a collective, which may wait for less long than it takes to learn a tokenizer."""
    while context.input_model is None and INITIAL not in os.listdir(context.folder):
        time.sleep(0.2)


def starting_model(context: StageContext) -> Path:
    """The folder of the model to train: the input, or the recipe's ``scratch`` model, built at the first call."""
    if context.input_model is not None:
        return context.input_model
    folder = context.folder / INITIAL
    if folder.is_dir():
        return folder
    scratch = context.model.scratch
    assert scratch is not None
    from finetune.model.scratch import create_model

    tokenizer = scratch_tokenizer(scratch, context.settings.data)
    with published_folder(folder) as temporary:
        create_model(scratch.config, tokenizer, seed=context.seed, out=temporary)
    return folder


def scratch_tokenizer(scratch: ScratchSettings, data: list[DatasetSettings]) -> PreTrainedTokenizerBase:
    """The tokenizer of a ``scratch`` model whose first training stage has ``data``, learned anew at each call."""
    from finetune.data.text import raw_texts
    from finetune.model.tokenizer import train_tokenizer

    template = None
    if scratch.tokenizer.chat_template:
        template = Path(scratch.tokenizer.chat_template).read_text(encoding="utf-8")
    sources = data
    if scratch.tokenizer.data:
        sources = [DatasetSettings.model_validate(source.model_dump()) for source in scratch.tokenizer.data]
    return train_tokenizer(raw_texts(sources), vocab_size=scratch.tokenizer.vocab_size, chat_template=template)


def train_rank(context: StageContext) -> None:
    """Train on this rank; rank 0 leaves the loop's own figures in ``training.json``."""
    from finetune.files import write_json
    from finetune.train.loop import train

    metrics = train(
        model_folder=starting_model(context),
        settings=context.settings,
        zero=context.zero,
        launch_device=context.launch.device or "cpu",
        seed=context.seed,
        folder=context.folder,
        attn_implementation=context.model.attn_implementation,
        accept_changes=context.accept_changes,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        write_json(context.folder / "training.json", metrics)


def finish(context: StageContext) -> dict[str, Any]:
    """Consolidate the last checkpoint to ``model/`` and return the stage's metrics."""
    from finetune.checkpoint.commit import find_checkpoint
    from finetune.checkpoint.consolidate import consolidate

    settings: TrainStage = context.settings
    found = find_checkpoint(context.folder / CHECKPOINTS)
    if found is None:
        raise RecipeError("training left no checkpoint", where=context.folder, fix="run the stage again with --force")
    report = consolidate(
        found.path,
        out=context.folder / "model",
        dtype=settings.dtype,
        max_shard_size_bytes=settings.max_shard_size_bytes,
    )
    shutil.rmtree(context.folder / INITIAL, ignore_errors=True)
    metrics: dict[str, Any] = json.loads((context.folder / "training.json").read_text(encoding="utf-8"))
    metrics["consolidate"] = report
    return metrics


def data_files(settings: TrainStage) -> list[str]:
    return [file for source in [*settings.data, *settings.eval_data] for file in source.data_files()]


for kind in ("pretrain", "sft"):
    STAGES.register(kind)(
        StageKind(
            settings=TrainStage,
            run=run,
            yields_model=True,
            data_files=data_files,
            batch=batch,
            run_rank=train_rank,
            can_build_model=True,
        )
    )
