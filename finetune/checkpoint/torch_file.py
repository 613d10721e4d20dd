"""What a file of ``torch.save`` holds and where each tensor's bytes lie in it, without reading them or running code.

Such a file is a zip of a pickle and one uncompressed record a storage. torch.load reads the pickle with its
weights-only rules and on the meta device, where a storage takes no memory and knows the offset of its record; that is
compared with the zip's own directory, whose crc32 of the record serves to check the bytes once they are read.
"""

from __future__ import annotations

import io
import math
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from finetune.errors import CheckpointError

FIX = "this checkpoint can't be used; take an earlier one, or another copy of it"
_PIECE_BYTES = 2**22


@dataclass(frozen=True)
class Record:
    """A byte range of a file, and the crc32 that its writer noted (None where torch was told to note none)."""

    path: Path
    start_bytes: int
    length_bytes: int
    crc32: int | None


@dataclass(frozen=True)
class Extent:
    """A box of a tensor, as plain values at ``start_bytes`` of a file; ``strides`` count elements."""

    path: Path
    start_bytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    record: Record

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def contiguous(self) -> bool:
        return self.strides == contiguous_strides(self.sizes)


def contiguous_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


class _Range(io.RawIOBase):
    """A byte range of an open file, as a file."""

    def __init__(self, stream: io.FileIO, start: int, length: int) -> None:
        self._stream = stream
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, target: Any) -> int:
        part = memoryview(target)[: max(0, self._length - self._position)]
        self._stream.seek(self._start + self._position)
        count = self._stream.readinto(part)
        self._position += count
        return count


class Inert:
    """Stands in for a class that a file names and we have no use for: it keeps its arguments and does nothing."""

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Inert:
        inert = super().__new__(cls)
        inert.arguments = arguments
        return inert

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class TorchFile:
    """The ``content`` of one ``torch.save`` file (or of one embedded at a byte range), its tensors on the meta device.

    ``inert`` names further classes that are let in as stand-ins. Raises CheckpointError that names the file when it
    is truncated or damaged, and the class when its pickle names one that is not of the weights-only rules.
    """

    def __init__(
        self, path: Path, *, start_bytes: int = 0, length_bytes: int | None = None, inert: Iterable[str] = ()
    ) -> None:
        self.path = path
        self.start_bytes = start_bytes
        stand_ins = [(type("Inert", (Inert,), {}), name) for name in inert]
        try:
            with path.open("rb", buffering=0) as stream:
                length = path.stat().st_size if length_bytes is None else length_bytes
                view = io.BufferedReader(_Range(stream, start_bytes, length))
                self._records = self._read_directory(view, length)
                view.seek(0)
                with torch.serialization.safe_globals(cast(Any, stand_ins)):
                    self.content: Any = torch.load(view, map_location="meta", weights_only=True)
        except FileNotFoundError as cause:
            raise CheckpointError("a file of the checkpoint is missing", where=path, fix=FIX) from cause
        except zipfile.BadZipFile as cause:
            raise CheckpointError(
                f"the file is truncated, damaged, or not from torch.save: {cause}", where=path, fix=FIX
            ) from cause
        except CheckpointError:
            raise
        except Exception as cause:  # A damaged pickle raises nearly anything.
            named = re.search(r"GLOBAL ([\w.]+)", str(cause))
            what = f"its pickle names {named[1]}, which has no place there" if named else str(cause).splitlines()[0]
            raise CheckpointError(f"the file is refused, unread: {what}", where=path, fix=FIX) from cause

    def _read_directory(self, view: IO[bytes], length: int) -> dict[int, Record]:
        """{offset in the view: record} of the storages; the pickle and the byte order are checked on the way."""
        with zipfile.ZipFile(view) as opened:
            entries = opened.infolist()
            has_crc32 = any(entry.CRC for entry in entries)
            records = {}
            for entry in entries:
                name = entry.filename.partition("/")[2]
                if has_crc32 and (name in ("data.pkl", "byteorder")):
                    content = opened.read(entry)  # Compares its crc32.
                    if name == "byteorder" and content.decode() != sys.byteorder:
                        raise CheckpointError("the file is of the other byte order", where=self.path)
                elif name.startswith("data/"):
                    if entry.compress_type != zipfile.ZIP_STORED:
                        raise CheckpointError("a record of the file is compressed", where=self.path, fix=FIX)
                    view.seek(entry.header_offset)
                    header = view.read(30)
                    # The two lengths are those of the name and the padding that aligns the values.
                    start = entry.header_offset + 30 + int.from_bytes(header[26:28], "little")
                    start += int.from_bytes(header[28:30], "little")
                    if len(header) < 30 or start + entry.file_size > length:
                        raise CheckpointError("the file ends within a record", where=self.path, fix=FIX)
                    crc32 = entry.CRC if has_crc32 else None
                    records[start] = Record(self.path, self.start_bytes + start, entry.file_size, crc32)
        return records

    def extent(self, tensor: torch.Tensor, offsets: tuple[int, ...] | None = None) -> Extent:
        """Where the values of ``tensor``, one of ``content``, lie; as the box at ``offsets`` (default: the origin)."""
        start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        record = self._records.get(start) if start is not None else None
        sizes, strides = tuple(tensor.shape), tuple(int(step) for step in tensor.stride())
        last = int(tensor.storage_offset()) + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
        if record is None or (last + 1) * tensor.element_size() > record.length_bytes:
            raise CheckpointError("a tensor lies outside of the file's records", where=self.path, fix=FIX)
        # Strides of dimensions of size one say nothing.
        plain = contiguous_strides(sizes)
        strides = tuple(own if size > 1 else other for size, own, other in zip(sizes, strides, plain, strict=True))
        first_bytes = record.start_bytes + int(tensor.storage_offset()) * tensor.element_size()
        return Extent(self.path, first_bytes, offsets or (0,) * len(sizes), sizes, strides, record)


def read_into(path: Path, start_bytes: int, target: memoryview) -> None:
    """Fill ``target`` from ``path``. Plain reads: the pages of a memory map would count as this process's memory."""
    try:
        with path.open("rb", buffering=0) as stream:
            stream.seek(start_bytes)
            done = 0
            while done < len(target):
                count = stream.readinto(target[done:])
                if not count:
                    raise CheckpointError("a file of the checkpoint ends too early", where=path, fix=FIX)
                done += count
    except FileNotFoundError as cause:
        raise CheckpointError("a file of the checkpoint is missing", where=path, fix=FIX) from cause


def check_record(record: Record) -> None:
    """Raises CheckpointError that names the file when the record's bytes are not those that were written."""
    if record.crc32 is None:
        return
    buffer = memoryview(bytearray(min(_PIECE_BYTES, record.length_bytes)))
    crc32, done = 0, 0
    while done < record.length_bytes:
        part = buffer[: min(len(buffer), record.length_bytes - done)]
        read_into(record.path, record.start_bytes + done, part)
        crc32 = zlib.crc32(part, crc32)
        done += len(part)
    if crc32 != record.crc32:
        raise CheckpointError("a tensor's bytes differ from their crc32 in the file", where=record.path, fix=FIX)
