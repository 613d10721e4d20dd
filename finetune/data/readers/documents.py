"""``.txt``: one document, or several with ``separator`` between them, each yielded as ``{"text": …}``."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.data.readers import READERS, Row, lines_of
from finetune.errors import DataError

CHUNK_CHARACTERS = 1 << 20


def read_documents(path: str, separator: str | None) -> Iterator[Row | DataError]:
    """Raises DataError for a line that isn't UTF-8: where the document ends that it stands in can't be told."""
    line = 1  # that the first part not yet yielded begins on
    pending, length, enough = [], 0, CHUNK_CHARACTERS
    for _, text in lines_of(path):
        if isinstance(text, DataError):
            raise text
        pending.append(f"{text[:-2]}\n" if text.endswith("\r\n") else text)
        length += len(text)
        if separator and length >= enough:
            *parts, rest = "".join(pending).split(separator)
            for part in parts:
                yield from _document(part, path, line)
                line += part.count("\n") + separator.count("\n")
            pending, length = [rest], len(rest)
            enough = CHUNK_CHARACTERS + 2 * length  # a long document is searched a few times, not once a chunk
    text = "".join(pending)
    for part in text.split(separator) if separator else [text]:
        yield from _document(part, path, line)
        line += part.count("\n") + (separator or "").count("\n")


def _document(text: str, path: str, line: int) -> Iterator[Row]:
    if text.strip():
        blank = len(text) - len(text.lstrip())
        yield Row({"text": text}, f"{path}:{line + text.count(chr(10), 0, blank)}")


READERS.register(".txt")(read_documents)
