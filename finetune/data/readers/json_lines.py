"""``.jsonl``, ``.ndjson``: one JSON object a line. ``.json``: an array of objects, or one object a line.

An array is decoded element by element as the file is read, so each row has its line and memory doesn't grow.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from finetune.data.json_values import fault_of
from finetune.data.readers import READERS, Row, lines_of, not_utf8, open_bytes
from finetune.errors import DataError

CHUNK_BYTES = 1 << 20
_SPACE = " \t\r\n"
# A fault this close to the end of what was read may only mean that the rest isn't there yet. The longest literal has 9
# characters (-Infinity), the longest escape 12 (a pair of \uXXXX).
_TAIL = 16


def read_json_lines(path: str, separator: str | None) -> Iterator[Row | DataError]:
    for number, line in lines_of(path):
        if isinstance(line, DataError):
            yield line
            continue
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as cause:
            what = f"the line is not JSON: {cause.msg} at column {cause.colno}"
            yield DataError(what, where=where, fix="write one JSON object a line, or one array of objects")
        except (RecursionError, ValueError) as cause:  # nested a thousand deep, or a number of thousands of digits
            yield DataError(f"the line can't be read: {cause}", where=where, fix="correct the row")
        else:
            yield _row(value, where, line)


def read_json(path: str, separator: str | None) -> Iterator[Row | DataError]:
    with open_bytes(path) as stream:
        first = b""
        while not first and (chunk := stream.read(4096)):
            first = chunk.removeprefix(codecs.BOM_UTF8).lstrip()
    if not first.startswith(b"["):
        yield from read_json_lines(path, separator)
        return
    with open_bytes(path) as stream:
        yield from _read_array(_Text(path, stream))


def _row(value: Any, where: str, text: str) -> Row | DataError:
    """``text``: the row as it stands in the file."""
    if isinstance(value, dict):
        fault = fault_of(text, value)
        if fault is not None:
            return DataError(f"the row can't be used: {fault}", where=where, fix="correct the row")
        return Row(value, where)
    what = f"a row must be a JSON object, not {type(value).__name__}"
    return DataError(what, where=where, fix='write {"column": value, …}')


class _Text:
    """A window on a file's text that moves forward."""

    def __init__(self, path: str, stream: BinaryIO) -> None:
        self.path = path
        self.window, self.position, self.ended = "", 0, False
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._line, self._counted = 1, 0  # the line that window[counted] stands on
        self._lines_read = 1

    def more(self) -> None:
        """Read on, dropping what lies before ``position``. Doubling the window keeps a long row's cost linear."""
        self.line_at(self.position)
        self.window, self._counted = self.window[self.position :], 0
        self.position = 0
        chunk = self._stream.read(max(CHUNK_BYTES, len(self.window)))
        self.ended = not chunk
        try:
            self.window += self._decoder.decode(chunk, final=self.ended)
        except UnicodeDecodeError as cause:
            line = self._lines_read + cause.object.count(b"\n", 0, cause.start)
            raise not_utf8(self.path, line, cause) from cause
        self._lines_read += chunk.count(b"\n")

    def line_at(self, position: int) -> int:
        """The line that ``window[position]`` stands on; ``position`` may only grow."""
        self._line += self.window.count("\n", self._counted, position)
        self._counted = position
        return self._line

    def next(self) -> str:
        """The next character that isn't space, which stays; "" at the end."""
        while True:
            window, at, end = self.window, self.position, len(self.window)
            while at < end and window[at] in _SPACE:
                at += 1
            self.position = at
            if at < end:
                return window[at]
            if self.ended:
                return ""
            self.more()

    def fault(self, position: int, problem: str) -> DataError:
        where = f"{self.path}:{self.line_at(position)}"
        return DataError(f"the file is not JSON: {problem}", where=where, fix="write an array of JSON objects")

    def value(self) -> tuple[Any, str]:
        """Decode the value at ``position`` and step over it: (value, its text). Raises DataError where there is
        none."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.window, self.position)
            except json.JSONDecodeError as cause:
                cut_off = cause.msg.startswith("Unterminated string") or cause.pos >= len(self.window) - _TAIL
                if self.ended or not cut_off:
                    raise self.fault(cause.pos, cause.msg) from cause
            except (RecursionError, ValueError) as cause:  # as in a line
                raise self.fault(self.position, f"a row can't be read: {cause}") from cause
            else:
                # A number at the end of the window may go on.
                if isinstance(value, dict | list) or end < len(self.window) or self.ended:
                    start, self.position = self.position, end
                    return value, self.window[start:end]
            self.more()


_DECODER = json.JSONDecoder()


def _read_array(text: _Text) -> Iterator[Row | DataError]:
    """A fault ends the file: what follows can't be told apart."""
    text.next()
    text.position += 1
    if text.next() != "]":
        while True:
            text.next()
            where = f"{text.path}:{text.line_at(text.position)}"
            value, written = text.value()
            yield _row(value, where, written)
            mark = text.next()
            if mark == "]":
                break
            if mark != ",":
                raise text.fault(text.position, "expected `,` or `]` after a row")
            text.position += 1
    text.position += 1
    if text.next():
        raise text.fault(text.position, "text after the array's end")


for suffix in (".jsonl", ".ndjson"):
    READERS.register(suffix)(read_json_lines)
READERS.register(".json")(read_json)
