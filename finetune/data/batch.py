"""Rows to the tensors of a micro-batch, and the micro-batches of a step to ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from finetune.data.dataset import TokenRow

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


@dataclass(frozen=True)
class BatchLayout:
    """How a step's sequences become micro-batches: everything but the rows themselves."""

    micro_batch_size: int
    world_size: int
    rank: int
    max_seq_length: int | None
    pad_token_id: int
    length_multiple: int = LENGTH_MULTIPLE

    def deal(self, num_sequences: int) -> list[list[range]]:
        """For each micro-batch of a step the sequences of each rank: neighbours, which are alike in length where the
        step is sorted by it. Ranks differ by at most one row in a round that isn't full."""
        in_round = self.micro_batch_size * self.world_size
        rounds = []
        for start in range(0, num_sequences, in_round):
            each, more = divmod(min(in_round, num_sequences - start), self.world_size)
            sizes = [each + (rank < more) for rank in range(self.world_size)]
            ends = [start + sum(sizes[: rank + 1]) for rank in range(self.world_size)]
            rounds.append([range(end - size, end) for end, size in zip(ends, sizes, strict=True)])
        return rounds

    def width(self, longest: int) -> int:
        """Positions of a micro-batch whose longest sequence has so many tokens."""
        # An all-padding batch keeps two positions: attention code takes a single one for a step of cached decoding.
        longest = max(2, longest)
        rounded = -(-longest // self.length_multiple) * self.length_multiple
        return max(longest, min(rounded, self.max_seq_length or longest))

    def num_positions(self, lengths: Sequence[int] | np.ndarray) -> int:
        """Positions that all ranks compute in a step whose sequences have ``lengths`` (N,) tokens."""
        sizes = np.asarray(lengths)
        return sum(
            max(1, len(dealt)) * self.width(int(sizes[dealt.start : dealt.stop].max(initial=0)))
            for parts in self.deal(len(sizes))
            for dealt in parts
        )

    def batches(self, sequences: Sequence[Sequence[int]], row: Callable[[int], TokenRow]) -> list[Batch]:
        """This rank's micro-batches of a step's ``sequences`` of row numbers: as many on every rank, all-padding ones
        where there are too few sequences."""
        return [
            self.collate([[row(number) for number in sequences[at]] for at in parts[self.rank]])
            for parts in self.deal(len(sequences))
        ]

    def collate(self, sequences: Sequence[Sequence[TokenRow]]) -> Batch:
        num_rows = max(1, len(sequences))
        width = self.width(max((sum(len(row.input_ids) for row in rows) for rows in sequences), default=0))
        input_ids = np.full((num_rows, width), self.pad_token_id, dtype=np.int64)
        targets = np.full((num_rows, width), NO_TARGET, dtype=np.int64)
        position_ids = np.zeros((num_rows, width), dtype=np.int64)
        document_ids = np.full((num_rows, width), PADDING_DOCUMENT, dtype=np.int32)
        for place, rows in enumerate(sequences):
            start = 0
            for document, row in enumerate(rows):
                ids, mask = row.input_ids, row.loss_mask
                end = start + len(ids)
                input_ids[place, start:end] = ids
                targets[place, start : end - 1] = np.where(mask[1:], ids[1:], NO_TARGET)
                position_ids[place, start:end] = np.arange(len(ids))
                document_ids[place, start:end] = document
                start = end
        return Batch(*map(torch.from_numpy, (input_ids, targets, position_ids, document_ids)))
