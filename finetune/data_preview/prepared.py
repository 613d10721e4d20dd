"""All rows of a stage prepared as its training prepares them: their counts, their lengths, and how long it took."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.cache import ENTRY_NAME
from finetune.data.dataset import COUNTS
from finetune.data.encoding import Chunk, chunks_of, encode_in_order
from finetune.data.formats import Preference
from finetune.data_preview.samples import encoding_of, ways_on
from finetune.train.data import PreparedData, prepare_data
from finetune.train.settings import TrainSettings


@dataclass(frozen=True)
class Prepared:
    counts: dict[str, dict[str, int]]
    """Under ``data`` and ``eval_data``, or ``chosen`` and ``rejected``: rows and tokens by cause."""
    lengths: dict[str, np.ndarray]
    """int (N,): tokens of the rows that are kept."""
    seconds: float
    """What it took; where the token cache held the rows, what it took then."""
    data: PreparedData | None
    """None where rows are streamed and for preference rows, which nothing is kept of."""


def prepare(
    settings: TrainSettings, tokenizer: Any, config: Any, *, preferences: bool, show_progress: bool
) -> Prepared:
    """Raises what a run would raise before it trains."""
    started = time.perf_counter()
    if preferences:
        parts = {name: _ways(settings, name) for name in ("chosen", "rejected")}
    elif settings.streaming:
        parts = {name: chunks_of(rows) for name in ("data", "eval_data") if (rows := getattr(settings, name))}
    else:
        prepared = prepare_data(settings, tokenizer, config, show_progress=show_progress)
        entries = [json.loads((Path(folder) / ENTRY_NAME).read_text()) for folder in prepared.folders.values()]
        return Prepared(
            counts={name: dict(dataset.counts) for name, dataset in prepared.datasets.items()},
            lengths={name: dataset.lengths for name, dataset in prepared.datasets.items()},
            seconds=sum(entry["seconds"] for entry in entries),
            data=prepared,
        )
    counts, lengths = {}, {}
    for name, chunks in parts.items():
        counts[name], lengths[name] = _encoded(chunks, settings, tokenizer)
    return Prepared(counts, lengths, time.perf_counter() - started, None)


def _encoded(chunks: Iterable[Chunk], settings: TrainSettings, tokenizer: Any) -> tuple[dict[str, int], np.ndarray]:
    """(counts, lengths) of rows of which nothing else is kept."""
    counts: Counter[str] = Counter()
    lengths: list[np.ndarray] = []
    encoded = encode_in_order(iter(chunks), tokenizer, encoding_of(settings), num_workers=settings.data_workers)
    for _, rows in encoded:
        counts.update(rows.counts)
        lengths.append(rows.lengths)
    return {name: counts.get(name, 0) for name in COUNTS}, np.concatenate([np.empty(0, np.int32), *lengths])


def _ways(settings: TrainSettings, name: str) -> Iterable[Chunk]:
    """The rows' chosen or rejected way on, as conversations."""
    for chunk in chunks_of(settings.data):
        rows: Sequence[Any] = [
            (ways_on(example)[name] if isinstance(example, Preference) else example, place)
            for example, place in chunk.examples
        ]
        yield chunk._replace(examples=list(rows))
