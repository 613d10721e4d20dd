"""Rows of a data set that repeat others: the same, nearly the same, or another answer to the same prompt.

Near ones are found by MinHash and locality-sensitive hashing (Leskovec, Rajaraman & Ullman, Mining of Massive Datasets,
ch. 3): rows whose signatures agree on a whole band are candidates, and each candidate that a sketch of its signature
finds close is then compared exactly. What is kept of a row lies on disk: about 600 bytes, and four for each n-gram.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.data_preview.content import Content
from finetune.data_preview.words import NUM_HASHES, jaccard, signatures

BAND_ROWS = (8, 4, 2, 1)
MISSED = 1e-3
"""The share of pairs at the very threshold that bands may miss."""
SKETCH_ERROR = 0.13
"""More than three standard errors of a similarity estimated from NUM_HASHES places."""
BUCKET_PAIRS = 8
"""Rows of one bucket of which each pair is a candidate; of a larger one each row's neighbours and the first are."""
BATCH_ROWS = 512


@dataclass(frozen=True)
class Pair:
    similarity: float
    first: str
    """``file:line``"""
    second: str
    first_excerpt: str
    second_excerpt: str
    count: int = 2
    """Rows that are the same, where they are exactly so."""


@dataclass(frozen=True)
class Repeats:
    num_rows: int
    exact: int
    """Rows that are the same as an earlier one."""
    near: int
    """Other rows that are at least as similar to an earlier one as the threshold says."""
    same_prompt: int
    """Other rows whose prompt an earlier one has, with another answer."""
    exact_pairs: list[Pair]
    near_pairs: list[Pair]


def band_rows(threshold: float) -> int:
    """Places of a signature in a band: as many as let no more than ``MISSED`` of pairs at the threshold slip."""
    fitting = (rows for rows in BAND_ROWS if (1 - threshold**rows) ** (NUM_HASHES // rows) <= MISSED)
    return next(fitting, BAND_ROWS[-1])


class RowStore:
    """What is needed of each row to compare it with all others, appended row by row, on disk."""

    def __init__(self, folder: Path, threshold: float) -> None:
        self.threshold = threshold
        self.wholes, self.prompts = array("Q"), array("Q")
        self._band_rows = band_rows(threshold)
        self._folder = folder
        self._files = {name: open(folder / name, "wb+") for name in ("ngrams", "bands", "sketches", "places")}  # noqa: SIM115
        self._ngram_ends, self._place_ends = array("Q", [0]), array("Q", [0])
        self._waiting: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self.wholes)

    def add(self, content: Content, place: str) -> None:
        self.wholes.append(content.whole)
        self.prompts.append(content.prompt or 0)
        self._ngram_ends.append(self._ngram_ends[-1] + len(content.ngrams))
        self._files["ngrams"].write(content.ngrams.tobytes())
        told = json.dumps([place, content.excerpt]).encode()
        self._place_ends.append(self._place_ends[-1] + len(told))
        self._files["places"].write(told)
        self._waiting.append(content.ngrams)
        if len(self._waiting) >= BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        """Sign the rows that wait. An empty row, which is like no other, gets a key of its own in each band."""
        filled = [row for row, members in enumerate(self._waiting) if len(members)]
        signed = np.zeros((len(self._waiting), NUM_HASHES), dtype=np.uint32)
        if filled:
            signed[filled] = signatures([self._waiting[row] for row in filled])
        keys = np.zeros((len(signed), NUM_HASHES // self._band_rows), dtype=np.uint64)
        for offset in range(self._band_rows):
            keys = (keys ^ signed[:, offset :: self._band_rows]) * np.uint64(0x9E3779B97F4A7C15)
            keys ^= keys >> np.uint64(31)
        empty = np.setdiff1d(np.arange(len(signed)), filled)
        keys[empty] = (len(self) - len(signed) + empty)[:, None].astype(np.uint64)
        self._files["bands"].write(keys.tobytes())
        self._files["sketches"].write(signed.astype(np.uint8).tobytes())
        self._waiting = []

    def finish(self) -> None:
        self._flush()
        for file in self._files.values():
            file.flush()

    def bands(self) -> Iterator[np.ndarray]:
        """uint64 (len(self),) for each band: rows of one key are candidates."""
        if not len(self):
            return
        num_bands = NUM_HASHES // self._band_rows
        keys = np.memmap(self._folder / "bands", dtype=np.uint64, mode="r", shape=(len(self), num_bands))
        for band in range(num_bands):
            yield np.array(keys[:, band])

    def sketches(self) -> np.ndarray:
        return np.memmap(self._folder / "sketches", dtype=np.uint8, mode="r", shape=(len(self), NUM_HASHES))

    def similarity(self, left: int, right: int) -> float:
        return jaccard(self._ngrams(left), self._ngrams(right))

    def _ngrams(self, row: int) -> np.ndarray:
        return np.frombuffer(self._read("ngrams", self._ngram_ends, row, 4), dtype=np.uint32)

    def place(self, row: int) -> tuple[str, str]:
        """(``file:line``, excerpt)"""
        place, excerpt = json.loads(self._read("places", self._place_ends, row, 1))
        return place, excerpt

    def _read(self, name: str, ends: array[int], row: int, width: int) -> bytes:
        file = self._files[name]
        file.seek(ends[row] * width)
        return file.read((ends[row + 1] - ends[row]) * width)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


@contextmanager
def row_store(threshold: float) -> Iterator[RowStore]:
    with tempfile.TemporaryDirectory(prefix="finetune-data-") as folder:
        store = RowStore(Path(folder), threshold)
        try:
            yield store
        finally:
            store.close()


def find_repeats(store: RowStore, *, num_pairs: int = 10) -> Repeats:
    """Compare all rows of a finished ``store``. ``num_pairs`` of each kind are shown, the most alike first."""
    wholes = np.frombuffer(store.wholes, dtype=np.uint64)
    _, first_of, group, sizes = np.unique(wholes, return_index=True, return_inverse=True, return_counts=True)
    is_first = np.zeros(len(wholes), dtype=np.bool_)
    is_first[first_of] = True
    exact_pairs = []
    for index in np.argsort(-sizes, kind="stable")[:num_pairs]:
        if sizes[index] > 1:
            rows = np.flatnonzero(group == index)[:2].tolist()
            exact_pairs.append(_pair(store, rows[0], rows[1], 1.0, int(sizes[index])))
    similar = _near(store, is_first)
    worst = sorted(similar.items(), key=lambda item: (-item[1][1], item[0]))[:num_pairs]
    prompts = np.frombuffer(store.prompts, dtype=np.uint64)[is_first]
    asked = prompts[prompts != 0]
    return Repeats(
        num_rows=len(wholes),
        exact=int(len(wholes) - len(first_of)),
        near=len(similar),
        same_prompt=int(len(asked) - len(np.unique(asked))),
        exact_pairs=exact_pairs,
        near_pairs=[_pair(store, first, second, value) for second, (first, value) in worst],
    )


def _near(store: RowStore, compared: np.ndarray) -> dict[int, tuple[int, float]]:
    """{row: (an earlier row, similarity)} of the rows in ``compared`` (bool) that are near an earlier one of them."""
    candidates = np.empty((0, 2), dtype=np.int64)
    for keys in store.bands():
        candidates = np.unique(np.concatenate((candidates, _bucket_pairs(keys, compared))), axis=0)
    if not len(candidates):
        return {}
    sketches = store.sketches()
    estimates = np.concatenate(
        [
            (sketches[part[:, 0]] == sketches[part[:, 1]]).mean(axis=1)
            for part in np.array_split(candidates, -(-len(candidates) // 65536))
        ]
    )
    close = estimates >= store.threshold - SKETCH_ERROR
    candidates, estimates = candidates[close], estimates[close]
    found: dict[int, tuple[int, float]] = {}
    for first, second in candidates[np.argsort(-estimates, kind="stable")].tolist():
        if second in found:
            continue  # one earlier row is enough, and the most alike were looked at first
        value = store.similarity(first, second)
        if value >= store.threshold:
            found[second] = (first, value)
    return found


def _bucket_pairs(keys: np.ndarray, compared: np.ndarray) -> np.ndarray:
    """int64 (P, 2): pairs of rows, the earlier first, that have one key."""
    rows = np.flatnonzero(compared)
    order = rows[np.argsort(keys[rows], kind="stable")]
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    sizes = np.diff([*starts, len(order)])
    start_of, size_of = np.repeat(starts, sizes), np.repeat(sizes, sizes)
    position = np.arange(len(order))
    pairs = [np.stack((order[start_of], order), axis=1)[position > start_of]]
    for back in range(1, BUCKET_PAIRS):
        has = (position - back > start_of) & ((size_of <= BUCKET_PAIRS) | (back == 1))
        pairs.append(np.stack((order[position[has] - back], order[has]), axis=1))
    return np.concatenate(pairs)


def _pair(store: RowStore, first: int, second: int, similarity: float, count: int = 2) -> Pair:
    (place, excerpt), (other_place, other_excerpt) = store.place(first), store.place(second)
    return Pair(similarity, place, other_place, excerpt, other_excerpt, count)
