"""The batches of one rank at one optimizer step: a function of the step alone, so a resumed run reads on exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from finetune.data.dataset import TokenDataset
from finetune.data.packing import pack_rows

NO_TARGET = -100
PADDING_DOCUMENT = -1
LENGTH_MULTIPLE = 32
"""Batches are as long as their longest row rounded up to this: kernels that are compiled for each shape (oneDNN on a
cpu, torch.compile) meet few shapes again and again, for a few positions of padding."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B rows of S positions, each of one or more documents and then padding."""

    input_ids: torch.Tensor
    """int64 (B, S)"""
    targets: torch.Tensor
    """int64 (B, S): the token to predict AT each position, -100 where there is none; never one of another document."""
    position_ids: torch.Tensor
    """int64 (B, S), from 0 in each document; 0 on padding."""
    document_ids: torch.Tensor
    """int32 (B, S): 0, 1, … in each row, -1 on padding."""

    @property
    def num_tokens(self) -> int:
        return int((self.document_ids != PADDING_DOCUMENT).sum())

    @property
    def num_supervised_tokens(self) -> int:
        return int((self.targets != NO_TARGET).sum())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        tensors = (self.input_ids, self.targets, self.position_ids, self.document_ids)
        return Batch(*(tensor.to(device, non_blocking=non_blocking) for tensor in tensors))


class StepLoader:
    """The micro-batches of each optimizer step, for one of ``world_size`` ranks.

    The rows of an epoch are shuffled by (seed, epoch) and, with ``packing``, packed to ``max_seq_length`` and the packs
    shuffled. A step takes the next micro_batch_size * gradient_accumulation_steps * world_size of them (rows or packs);
    an epoch's last step takes what is left, so each row is used once an epoch. Which rows a step holds depends on that
    product, not on its factors. ``max_steps``, where given, decides the length in place of ``epochs``.
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
        length_multiple: int = LENGTH_MULTIPLE,
    ) -> None:
        assert dataset.rows, "a dataset without rows is refused where it is made"
        assert 0 <= rank < world_size
        assert epochs is not None or max_steps is not None
        assert not packing or max_seq_length is not None
        self._rows = dataset.rows
        self._packing = packing
        self._max_seq_length = max_seq_length
        self._micro_batch_size = micro_batch_size
        self._world_size = world_size
        self._rank = rank
        self._seed = seed
        self._pad_token_id = pad_token_id
        self._length_multiple = length_multiple
        self._global_batch = micro_batch_size * gradient_accumulation_steps * world_size
        self._lengths = np.array([len(row.input_ids) for row in dataset.rows], dtype=np.int64)
        self._supervised = np.array([np.count_nonzero(row.loss_mask) for row in dataset.rows], dtype=np.int64)
        self._epoch_order: tuple[int, list[list[int]]] = (0, self._shuffle(0))
        self.num_sequences = len(self._epoch_order[1])
        self.steps_per_epoch = math.ceil(self.num_sequences / self._global_batch)
        # Rounded first: 3 * (1 / 3) of an epoch must not become a step more by a last bit.
        self.num_steps = max_steps or max(1, math.ceil(round((epochs or 0) * self.steps_per_epoch, 6)))

    def _shuffle(self, epoch: int) -> list[list[int]]:
        """The epoch's sequences in order, each a list of row indices."""
        generator = np.random.default_rng([self._seed, epoch])
        order = generator.permutation(len(self._rows))
        if not self._packing:
            return [[row] for row in order.tolist()]
        assert self._max_seq_length is not None
        packs = [order[pack].tolist() for pack in pack_rows(self._lengths[order], self._max_seq_length)]
        return [packs[index] for index in generator.permutation(len(packs)).tolist()]

    def sequences(self, step: int) -> list[list[int]]:
        """The global step's sequences over all ranks, each a list of row indices (one without packing)."""
        assert 0 <= step < self.num_steps, f"step {step} of {self.num_steps}"
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, self._shuffle(epoch))
        return self._epoch_order[1][index * self._global_batch : (index + 1) * self._global_batch]

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of optimizer step ``step`` (from 0): as many on every rank, all-padding ones where
        the epoch's last step has too few rows; fewer than gradient_accumulation_steps where no rank needs more."""
        sequences = self.sequences(step)
        in_round = self._micro_batch_size * self._world_size
        # Dealt out like cards, so that ranks differ by at most one row in a round that isn't full.
        return [
            self._collate(sequences[start : start + in_round][self._rank :: self._world_size])
            for start in range(0, len(sequences), in_round)
        ]

    def global_supervised_tokens(self, step: int) -> int:
        """Targets in the step over all ranks and micro-batches, without communication."""
        rows = [row for sequence in self.sequences(step) for row in sequence]
        return int(self._supervised[rows].sum())

    def _collate(self, sequences: list[list[int]]) -> Batch:
        # An all-padding batch keeps two positions: attention code takes a single one for a step of cached decoding.
        num_rows = max(1, len(sequences))
        longest = max([2, *(int(self._lengths[rows].sum()) for rows in sequences)])
        rounded = -(-longest // self._length_multiple) * self._length_multiple
        longest = max(longest, min(rounded, self._max_seq_length or longest))
        input_ids = np.full((num_rows, longest), self._pad_token_id, dtype=np.int64)
        targets = np.full((num_rows, longest), NO_TARGET, dtype=np.int64)
        position_ids = np.zeros((num_rows, longest), dtype=np.int64)
        document_ids = np.full((num_rows, longest), PADDING_DOCUMENT, dtype=np.int32)
        for place, rows in enumerate(sequences):
            start = 0
            for document, row in enumerate(rows):
                ids, mask = self._rows[row].input_ids, self._rows[row].loss_mask
                end = start + len(ids)
                input_ids[place, start:end] = ids
                targets[place, start : end - 1] = np.where(mask[1:], ids[1:], NO_TARGET)
                position_ids[place, start:end] = np.arange(len(ids))
                document_ids[place, start:end] = document
                start = end
        return Batch(*map(torch.from_numpy, (input_ids, targets, position_ids, document_ids)))
