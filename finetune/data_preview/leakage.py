"""Held-out rows that stand in the training data.

Held-out sets are small, so each training row is compared with all of them exactly, by an index of their word n-grams: a
held-out row leaks as far as its n-grams stand in one training row, however much else stands there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.data.formats import Document, Example
from finetune.data_preview.content import Content, content_of
from finetune.data_preview.repeats import Pair
from finetune.errors import DataError

PASSAGE_WORDS = 64
"""A long held-out text is compared in passages of about this many words."""


@dataclass(frozen=True)
class Leakage:
    name: str
    """What the held-out rows are for: ``eval_data``, or the stage and key that read them."""
    path: str
    num_rows: int
    """Rows, or passages of a text."""
    exact: int
    """Held-out rows that are a training row."""
    near: int
    """Other held-out rows of whose n-grams one training row has the threshold's share."""
    same_prompt: int
    """Other held-out rows whose prompt is a training row's."""
    pairs: list[Pair]
    """(training row, held-out row), the worst first; the similarity is the held-out row's share found."""


class HeldOut:
    """Rows of one held-out set, to which training rows are shown one by one."""

    def __init__(self, name: str, path: str, examples: Iterable[tuple[Example | DataError, str]]) -> None:
        self.name = name
        self.path = path
        self._places: list[str] = []
        contents: list[Content] = []
        for example, place in examples:
            if not isinstance(example, DataError):
                for part in _passages(example):
                    contents.append(content_of(part))
                    self._places.append(place)
        self._excerpts = [content.excerpt for content in contents]
        self._rows_of_whole = _rows_of([content.whole for content in contents])
        self._rows_of_prompt = _rows_of([content.prompt for content in contents])
        self._sizes = np.array([len(content.ngrams) for content in contents], dtype=np.int64)
        grams = np.concatenate([content.ngrams for content in contents] or [np.empty(0, dtype=np.uint32)])
        order = np.argsort(grams, kind="stable")
        self._grams, self._owners = grams[order], np.repeat(np.arange(len(contents)), self._sizes)[order]
        self._shares = np.zeros(len(contents))
        self._exact = np.zeros(len(contents), dtype=np.bool_)
        self._asked = np.zeros(len(contents), dtype=np.bool_)
        self._found: dict[int, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def compare(self, content: Content, place: str) -> None:
        """Take a training row into account."""
        for row in self._rows_of_whole.get(content.whole, ()):
            if not self._exact[row]:
                self._exact[row], self._shares[row] = True, 1.0
                self._found[row] = (place, content.excerpt)
        if content.prompt is not None:
            for row in self._rows_of_prompt.get(content.prompt, ()):
                self._asked[row] = True
                self._found.setdefault(row, (place, content.excerpt))
        first = np.searchsorted(self._grams, content.ngrams, side="left")
        last = np.searchsorted(self._grams, content.ngrams, side="right")
        hits = [self._owners[start:end] for start, end in zip(first, last, strict=True) if start < end]
        if not hits:
            return
        rows, common = np.unique(np.concatenate(hits), return_counts=True)
        shares = common / self._sizes[rows]
        for row, share in zip(
            rows[shares > self._shares[rows]].tolist(), shares[shares > self._shares[rows]].tolist(), strict=True
        ):
            self._shares[row] = share
            self._found[row] = (place, content.excerpt)

    def result(self, threshold: float, *, num_pairs: int = 10) -> Leakage:
        near = (self._shares >= threshold) & ~self._exact
        asked = self._asked & ~self._exact & ~near
        leaking = self._exact | near | asked
        worst = sorted(np.flatnonzero(leaking).tolist(), key=lambda row: (-self._shares[row], row))[:num_pairs]
        return Leakage(
            name=self.name,
            path=self.path,
            num_rows=len(self),
            exact=int(self._exact.sum()),
            near=int(near.sum()),
            same_prompt=int(asked.sum()),
            pairs=[
                Pair(float(self._shares[row]), place, self._places[row], excerpt, self._excerpts[row])
                for row, (place, excerpt) in ((row, self._found[row]) for row in worst)
            ],
        )


def _rows_of(hashes: list[int] | list[int | None]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row, value in enumerate(hashes):
        if value is not None:
            found.setdefault(value, []).append(row)
    return found


def _passages(example: Example) -> Iterable[Example]:
    """A document of many words in passages, any other example as it is."""
    if not isinstance(example, Document):
        return [example]
    return (Document(passage) for passage, _ in passages(example.text))


def text_file_passages(path: str) -> Iterator[tuple[Example | DataError, str]]:
    """A text file's passages, each with the line it begins at. Raises DataError for what isn't UTF-8."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as cause:
        raise DataError(f"the file is not UTF-8: {cause}", where=path, fix="save it as UTF-8") from cause
    for passage, line in passages(text):
        yield Document(passage), f"{path}:{line}"


def passages(text: str) -> Iterator[tuple[str, int]]:
    """(passage, its first line) of a long text, the last up to half as long again; a text of few words is one."""
    starts = [match.start() for match in re.finditer(r"\S+", text)]
    if not starts:
        return
    cuts = starts[::PASSAGE_WORDS] if len(starts) > 2 * PASSAGE_WORDS else starts[:1]
    if len(cuts) > 1 and len(starts) % PASSAGE_WORDS and len(starts) % PASSAGE_WORDS < PASSAGE_WORDS // 2:
        cuts.pop()
    line, counted = 1, 0
    for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
        line, counted = line + text.count("\n", counted, start), start
        yield text[start:end], line
