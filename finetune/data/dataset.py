"""Tokenized rows: what the model reads, and which of it counts in the loss."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

COUNTS = (
    "rows",  # read
    "kept",
    "skipped_invalid",
    "dropped_overlong",
    "dropped_without_target",
    "dropped_pieces",  # of split rows of which other pieces were kept: too long, or nothing in it is learnt
    "truncated",
    "split",  # documents cut into pieces
    "split_by_turn",  # conversations whose turns became rows of their own, as `history: split` says
    "cut_to_last_turn",  # conversations of which only the last turn is learnt, as `history: last` says
    "empty_replies",
    "control_tokens_in_content",  # special tokens written out in a message or a text
    "texts_with_control_tokens",  # documents and completions that hold any
    "tokens",
    "supervised_tokens",
)


@dataclass(frozen=True, slots=True)
class TokenRow:
    input_ids: np.ndarray
    """int32 (T,)"""
    loss_mask: np.ndarray
    """bool (T,): True where the token is a target, to be predicted from those before it. Never True at position 0."""
    place: str = ""
    """``file:line`` of the row it was made from."""


class TokenRows(Sequence[TokenRow]):
    """Rows that know their lengths without being read: those of a file, or some of another data set's."""

    lengths: np.ndarray
    """int32 (N,): tokens of each row."""
    supervised: np.ndarray
    """int32 (N,): targets of each row."""
    digest: str
    """What they hold, as one hash: the same for the same tokens and targets, wherever they lie."""
    largest_token: int

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenRow]: ...
    def __getitem__(self, index: int | slice) -> TokenRow | list[TokenRow]:
        if isinstance(index, slice):
            return [self.row(place) for place in range(*index.indices(len(self)))]
        place = int(index)
        if not -len(self) <= place < len(self):
            raise IndexError(f"row {place} of {len(self)}")
        return self.row(place % len(self))

    def row(self, index: int) -> TokenRow:
        raise NotImplementedError


class SelectedRows(TokenRows):
    """The rows of ``base`` at ``indices`` (int64, (N,)), in that order."""

    def __init__(self, base: TokenDataset, indices: np.ndarray) -> None:
        self._base, self._indices = base.rows, np.asarray(indices, dtype=np.int64)
        self.lengths, self.supervised = base.lengths[self._indices], base.supervised[self._indices]
        self.digest = hashlib.sha256(base.digest.encode() + self._indices.tobytes()).hexdigest()
        self.largest_token = base.largest_token

    def __len__(self) -> int:
        return len(self._indices)

    def row(self, index: int) -> TokenRow:
        return self._base[int(self._indices[index])]


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """A sequence of token rows: a list of them, or rows that stay in a memory-mapped file until they are asked for."""

    rows: Sequence[TokenRow]
    counts: dict[str, int]
    """Under the names of ``COUNTS``. ``kept`` is what ``rows`` holds, so the pieces of a split document each."""
    sources: np.ndarray | None = None
    """int32 (N,): the source of each row by its number; None where all are of one."""
    weights: tuple[float, ...] = (1.0,)
    """How many times an epoch uses the rows of each source."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TokenRow:
        return self.rows[index]

    def __iter__(self) -> Iterator[TokenRow]:
        return iter(self.rows)

    def select(self, indices: np.ndarray, counts: dict[str, int]) -> TokenDataset:
        sources = None if self.sources is None else self.sources[indices]
        return TokenDataset(SelectedRows(self, indices), counts, sources, self.weights)

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 (N,): tokens of each row."""
        if isinstance(self.rows, TokenRows):
            return self.rows.lengths
        return np.array([len(row.input_ids) for row in self.rows], dtype=np.int32)

    @cached_property
    def supervised(self) -> np.ndarray:
        """int32 (N,): targets of each row."""
        if isinstance(self.rows, TokenRows):
            return self.rows.supervised
        return np.array([np.count_nonzero(row.loss_mask) for row in self.rows], dtype=np.int32)

    @cached_property
    def digest(self) -> str:
        """The hash of all tokens and targets in order: equal for a list and a file of the same rows."""
        if isinstance(self.rows, TokenRows):
            return self.rows.digest
        digest = RowsDigest()
        for row in self.rows:
            digest.add(np.array([len(row.input_ids)]), row.input_ids, row.loss_mask)
        return digest.hexdigest()

    @cached_property
    def largest_token(self) -> int:
        if isinstance(self.rows, TokenRows):
            return self.rows.largest_token
        return max((int(row.input_ids.max()) for row in self.rows), default=0)


class RowsDigest:
    """A hash of rows that grows with them; how they are cut into portions doesn't matter."""

    def __init__(self) -> None:
        self._parts = [hashlib.sha256() for _ in range(3)]

    def add(self, lengths: np.ndarray, input_ids: np.ndarray, loss_mask: np.ndarray) -> None:
        """``lengths`` of some rows (N,), with their tokens and masks end to end."""
        values = (lengths.astype("<i8"), input_ids.astype("<i4"), loss_mask.astype(np.uint8))
        for part, array in zip(self._parts, values, strict=True):
            part.update(array.tobytes())

    def hexdigest(self) -> str:
        return hashlib.sha256(b"".join(part.digest() for part in self._parts)).hexdigest()
