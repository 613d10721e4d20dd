"""Reads a stored tensor band by band, in the order of its values, whatever boxes it was cut into.

A band is some rows of the first dimension. Most tensors are cut along rows, or at any element of their flat order:
they are read as one dimension, so a band is as small as wished. Only a tensor cut along a later dimension takes a whole
row a band, and only one that was saved transposed is read at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from finetune.checkpoint.stored import StoredTensor, locate
from finetune.checkpoint.torch_file import Extent, Record, read_into

BAND_BYTES = 2**20
"""1 MiB stays in a core's cache between reading, casting, hashing and writing: 2 GB of float32 took 3.6 s of processor
time and 397 MB at the peak; with 8 MiB 4.1 s and 525 MB, as freed blocks of that size go back to the system."""


class BandReader:
    """The ``stored`` tensor's values as bands. Raises CheckpointError that names a file which can't be read."""

    def __init__(self, stored: StoredTensor, *, band_bytes: int = BAND_BYTES) -> None:
        self.stored = stored
        self.extents = locate(stored)
        self.grid = stored.shape or (1,)
        if stored.flat:
            self.grid = (stored.num_elements,)
        else:
            flat = [_as_flat(extent, stored.shape) for extent in self.extents]
            if all(flat):
                self.grid = (stored.num_elements,)
                self.extents = [extent for extent in flat if extent]
        row_bytes = math.prod(self.grid[1:]) * stored.dtype.itemsize
        self.rows_per_band = max(1, band_bytes // max(1, row_bytes))
        if not all(extent.contiguous for extent in self.extents):
            self.rows_per_band = self.grid[0]

    @property
    def records(self) -> set[Record]:
        return {extent.record for extent in self.extents}

    def bands(self, *, whole: bool = False) -> Iterator[tuple[int, int]]:
        """(first row, row after the last) of each band."""
        step = self.grid[0] if whole else self.rows_per_band
        for start in range(0, self.grid[0], step):
            yield start, min(start + step, self.grid[0])

    def read(self, start: int, end: int) -> torch.Tensor:
        """The rows from ``start`` up to ``end`` of ``grid``, as stored: (end - start, *grid[1:])."""
        band = torch.empty((end - start, *self.grid[1:]), dtype=self.stored.dtype)
        for extent in self.extents:
            first = max(start, extent.offsets[0])
            last = min(end, extent.offsets[0] + extent.sizes[0])
            if first >= last:
                continue
            target = band[first - start : last - start]
            for dim, (offset, size) in enumerate(zip(extent.offsets[1:], extent.sizes[1:], strict=True), start=1):
                target = target.narrow(dim, offset, size)
            if not extent.contiguous:
                target.copy_(_read_strided(extent, band.dtype))
                continue
            skipped = (first - extent.offsets[0]) * extent.strides[0] * band.element_size()
            if target.is_contiguous():
                read_into(extent.path, extent.start_bytes + skipped, bytes_of(target))
            else:
                box = torch.empty(target.shape, dtype=band.dtype)
                read_into(extent.path, extent.start_bytes + skipped, bytes_of(box))
                target.copy_(box)
        return band


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """The whole tensor on the cpu, as saved."""
    reader = BandReader(stored)
    return reader.read(0, reader.grid[0]).reshape(stored.shape)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


def _as_flat(extent: Extent, shape: Sequence[int]) -> Extent | None:
    """The same box as a range of the tensor's elements in row-major order; None where it isn't one."""
    if not extent.contiguous or any(own != all_ for own, all_ in zip(extent.sizes[1:], shape[1:], strict=True)):
        return None
    start = extent.offsets[0] * math.prod(shape[1:]) if shape else 0
    return dataclasses.replace(extent, offsets=(start,), sizes=(extent.num_elements,), strides=(1,))


def _read_strided(extent: Extent, dtype: torch.dtype) -> torch.Tensor:
    span = 1 + sum((size - 1) * step for size, step in zip(extent.sizes, extent.strides, strict=True))
    values = torch.empty(span, dtype=dtype)
    read_into(extent.path, extent.start_bytes, bytes_of(values))
    return values.as_strided(extent.sizes, extent.strides)
