"""``.csv``, ``.tsv``: a header, then one row a record. A cell may hold line breaks in quotes; an empty one is null."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial

from finetune.data.readers import READERS, Row, lines_of
from finetune.errors import DataError


def read_table(path: str, separator: str | None, *, usual: str) -> Iterator[Row | DataError]:
    """Raises DataError for a broken header or quoting: what follows can't be told apart."""
    delimiter = separator or usual
    if len(delimiter) != 1:
        raise DataError(
            f"`separator: {delimiter!r}` can't stand between columns", where=path, fix="give a single character"
        )
    csv.field_size_limit(sys.maxsize)  # a cell may hold a document; the module's own limit is 128 KiB
    lines = _Lines(path)
    records = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        start = records.line_num + 1
        try:
            cells = next(records, None)
        except csv.Error as cause:
            raise DataError(
                f"the table can't be read: {cause}",
                where=f"{path}:{start}",
                fix='close its quotes, and write a quote inside quotes as ""',
            ) from cause
        if cells is None:
            return
        if not cells:  # a blank line
            continue
        if header is None:
            header = _checked(cells, f"{path}:{start}", delimiter)
        elif len(cells) != len(header):
            yield DataError(
                f"the row has {len(cells)} cells, the header {len(header)}",
                where=f"{path}:{start}",
                fix="quote cells that hold the separator or line breaks",
            )
        else:
            pairs = zip(header, cells, strict=True)
            yield Row({name: cell or None for name, cell in pairs if name}, f"{path}:{start}")


class _Lines(Iterator[str]):
    def __init__(self, path: str) -> None:
        self._lines = lines_of(path)

    def __next__(self) -> str:
        _, line = next(self._lines)
        if isinstance(line, DataError):
            raise line
        return line


def _checked(header: list[str], where: str, delimiter: str) -> list[str]:
    twice = [name for name, times in Counter(header).items() if times > 1]
    if twice:
        raise DataError(f"the header names `{twice[0]}` twice", where=where, fix="give each column a name of its own")
    other = next((mark for mark in ",;\t|" if mark != delimiter and mark in header[0]), None)
    if len(header) == 1 and other:
        raise DataError(
            f"the header is one column, `{header[0]}`", where=where, fix=f"say `separator: {other!r}` in the recipe"
        )
    return header


READERS.register(".csv")(partial(read_table, usual=","))
READERS.register(".tsv")(partial(read_table, usual="\t"))
