"""Read a data file row by row; every row knows where it stands."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path

from finetune.data.readers import COMPRESSIONS, READERS, Row, is_compressed, kind_of
from finetune.errors import DataError


def read_rows(path: str, *, separator: str | None = None) -> Iterator[Row | DataError]:
    """Yield the rows of a file in order; a row that can't be used is yielded as the DataError that says why.

    ``.json`` holds an array of objects (or one object a line), ``.jsonl`` one object a line, ``.csv`` and ``.tsv`` a
    header and records, ``.parquet`` and ``.arrow`` a table, ``.txt`` one document (several, where ``separator`` stands
    between them), each yielded as ``{"text": …}``. Text files may be compressed: ``.gz``, ``.bz2``, ``.xz``, ``.zst``.
    Raises DataError for a file that is missing, empty, not UTF-8, broken, or of another kind.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError("there is no such data file", where=path, fix="correct the path")
    kind = kind_of(path)
    if kind not in READERS:
        known = f"known: {', '.join(READERS)}; compressed as {', '.join(COMPRESSIONS)}"
        raise DataError(f"`{kind}` is not a known kind of data file", where=path, fix=known)
    found = False
    if file.stat().st_size:
        rows = READERS[kind](path, separator)
        for row in _decompressed(rows, path) if is_compressed(path) else rows:
            found = True
            yield row
    if not found:
        raise DataError("the data file holds no rows", where=path, fix="fill it, or take it out of the recipe")


def _decompressed(rows: Iterator[Row | DataError], path: str) -> Iterator[Row | DataError]:
    try:
        yield from rows
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as cause:
        if getattr(cause, "errno", None):
            raise
        raise DataError(
            f"the file can't be decompressed: {cause}", where=path, fix="pack it again, or download it"
        ) from cause
