"""Where a sharded checkpoint keeps each tensor, the proof that it is all there.

The layout is torch.distributed.checkpoint's: ``.metadata`` (a pickle) names the pieces of each tensor, and each piece
is a byte range of a ``*.distcp`` file. A pickle can run code, so only the classes that describe a layout are let in.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from finetune.checkpoint.torch_file import Extent, TorchFile
from finetune.errors import CheckpointError

METADATA_NAME = ".metadata"
_FIX = "this checkpoint can't be used; take an earlier one"

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)},
    "collections": {"OrderedDict"},
    # The folder that it was saved to: pathlib moved between Python versions.
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
}


class _LayoutUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class("pathlib" if module == "pathlib._local" else module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place there")


def read_metadata(folder: Path) -> Metadata:
    """The layout of ``folder``. Raises CheckpointError when it is missing, damaged, or names any other class."""
    path = folder / METADATA_NAME
    try:
        with path.open("rb") as stream:
            metadata = _LayoutUnpickler(stream).load()
    except FileNotFoundError as cause:
        raise CheckpointError("the checkpoint's layout file is missing", where=path, fix=_FIX) from cause
    except Exception as cause:  # A damaged pickle raises nearly anything.
        raise CheckpointError(f"the checkpoint's layout file is refused: {cause}", where=path, fix=_FIX) from cause
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError("the layout file doesn't describe a checkpoint", where=path, fix=_FIX)
    return metadata


class LayoutReader(FileSystemReader):
    """DCP's reader, with ``.metadata`` read by the rules of this module."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))


@dataclass(frozen=True)
class Piece:
    """A box of a tensor and the byte range that holds it: a file of ``torch.save`` in itself."""

    path: Path
    start_bytes: int
    length_bytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint. With ``flat`` the boxes are ranges of its elements in row-major order."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece | Extent, ...]
    flat: bool = False

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def stored_tensors(folder: Path, *, tensors_only: bool = True) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in ``folder``, each proved to be covered exactly once by pieces that exist.

    Raises CheckpointError that names the tensor (and the file, where one is missing or too short), and for an object
    that isn't a tensor; without ``tensors_only`` such are left out.
    """
    metadata = read_metadata(folder)
    lengths: dict[str, int] = {}
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        where = f"{folder} ({name})"
        if not isinstance(entry, TensorStorageMetadata):
            if tensors_only:
                raise CheckpointError("the checkpoint holds an object that isn't a tensor", where=where, fix=_FIX)
            continue
        pieces = []
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if math.prod(sizes) == 0:
                continue  # The shard of a rank that got none of a small tensor.
            pieces.append(_piece(folder, metadata, name, offsets, sizes, lengths))
        stored = StoredTensor(name, tuple(entry.size), entry.properties.dtype, tuple(pieces))
        fault = coverage_fault(stored.shape, [(piece.offsets, piece.sizes) for piece in pieces])
        if fault:
            raise CheckpointError(f"the pieces of a tensor don't make it up: {fault}", where=where, fix=_FIX)
        tensors[name] = stored
    return tensors


def _piece(
    folder: Path,
    metadata: Metadata,
    name: str,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    lengths: dict[str, int],
) -> Piece:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    info = metadata.storage_data.get(MetadataIndex(name, offsets))
    if info is None:
        raise CheckpointError(
            f"the piece of a tensor at {list(offsets)} is stored nowhere", where=f"{folder} ({name})", fix=_FIX
        )
    path = folder / info.relative_path
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError("the pieces of the checkpoint are compressed or encrypted", where=path, fix=_FIX)
    if Path(info.relative_path).name != info.relative_path:
        raise CheckpointError("a piece lies outside of the checkpoint", where=path, fix=_FIX)
    if info.relative_path not in lengths:
        if not path.is_file():
            raise CheckpointError("a file of the checkpoint is missing", where=path, fix=_FIX)
        lengths[info.relative_path] = path.stat().st_size
    if info.offset < 0 or info.length < 0 or info.offset + info.length > lengths[info.relative_path]:
        raise CheckpointError(f"a file of the checkpoint ends before its piece of {name}", where=path, fix=_FIX)
    return Piece(path, info.offset, info.length, offsets, sizes)


def coverage_fault(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> str | None:
    """None when the ``boxes`` (offsets, sizes), none of them empty, cover a tensor of ``shape`` exactly once.

    Boxes that lie within the tensor, are disjoint, and whose volumes add up to the tensor's leave no hole: the three
    conditions are checked. Disjointness takes all pairs at once: 1,024 pieces cost 2^20 comparisons a dimension.
    """
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        return f"a piece has another number of dimensions than {list(shape)}"
    starts_PD = np.array([offsets for offsets, _ in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    ends_PD = starts_PD + np.array([sizes for _, sizes in boxes], dtype=np.int64).reshape(starts_PD.shape)
    if (starts_PD < 0).any() or (ends_PD > np.array(shape, dtype=np.int64)).any():
        return f"a piece lies outside of the shape {list(shape)}"
    overlap_PP = ~np.eye(len(boxes), dtype=bool)
    for start_P, end_P in zip(starts_PD.T, ends_PD.T, strict=True):
        overlap_PP &= (start_P[:, None] < end_P[None, :]) & (start_P[None, :] < end_P[:, None])
    if overlap_PP.any():
        first, second = np.argwhere(overlap_PP)[0]
        return f"the pieces at {list(boxes[first][0])} and {list(boxes[second][0])} overlap"
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    if covered != math.prod(shape):
        return f"{math.prod(shape) - covered:,} of {math.prod(shape):,} elements are missing"
    return None


def locate(stored: StoredTensor) -> list[Extent]:
    """Where the values of each piece lie. Raises CheckpointError that names the file whose piece isn't such a box."""
    extents = []
    for piece in stored.pieces:
        if isinstance(piece, Extent):
            extents.append(piece)
            continue
        opened = TorchFile(piece.path, start_bytes=piece.start_bytes, length_bytes=piece.length_bytes)
        box = opened.content
        if not isinstance(box, torch.Tensor) or tuple(box.shape) != piece.sizes or box.dtype != stored.dtype:
            raise CheckpointError(
                f"a piece of {stored.name} isn't of the shape or type it should be", where=piece.path, fix=_FIX
            )
        extents.append(opened.extent(box, piece.offsets))
    return extents
