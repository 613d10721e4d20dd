"""Several processes of one quantization: each streams its share of the calibration samples, all find the same codes.

What is summed over samples (Hessians, counts, gradients) is summed over ranks; what is chosen on the first samples is
chosen by rank 0, and what is expensive is dealt out and broadcast. A process alone asks nobody and computes what it
would have computed without this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

ENDS_OF_TENSORS = torch.device("cpu")
"""Where what is pickled travels: a tensor of a GPU would come out on the sender's."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of the default process group; by default a process alone, whatever group there is.

    Every rank calls the same methods in the same order. Tensors may lie on the cpu or on the rank's GPU.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over ranks, the same bits on all of them."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def max_(self, tensors: Iterable[Tensor]) -> None:
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def total(self, value: float) -> float:
        if self.size == 1:
            return value
        sum_1 = torch.tensor([value], dtype=torch.float64)
        self.sum_([sum_1])
        return sum_1.item()

    def broadcast(self, value: T, source: int = 0) -> T:
        """``value`` of rank ``source``, on every rank; tensors in it lie on the cpu."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=source, device=ENDS_OF_TENSORS)
        received: T = values[0]
        return received

    def broadcast_tensors(self, tensors: Mapping[str, Tensor], note: T, source: int) -> tuple[dict[str, Tensor], T]:
        """``tensors`` and what there is to say of them, from rank ``source``: elsewhere both are ignored. Each arrives
        on a device of the kind it lies on, bit by bit."""
        if self.size == 1:
            return dict(tensors), note
        forms = {name: (tensor.shape, tensor.dtype, tensor.device.type) for name, tensor in tensors.items()}
        forms, note = self.broadcast((forms, note), source)
        received = {}
        for name, (shape, dtype, device) in forms.items():
            if self.rank == source:
                tensor = tensors[name].contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=source)  # no backend knows all types
            received[name] = tensor
        return received, note

    def gather(self, value: T) -> list[T]:
        """Each rank's ``value`` on rank 0, nothing on the others; tensors in it lie on the cpu."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, dst=0)
        return values or []

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1))


ALONE = Ranks()


@dataclass(frozen=True)
class Share:
    """The samples of one rank: every ``size``-th from its own number on, in chunks of ``chunk_size``.

    So any few samples that follow one another, those of a tuning step say, are spread evenly over the ranks.
    """

    num_tokens: Sequence[int]
    """Of each sample of all ranks, without padding."""
    chunk_size: int
    rank: int = 0
    size: int = 1

    @property
    def chunks(self) -> list[range]:
        """The numbers of the samples in each chunk of this rank."""
        mine = range(self.rank, len(self.num_tokens), self.size)
        return [mine[start : start + self.chunk_size] for start in range(0, len(mine), self.chunk_size)]

    @property
    def batches(self) -> list[range]:
        """All samples in chunks, as one process alone would have them."""
        everyone = range(len(self.num_tokens))
        return [everyone[start : start + self.chunk_size] for start in range(0, len(everyone), self.chunk_size)]

    def rows(self, samples: range) -> list[tuple[int, slice]]:
        """Where this rank has those of consecutive ``samples`` that are its own: chunks, and rows in each."""
        first = -(-(samples.start - self.rank) // self.size)
        stop = -(-(samples.stop - self.rank) // self.size)
        found = []
        while first < stop:
            chunk, row = divmod(first, self.chunk_size)
            end = min(stop - chunk * self.chunk_size, self.chunk_size)
            found.append((chunk, slice(row, end)))
            first += end - row
        return found

    def tokens_in(self, samples: Iterable[int]) -> int:
        return sum(self.num_tokens[number] for number in samples)


Piece = tuple[int, slice]
"""A rank, and rows of a matrix that are its work."""


def deal(shapes: Sequence[tuple[int, int]], num_ranks: int) -> list[list[Piece]]:
    """Who quantizes what of matrices (rows, columns) that wait for nothing but their Hessians.

    Where there are enough of them each is one rank's, the largest dealt out first; fewer are cut into as many pieces
    of rows as there are ranks.
    """
    if num_ranks == 1:
        return [[(0, slice(0, num_rows))] for num_rows, _ in shapes]
    if len(shapes) < num_ranks:
        return [[(rank, rows) for rank, rows in enumerate(_cut(num_rows, num_ranks))] for num_rows, _ in shapes]
    loads = [0] * num_ranks
    dealt: list[list[Piece]] = [[] for _ in shapes]
    costs = [num_columns**2 * (num_columns + num_rows) for num_rows, num_columns in shapes]
    for index in sorted(range(len(shapes)), key=lambda index: -costs[index]):
        rank = loads.index(min(loads))
        loads[rank] += costs[index]
        dealt[index] = [(rank, slice(0, shapes[index][0]))]
    return dealt


def _cut(num_rows: int, num_ranks: int) -> list[slice]:
    ends = [num_rows * rank // num_ranks for rank in range(num_ranks + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends) if start < stop]
