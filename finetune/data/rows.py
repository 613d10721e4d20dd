"""Read JSON, JSONL and txt files row by row; every row knows its file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import DataError

ONE_OBJECT_A_LINE = (".jsonl", ".ndjson")
SUFFIXES = (".json", *ONE_OBJECT_A_LINE, ".txt")


@dataclass(frozen=True, slots=True)
class Row:
    value: dict[str, Any]
    path: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"


def read_rows(path: str, *, separator: str | None = None) -> Iterator[Row | DataError]:
    """Yield the rows of a file in order; a row that can't be used is yielded as the DataError that says why.

    ``.json`` holds an array of objects (or one object a line), ``.jsonl`` one object a line, ``.txt`` one document
    (several, where ``separator`` stands between them), each yielded as ``{"text": …}``.
    Raises DataError for a file that is missing, empty, not UTF-8, or of another kind.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError("there is no such data file", where=path, fix="correct the path")
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"`{suffix}` is not a known kind of data file", where=path, fix=f"known: {', '.join(SUFFIXES)}")
    if file.stat().st_size == 0:
        raise _empty(path)
    rows = _read_lines(path) if suffix in ONE_OBJECT_A_LINE else _read_whole(path, suffix, separator)
    found = False
    for row in rows:
        found = True
        yield row
    if not found:
        raise _empty(path)


def _empty(path: str) -> DataError:
    return DataError("the data file holds no rows", where=path, fix="fill it, or take it out of the recipe")


def _read_lines(path: str) -> Iterator[Row | DataError]:
    # Lines end at \n alone: str.splitlines would also split at U+2028, which JSON strings may hold as it is.
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                value = json.loads(text)
            except UnicodeDecodeError as cause:
                yield DataError(f"the line is not UTF-8: {cause}", where=f"{path}:{number}", fix="save it as UTF-8")
            except json.JSONDecodeError as cause:
                what = f"the line is not JSON: {cause.msg} at column {cause.colno}"
                yield DataError(what, where=f"{path}:{number}", fix="write one JSON object a line")
            except (RecursionError, ValueError) as cause:  # nested a thousand deep, or a number of thousands of digits
                yield DataError(f"the line can't be read: {cause}", where=f"{path}:{number}", fix="correct the row")
            else:
                yield _row(value, path, number)


def _row(value: Any, path: str, line: int) -> Row | DataError:
    if isinstance(value, dict):
        return Row(value, path, line)
    what = f"a row must be a JSON object, not {type(value).__name__}"
    return DataError(what, where=f"{path}:{line}", fix='write {"column": value, …}')


def _read_whole(path: str, suffix: str, separator: str | None) -> Iterator[Row | DataError]:
    raw = Path(path).read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        line = raw.count(b"\n", 0, cause.start) + 1
        raise DataError(f"the file is not UTF-8: {cause}", where=f"{path}:{line}", fix="save it as UTF-8") from cause
    if suffix == ".txt":
        return _read_documents(path, text, separator)
    return _read_array(path, text) if text.lstrip().startswith("[") else _read_lines(path)


def _read_documents(path: str, text: str, separator: str | None) -> Iterator[Row | DataError]:
    text = text.replace("\r\n", "\n")
    line = 1
    for part in text.split(separator) if separator else [text]:
        if part.strip():
            blank = len(part) - len(part.lstrip())
            yield Row({"text": part}, path, line + part.count("\n", 0, blank))
        line += part.count("\n") + (separator or "").count("\n")


def _read_array(path: str, text: str) -> Iterator[Row | DataError]:
    """Decode element by element, so that each has its line. A fault ends the file: what follows can't be told apart."""
    decoder = json.JSONDecoder()
    position, line, counted = text.index("[") + 1, 1, 0

    def skip_space(at: int) -> int:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        return at

    def fault(at: int, problem: str) -> DataError:
        where = f"{path}:{text.count(chr(10), 0, at) + 1}"
        return DataError(f"the file is not JSON: {problem}", where=where, fix="write an array of JSON objects")

    position = skip_space(position)
    if text.startswith("]", position):
        return
    while True:
        line += text.count("\n", counted, position)
        counted = position
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as cause:
            raise fault(cause.pos, cause.msg) from cause
        except (RecursionError, ValueError) as cause:  # as above, in a line
            raise fault(position, f"a row can't be read: {cause}") from cause
        yield _row(value, path, line)
        position = skip_space(position)
        if text.startswith(",", position):
            position = skip_space(position + 1)
            continue
        if not text.startswith("]", position):
            raise fault(position, "expected `,` or `]` after a row")
        if text[position + 1 :].strip():
            raise fault(skip_space(position + 1), "text after the array's end")
        return
