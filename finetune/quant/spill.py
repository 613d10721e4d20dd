"""Hidden states of the calibration samples: in memory up to a budget, the rest on disk, the same bits from either."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, MutableSequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor


class HiddenStates(MutableSequence[Tensor]):
    """A list of tensors of which those past the first ``budget_bytes`` lie in files of ``folder``, one each.

    A file is read and written whole, never mapped: mapped pages would count as this process's memory. Whoever holds a
    tensor that came from here holds its own copy (or the one in memory: don't write into it).
    """

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._held: list[Tensor | None] = []
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._held_bytes = 0

    def another(self, name: str) -> HiddenStates:
        """An empty list with what is left of the budget, in a folder of its own."""
        return HiddenStates(self._folder.with_name(name), max(0, self._budget_bytes - self._held_bytes))

    @property
    def num_spilled(self) -> int:
        return sum(tensor is None for tensor in self._held)

    def _file(self, position: int) -> Path:
        return self._folder / f"chunk-{position:06d}.bin"

    def _place(self, position: int, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        assert tensor.device.type == "cpu", "hidden states wait on the cpu"
        before = self._held[position]
        self._held_bytes -= 0 if before is None else before.nbytes
        self._forms[position] = tensor.shape, tensor.dtype
        if self._held_bytes + tensor.nbytes <= self._budget_bytes:
            self._held[position] = tensor
            self._held_bytes += tensor.nbytes
            return
        self._held[position] = None
        self._folder.mkdir(parents=True, exist_ok=True)
        tensor.view(-1).view(torch.uint8).numpy().tofile(self._file(position))

    @overload
    def __getitem__(self, position: int) -> Tensor: ...
    @overload
    def __getitem__(self, position: slice) -> list[Tensor]: ...  # type: ignore[override]
    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return [self[index] for index in range(*position.indices(len(self)))]
        index = range(len(self))[position]
        held = self._held[index]
        if held is not None:
            return held
        shape, dtype = self._forms[index]
        flat = torch.from_numpy(np.fromfile(self._file(index), dtype=np.uint8))
        return flat.view(dtype).view(shape)

    def __setitem__(self, position: Any, tensor: Any) -> None:
        self._place(range(len(self))[position], tensor)

    def insert(self, position: int, tensor: Tensor) -> None:
        assert position >= len(self), "chunks are added at the end alone"
        self._held.append(None)
        self._forms.append((tensor.shape, tensor.dtype))
        self._place(len(self) - 1, tensor)

    def __delitem__(self, position: Any) -> None:
        raise NotImplementedError("no chunk is ever dropped")

    def __len__(self) -> int:
        return len(self._held)


class OneOf(MutableSequence[Tensor]):
    """One entry of a list, as a list; read only when it is asked for."""

    def __init__(self, owner: MutableSequence[Tensor], position: int) -> None:
        self._owner = owner
        self._position = position

    def __iter__(self) -> Iterator[Tensor]:
        yield self._owner[self._position]

    def __getitem__(self, position: Any) -> Any:
        assert position in (0, -1)
        return self._owner[self._position]

    def __setitem__(self, position: Any, tensor: Any) -> None:
        assert position in (0, -1)
        self._owner[self._position] = tensor

    def __len__(self) -> int:
        return 1

    def insert(self, position: int, tensor: Tensor) -> None:
        raise NotImplementedError("a view has one entry")

    def __delitem__(self, position: Any) -> None:
        raise NotImplementedError("a view has one entry")
