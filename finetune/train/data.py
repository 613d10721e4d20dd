"""The rows of a training: prepared before the first step, once on each machine, or streamed."""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from finetune.data.dataset import TokenDataset
from finetune.data.encoding import Encoding
from finetune.data.holdout import hold_out
from finetune.data.loader import StepLoader
from finetune.data.streaming import StreamLoader
from finetune.data.tokens import open_prepared, prepare_dataset
from finetune.engine.lost_ranks import describe, rebuild
from finetune.errors import CheckpointError, FinetuneError, RecipeError
from finetune.files import write_json
from finetune.train.settings import TrainSettings

_POLL_SECONDS = 0.1
_PARTS = ("data", "eval_data")


@dataclass(frozen=True)
class PreparedData:
    """The token rows of ``data`` and ``eval_data``, where they aren't streamed or absent."""

    datasets: dict[str, TokenDataset] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)
    """Of their entries in the token cache."""


def prepare_data(
    settings: TrainSettings,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    *,
    show_progress: bool = True,
) -> PreparedData:
    """Make, or find in the token cache, the rows that ``settings`` ask for.

    Raises RecipeError where they are longer than the model can read, CheckpointError where a row holds a token that the
    model doesn't have, DataError for bad data.
    """
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and settings.max_seq_length > longest:
        raise RecipeError(
            f"rows of {settings.max_seq_length} tokens are longer than the model's max_position_embeddings, {longest}",
            where="max_seq_length",
            fix=f"set max_seq_length to at most {longest}",
        )
    prepared = PreparedData()
    for part in _parts(settings):
        dataset, folder = prepare_dataset(
            getattr(settings, part),
            tokenizer=tokenizer,
            max_seq_length=settings.max_seq_length,
            overlong=settings.overlong,
            train_on=settings.train_on,
            chat=settings.chat_options,
            max_dropped_share=settings.max_dropped_share,
            num_workers=settings.data_workers,
            show_progress=show_progress,
        )
        if dataset.largest_token >= text.vocab_size:
            raise CheckpointError(
                f"the tokenizer writes token {dataset.largest_token}, the model has {text.vocab_size}",
                fix="tokenizer and config.json must belong to one model",
            )
        prepared.datasets[part], prepared.folders[part] = dataset, str(folder)
    return prepared


def _parts(settings: TrainSettings) -> list[str]:
    return [part for part in _PARTS if getattr(settings, part) and not (part == "data" and settings.streaming)]


def prepare_data_together(
    settings: TrainSettings, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, *, folder: Path
) -> PreparedData:
    """``prepare_data`` on the first rank of each machine, whose result the machine's other ranks open.

    All wait for the files that those ranks leave in ``folder``, which every rank sees, and not in a collective: to
    prepare rows may take longer than a collective may wait, and a rank that was lost meanwhile ends the wait of the
    others as it does everywhere. An error of one is raised by all.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return prepare_data(settings, tokenizer, config)
    rank = dist.get_rank()
    machines: list[Any] = [None] * dist.get_world_size()
    # The first one's token gives the files a name that no earlier launch has used.
    dist.all_gather_object(machines, (_machine(), uuid.uuid4().hex[:12]))
    names, token = [name for name, _ in machines], machines[0][1]
    leaders = {name: names.index(name) for name in names}
    notes = {leader: f".prepared-{token}-{leader}.json" for leader in leaders.values()}
    leader = leaders[names[rank]]
    prepared = None
    if rank == 0:
        for left in folder.glob(".prepared-*.json"):
            if token not in left.name:
                left.unlink(missing_ok=True)
    if rank == leader:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            prepared = prepare_data(settings, tokenizer, config, show_progress=rank == 0)
        except FinetuneError as error:
            write_json(folder / notes[rank], {"error": describe(error)})
            raise
        write_json(folder / notes[rank], {"folders": prepared.folders})
    words = _wait_for(folder, notes)
    for word in words.values():
        if "error" in word:
            raise rebuild(word["error"])
    if prepared is None:
        folders = words[leader]["folders"]
        datasets = {part: open_prepared(Path(folders[part]), getattr(settings, part)) for part in _parts(settings)}
        prepared = PreparedData(datasets, folders)
    dist.barrier()  # all have read the notes
    if rank == leader:
        (folder / notes[rank]).unlink(missing_ok=True)
    return prepared


def _machine() -> str:
    """Tells machines apart that have one name, as containers may, and containers of one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return platform.node() + (boot.read_text(encoding="ascii").strip() if boot.is_file() else "")


def _wait_for(folder: Path, notes: dict[int, str]) -> dict[int, dict[str, Any]]:
    while True:
        # Listing the folder makes a network file system look again where a look for one name may be remembered.
        present = set(os.listdir(folder)) if folder.is_dir() else set()
        if present.issuperset(notes.values()):
            return {leader: json.loads((folder / name).read_text(encoding="utf-8")) for leader, name in notes.items()}
        time.sleep(_POLL_SECONDS)


def make_loader(
    prepared: PreparedData,
    settings: TrainSettings,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    *,
    seed: int,
    rank: int,
    world_size: int,
    say: Callable[[str], None],
) -> tuple[StepLoader | StreamLoader, TokenDataset | None]:
    """(what gives the steps' batches, the held-out rows); ``say`` is told how full the batches are."""
    common: dict[str, Any] = {
        "packing": settings.packing,
        "max_seq_length": settings.max_seq_length,
        "micro_batch_size": settings.micro_batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "world_size": world_size,
        "rank": rank,
        "seed": seed,
        "max_steps": settings.max_steps,
        "pad_token_id": pad_token_id(tokenizer),
        "group_by_length": settings.group_by_length,
    }
    held_out = prepared.datasets.get("eval_data")
    if settings.streaming:
        encoding = Encoding(settings.max_seq_length, settings.overlong, settings.train_on, settings.chat_options)
        stream = StreamLoader(
            settings.data,
            tokenizer=tokenizer,
            encoding=encoding,
            max_dropped_share=settings.max_dropped_share,
            vocab_size=config.get_text_config().vocab_size,
            buffer_rows=settings.streaming_buffer_rows,
            **common,
        )
        return stream, held_out
    dataset = prepared.datasets["data"]
    if settings.eval_rows is not None:
        dataset, held_out = hold_out(dataset, num_rows=settings.eval_rows, seed=seed)
    loader = StepLoader(dataset, epochs=settings.epochs, **common)
    fill = loader.fill_rate()
    how = f"{loader.num_sequences:,} packs, {fill:.1%} full" if fill is not None else f"{len(dataset):,} sequences"
    say(
        f"data: {len(dataset):,} rows of {int(dataset.lengths.sum(dtype='int64')):,} tokens, "
        f"{int(dataset.supervised.sum(dtype='int64')):,} of them targets; an epoch is {how} in "
        f"{loader.steps_per_epoch:,} steps; {loader.padding_share():.1%} of the first ones' positions are padding"
    )
    return loader, held_out


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any id will do: padding is masked by position, never by its id."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
