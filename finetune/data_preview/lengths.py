"""How long the rows are, how well they fill their batches, and how many steps they make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from finetune.data.loader import StepLoader
from finetune.train.settings import TrainSettings

PERCENTILES = (0, 25, 50, 75, 90, 95, 99, 100)
BINS = 20


@dataclass(frozen=True)
class Lengths:
    """Of rows in tokens, after cutting and splitting."""

    percentiles: dict[str, int]
    """``{"0": the shortest, "50": the median, "100": the longest}`` and others between."""
    mean: float
    edges: list[int]
    """Bin i of the histogram holds lengths from edges[i] up to, without it, edges[i + 1]."""
    counts: list[int]


@dataclass(frozen=True)
class Batching:
    """What the loader makes of the rows in an epoch."""

    packing: bool
    num_sequences: int
    """Rows of a batch: packs of rows with ``packing``."""
    fill_rate: float | None
    """The part of the packs that holds tokens; None without packing."""
    padding_share: float
    """Positions of the batches that hold no token, over all that are computed; of the epoch's first steps."""
    steps_per_epoch: int
    num_steps: int
    sequences_per_step: int
    world_size: int
    held_out_rows: int
    """Rows that ``eval_rows`` sets aside."""


def lengths_of(lengths: np.ndarray) -> Lengths:
    """``lengths`` is int (N,), N at least 1."""
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(longest + 1 - shortest) // BINS))
    width = _round_up(width)
    start = shortest // width * width
    edges = np.arange(start, longest + width + 1, width)
    counts, _ = np.histogram(lengths, bins=edges)
    used = int(np.flatnonzero(counts)[-1]) + 1
    values = np.percentile(lengths, PERCENTILES, method="inverted_cdf")
    return Lengths(
        percentiles={str(percent): int(value) for percent, value in zip(PERCENTILES, values, strict=True)},
        mean=float(lengths.mean()),
        edges=[*edges[:used].tolist(), min(int(edges[used]), longest + 1)],
        counts=counts[:used].tolist(),
    )


def _round_up(width: int) -> int:
    """The next of 1, 2, 5, 10, 20, 50, …: bins begin at round numbers."""
    scale = 1
    while True:
        for factor in (1, 2, 5):
            if factor * scale >= width:
                return factor * scale
        scale *= 10


def batching_of(loader: StepLoader, settings: TrainSettings, *, world_size: int, held_out_rows: int) -> Batching:
    return Batching(
        packing=settings.packing,
        num_sequences=loader.num_sequences,
        fill_rate=loader.fill_rate(),
        padding_share=loader.padding_share(),
        steps_per_epoch=loader.steps_per_epoch,
        num_steps=loader.num_steps,
        sequences_per_step=settings.micro_batch_size * settings.gradient_accumulation_steps * world_size,
        world_size=world_size,
        held_out_rows=held_out_rows,
    )
