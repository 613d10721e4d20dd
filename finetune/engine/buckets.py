"""Gradients of several processes, added up in float32 in a few large all-reduces that start during the backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_ELEMENTS = 1 << 23
"""Elements of one all-reduce, 32 MiB: a small model needs one, a large one's first starts early in the backward."""


class GradientBuckets:
    """float32 room for each parameter's gradient, laid out so that neighbours in the backward share an all-reduce.

    A bucket's all-reduce starts when the last of its parameters is final, but never before the bucket ahead of it:
    all ranks then issue the same collectives in the same order whichever of their parameters were used.
    """

    def __init__(self, shapes: Sequence[torch.Size], device: torch.device) -> None:
        self._shapes = shapes
        self._device = device
        self._members: list[list[int]] = []
        size = BUCKET_ELEMENTS + 1
        # Gradients become final in about the reverse order of the parameters.
        for index in reversed(range(len(shapes))):
            if size + shapes[index].numel() > BUCKET_ELEMENTS:
                self._members.append([])
                size = 0
            self._members[-1].append(index)
            size += shapes[index].numel()
        self._bucket_of = {index: number for number, members in enumerate(self._members) for index in members}
        self.clear()

    def clear(self) -> None:
        """Free all gradients."""
        self.grads: list[Tensor | None] = [None] * len(self._shapes)
        self._flats: list[Tensor | None] = [None] * len(self._members)
        self._num_open = [len(members) for members in self._members]
        self._num_started = 0
        self._works: list[dist.Work] = []

    def add(self, index: int, grad: Tensor, *, is_final: bool) -> None:
        """Add one micro-batch's gradient; ``is_final`` with the last micro-batch's."""
        self._allocate(self._bucket_of[index])
        total = self.grads[index]
        assert total is not None
        total.add_(grad)
        if is_final:
            self._num_open[self._bucket_of[index]] -= 1
            while self._num_started < len(self._members) and self._num_open[self._num_started] == 0:
                self._start()

    def finish(self) -> None:
        """Wait until every gradient is the sum over ranks; unused parameters take part with zeros."""
        while self._num_started < len(self._members):
            self._start()
        for work in self._works:
            work.wait()
        self._works.clear()

    def _start(self) -> None:
        self._allocate(self._num_started)
        work = dist.all_reduce(self._flats[self._num_started], async_op=True)
        assert work is not None
        self._works.append(work)
        self._num_started += 1

    def _allocate(self, bucket: int) -> None:
        if self._flats[bucket] is not None:
            return
        members = self._members[bucket]
        sizes = [self._shapes[index].numel() for index in members]
        flat = self._flats[bucket] = torch.zeros(sum(sizes), dtype=torch.float32, device=self._device)
        for index, part in zip(members, flat.split(sizes), strict=True):
            self.grads[index] = part.view(self._shapes[index])
