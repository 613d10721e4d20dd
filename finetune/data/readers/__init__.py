"""Kinds of data files, one a file: each yields a file's rows in order, and registers itself here by its suffixes.

A reader holds a piece of the file at a time, whatever its size.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, BinaryIO, cast

from finetune.config.registry import Registry
from finetune.errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    value: dict[str, Any]
    place: str
    """``file:line``, or ``file:row N`` (from 1) in a file without lines."""


Reader = Callable[[str, str | None], Iterator[Row | DataError]]
"""(path, ``separator:`` of the recipe) -> rows. A row that can't be used is yielded as the DataError that says why; a
fault that leaves no way to find the next row is raised."""

READERS: Registry[Reader] = Registry("kind of data file", package=__name__)

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


def kind_of(path: str) -> str:
    """The suffix that says how to read a file: ``.jsonl`` of ``rows.jsonl.gz``."""
    suffixes = [suffix.lower() for suffix in PurePath(path).suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def is_compressed(path: str) -> bool:
    return PurePath(path).suffix.lower() in COMPRESSIONS


def open_bytes(path: str) -> BinaryIO:
    """The file's bytes, decompressed where its name says so. Raises DataError for what can't be UTF-8 text."""
    stream = _open(path)
    start = stream.peek(4)[:4]
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start:
        stream.close()
        raise DataError("the file is UTF-16, or isn't text", where=f"{path}:1", fix="save it as UTF-8")
    return cast(BinaryIO, stream)


def _open(path: str) -> io.BufferedReader:
    suffix = PurePath(path).suffix.lower()
    if suffix == ".gz":
        import gzip

        return io.BufferedReader(gzip.open(path))  # type: ignore[arg-type]
    if suffix == ".bz2":
        import bz2

        return io.BufferedReader(bz2.open(path))  # type: ignore[arg-type]
    if suffix == ".xz":
        import lzma

        return io.BufferedReader(lzma.open(path))  # type: ignore[arg-type]
    if suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd"))
    return open(path, "rb")


def lines_of(path: str) -> Iterator[tuple[int, str | DataError]]:
    """(number from 1, text with its line end) of each line, without a byte order mark; DataError: it isn't UTF-8.

    Lines end at \\n alone: str.splitlines would also split at U+2028, which JSON strings may hold as it is.
    """
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as cause:
                yield number, not_utf8(path, number, cause)


def not_utf8(path: str, line: int, cause: UnicodeDecodeError) -> DataError:
    what = f"byte {cause.object[cause.start]:#04x}: {cause.reason}"
    return DataError(f"the line is not UTF-8 ({what})", where=f"{path}:{line}", fix="save the file as UTF-8")
