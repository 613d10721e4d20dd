"""Token rows in one Arrow file: written batch by batch, read through a memory map whose pages all ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from finetune.data.dataset import RowsDigest, TokenRow, TokenRows

BATCH_TOKENS = 4_000_000
"""Tokens of a record batch, at least: 20 MB, of which the writer holds two."""

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),  # bytes, not Arrow's bits: a row is then a slice, without a copy
        ("supervised", pa.int32()),
        ("source", pa.int32()),
        ("file", pa.int32()),  # by its number among the data's files, -1 where `place` is whole
        ("place", pa.string()),  # what stands behind the file's name and a colon
    ]
)


@dataclass(frozen=True)
class EncodedRows:
    """Some rows end to end, as they go from one process to another."""

    lengths: np.ndarray
    """int32 (N,)"""
    input_ids: np.ndarray
    """int32 (sum of lengths,)"""
    loss_mask: np.ndarray
    """bool (sum of lengths,)"""
    places: list[str]
    counts: dict[str, int]
    """Of the examples they were made from, under the names of ``COUNTS``; without those that are 0."""

    @staticmethod
    def of(rows: Sequence[TokenRow], counts: dict[str, int]) -> EncodedRows:
        return EncodedRows(
            lengths=np.array([len(row.input_ids) for row in rows], dtype=np.int32),
            input_ids=np.concatenate([row.input_ids for row in rows] or [np.empty(0, np.int32)]),
            loss_mask=np.concatenate([row.loss_mask for row in rows] or [np.empty(0, np.bool_)]),
            places=[row.place for row in rows],
            counts=counts,
        )

    def supervised(self) -> np.ndarray:
        """int32 (N,): targets of each row, none of which is empty."""
        starts = np.cumsum(self.lengths) - self.lengths
        return np.add.reduceat(self.loss_mask, starts, dtype=np.int32) if len(starts) else np.empty(0, np.int32)

    def rows(self) -> list[TokenRow]:
        ends = np.cumsum(self.lengths)[:-1]
        parts = zip(np.split(self.input_ids, ends), np.split(self.loss_mask, ends), self.places, strict=True)
        return [TokenRow(ids, mask, place) for ids, mask, place in parts] if len(self.lengths) else []


class RowWriter:
    """Writes rows to an Arrow IPC file as they come."""

    def __init__(self, path: Path, files: Sequence[str]) -> None:
        """``files``: those that the rows' places begin with."""
        self.num_rows = 0
        self.largest_token = 0
        self._file_numbers = {name: number for number, name in enumerate(files)}
        self._digest = RowsDigest()
        self._waiting: list[tuple[EncodedRows, int]] = []
        self._writer = pa.ipc.new_file(str(path), SCHEMA)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def add(self, rows: EncodedRows, source: int) -> None:
        if not len(rows.lengths):
            return
        self._digest.add(rows.lengths, rows.input_ids, rows.loss_mask)
        self.num_rows += len(rows.lengths)
        self.largest_token = max(self.largest_token, int(rows.input_ids.max(initial=0)))
        self._waiting.append((rows, source))
        if sum(len(waiting.input_ids) for waiting, _ in self._waiting) >= BATCH_TOKENS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if not self._waiting:
            return
        parts = [rows for rows, _ in self._waiting]
        offsets = np.zeros(sum(len(rows.lengths) for rows in parts) + 1, dtype=np.int32)
        np.cumsum(np.concatenate([rows.lengths for rows in parts]), out=offsets[1:])
        sources = np.concatenate([np.full(len(rows.lengths), source, np.int32) for rows, source in self._waiting])
        places = [self._file_and_rest(place) for rows in parts for place in rows.places]
        columns = [
            pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate([rows.input_ids for rows in parts]))),
            pa.ListArray.from_arrays(
                pa.array(offsets), pa.array(np.concatenate([rows.loss_mask for rows in parts]).view(np.uint8))
            ),
            pa.array(np.concatenate([rows.supervised() for rows in parts])),
            pa.array(sources),
            pa.array([number for number, _ in places], pa.int32()),
            pa.array([rest for _, rest in places], pa.string()),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self._waiting.clear()

    def _file_and_rest(self, place: str) -> tuple[int, str]:
        name, _, rest = place.rpartition(":")
        number = self._file_numbers.get(name, -1)
        return (number, rest) if number >= 0 else (-1, place)


class _Batch(NamedTuple):
    offsets: np.ndarray
    input_ids: np.ndarray
    loss_mask: np.ndarray
    supervised: np.ndarray
    source: np.ndarray
    file: np.ndarray
    place: Any


class StoredRows(TokenRows):
    """The rows of a file of ``RowWriter``. A row's arrays are views of the file's pages, read only when they are used.

    In memory stay 12 bytes a row: its length, its number of targets and its source. Raises ``pyarrow.ArrowInvalid`` or
    ``OSError`` for a file that is damaged where Arrow looks.
    """

    def __init__(self, path: Path, *, files: Sequence[str], digest: str, largest_token: int) -> None:
        """``files``: those of now, which may lie elsewhere than when the rows were written."""
        self.digest, self.largest_token = digest, largest_token
        self._files = list(files)
        self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if self._reader.schema != SCHEMA:
            raise pa.ArrowInvalid("the columns aren't those of token rows")
        self._batches = [self._batch(number) for number in range(self._reader.num_record_batches)]
        self._starts = np.cumsum([0, *(len(batch.source) for batch in self._batches)])
        none = np.empty(0, dtype=np.int32)
        self.lengths = np.concatenate([none, *(np.diff(batch.offsets) for batch in self._batches)])
        self.sources = np.concatenate([none, *(batch.source for batch in self._batches)])
        self.supervised = np.concatenate([none, *(batch.supervised for batch in self._batches)])

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, index: int) -> TokenRow:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch, at = self._batches[number], index - int(self._starts[number])
        span = slice(int(batch.offsets[at]), int(batch.offsets[at + 1]))
        return TokenRow(batch.input_ids[span], batch.loss_mask[span], self._place(batch, at))

    def origins(self) -> np.ndarray:
        """int64 (N,): a number for each row, the same for rows that follow each other and are of one place."""
        begins = [np.zeros(0, dtype=np.bool_)]
        before: tuple[int, int, str] | None = None
        for batch in self._batches:
            places = np.array(batch.place.to_pylist(), dtype=object)
            begins.append(np.ones(len(places), dtype=np.bool_))
            begins[-1][1:] = (
                (places[1:] != places[:-1])
                | (batch.file[1:] != batch.file[:-1])
                | (batch.source[1:] != batch.source[:-1])
            )
            begins[-1][0] = (int(batch.source[0]), int(batch.file[0]), places[0]) != before
            before = int(batch.source[-1]), int(batch.file[-1]), places[-1]
        return np.cumsum(np.concatenate(begins)) - 1

    def _place(self, batch: _Batch, at: int) -> str:
        number, rest = int(batch.file[at]), str(batch.place[at])
        return f"{self._files[number]}:{rest}" if number >= 0 else rest

    def _batch(self, number: int) -> _Batch:
        columns = self._reader.get_batch(number).columns
        ids, mask, supervised, source, file, place = columns
        return _Batch(
            offsets=ids.offsets.to_numpy(),
            input_ids=ids.values.to_numpy(),
            loss_mask=mask.values.to_numpy().view(np.bool_),
            supervised=supervised.to_numpy(),
            source=source.to_numpy(),
            file=file.to_numpy(),
            place=place,
        )
