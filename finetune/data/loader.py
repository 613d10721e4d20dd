"""The batches of one rank at one optimizer step: a function of the step alone, so a resumed run reads on exactly."""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import numpy as np

from finetune.data.batch import LENGTH_MULTIPLE, NO_TARGET, PADDING_DOCUMENT, Batch, BatchLayout
from finetune.data.dataset import TokenDataset, TokenRow
from finetune.data.order import EpochOrder, at_least, epoch_order

__all__ = ["LENGTH_MULTIPLE", "NO_TARGET", "PADDING_DOCUMENT", "Batch", "Loader", "StepLoader"]


class Loader(Protocol):
    """What the training loop asks of its data, step by step; the figures are those of all ranks."""

    num_steps: int

    @property
    def digest(self) -> str: ...

    @property
    def counts(self) -> dict[str, int]: ...

    @property
    def first_row(self) -> TokenRow: ...

    def batches(self, step: int) -> list[Batch]: ...

    def global_supervised_tokens(self, step: int) -> int: ...

    def num_tokens(self, step: int) -> int: ...

    def num_positions(self, step: int) -> int: ...


class StepLoader:
    """The micro-batches of each optimizer step, for one of ``world_size`` ranks.

    The rows of an epoch are shuffled by (seed, epoch) and, with ``packing``, packed to ``max_seq_length`` and the packs
    shuffled; without it, and with ``group_by_length``, rows of like length stand together (see ``order.py``). A step
    takes the next micro_batch_size * gradient_accumulation_steps * world_size of them (rows or packs); an epoch's last
    step takes what is left, so each row is used once an epoch. Which rows a step holds depends on that product, not on
    its factors. ``max_steps``, where given, decides the length in place of ``epochs``.

    Every epoch has the steps of the first. Sources that are mixed by weights can give another epoch more or fewer
    packs; where those need another number of steps, they are shared out evenly over the steps there are, each of which
    gets at least one.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        packing: bool,
        max_seq_length: int | None,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        world_size: int,
        rank: int,
        seed: int,
        epochs: float | None,
        max_steps: int | None,
        pad_token_id: int,
        group_by_length: bool = True,
        length_multiple: int = LENGTH_MULTIPLE,
    ) -> None:
        assert len(dataset), "a dataset without rows is refused where it is made"
        assert 0 <= rank < world_size
        assert epochs is not None or max_steps is not None
        assert not packing or max_seq_length is not None
        self._dataset = dataset
        self._pack_length = max_seq_length if packing else None
        self._groups = group_by_length and not packing
        self._seed = seed
        self._layout = BatchLayout(micro_batch_size, world_size, rank, max_seq_length, pad_token_id, length_multiple)
        self._global_batch = micro_batch_size * gradient_accumulation_steps * world_size
        self._known: tuple[int, EpochOrder] = (0, self._order(0))
        self.num_sequences = len(self._known[1])
        self.steps_per_epoch = math.ceil(self.num_sequences / self._global_batch)
        # Rounded first: 3 * (1 / 3) of an epoch must not become a step more by a last bit.
        self.num_steps = max_steps or max(1, math.ceil(round((epochs or 0) * self.steps_per_epoch, 6)))

    @property
    def digest(self) -> str:
        """The hash of the rows, and of how they are mixed."""
        if all(weight == 1 for weight in self._dataset.weights):
            return self._dataset.digest
        assert self._dataset.sources is not None
        mixed = hashlib.sha256(repr(self._dataset.weights).encode() + self._dataset.sources.tobytes())
        return hashlib.sha256((self._dataset.digest + mixed.hexdigest()).encode()).hexdigest()

    @property
    def counts(self) -> dict[str, int]:
        return self._dataset.counts

    @property
    def first_row(self) -> TokenRow:
        return self._dataset[0]

    def _order(self, epoch: int) -> EpochOrder:
        return epoch_order(
            self._dataset, seed=self._seed, epoch=epoch, pack_length=self._pack_length, group_by_length=self._groups
        )

    def _find(self, step: int) -> tuple[EpochOrder, int, int]:
        """The step's epoch, and its first and last sequence there."""
        assert 0 <= step < self.num_steps, f"step {step} of {self.num_steps}"
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._known[0] != epoch:
            self._known = (epoch, at_least(self._order(epoch), self.steps_per_epoch))
        order = self._known[1]
        if math.ceil(len(order) / self._global_batch) == self.steps_per_epoch:
            start, end = index * self._global_batch, min((index + 1) * self._global_batch, len(order))
        else:
            start, end = (len(order) * at // self.steps_per_epoch for at in (index, index + 1))
        return order, start, end

    def sequences(self, step: int) -> list[list[int]]:
        """The global step's sequences over all ranks, each a list of row indices (one without packing)."""
        order, start, end = self._find(step)
        sequences = order.sequences(start, end)
        if self._groups:
            # Neighbours share a micro-batch. The step holds the same rows in any order.
            sequences.sort(key=lambda rows: -int(self._dataset.lengths[rows[0]]))
        return sequences

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of optimizer step ``step`` (from 0): as many on every rank, all-padding ones where
        the epoch's last step has too few rows; fewer than gradient_accumulation_steps where no rank needs more."""
        return self._layout.batches(self.sequences(step), self._dataset.rows.__getitem__)

    def global_supervised_tokens(self, step: int) -> int:
        """Targets in the step over all ranks and micro-batches, without communication."""
        return self._sum(self._dataset.supervised, step)

    def num_tokens(self, step: int) -> int:
        """Tokens in the step over all ranks and micro-batches, padding left out."""
        return self._sum(self._dataset.lengths, step)

    def _sum(self, values: np.ndarray, step: int) -> int:
        order, start, end = self._find(step)
        return int(values[order.span(start, end)].sum(dtype=np.int64))

    def num_positions(self, step: int) -> int:
        """Positions that all ranks compute in the step, padding included."""
        return self._layout.num_positions([self._dataset.lengths[rows].sum() for rows in self.sequences(step)])

    def padding_share(self, num_steps: int = 200) -> float:
        """The part of the first steps' positions that is padding."""
        steps = range(min(num_steps, self.steps_per_epoch, self.num_steps))
        positions = sum(self.num_positions(step) for step in steps)
        return 1 - sum(self.num_tokens(step) for step in steps) / positions

    def fill_rate(self) -> float | None:
        """The part of the first epoch's packs that holds tokens; None without packing."""
        if self._pack_length is None:
            return None
        order = self._known[1] if self._known[0] == 0 else self._order(0)
        return float(self._dataset.lengths[order.rows].sum(dtype=np.int64)) / (len(order) * self._pack_length)
