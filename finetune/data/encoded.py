"""Texts to token ids that know the characters they were made from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from finetune.errors import DataError


class Encoded:
    """One tokenization, with the characters of each token.

    Offsets come out of the tokenizer as a Python tuple a token, which takes longer than the tokenization; most rows
    ask only which token holds one character, so the arrays are made when they are asked for.
    """

    def __init__(self, input_ids: list[int], offsets: np.ndarray | None = None, encoding: Any = None) -> None:
        """``offsets``: int64 (T, 2), or an ``encoding`` of the tokenizers library to take them from."""
        assert (offsets is None) != (encoding is None)
        self.input_ids = np.array(input_ids, dtype=np.int32)
        """int32 (T,)"""
        self._given = offsets
        self._encoding = encoding

    @cached_property
    def _offsets(self) -> np.ndarray:
        given = self._given if self._encoding is None else np.array(self._encoding.offsets, dtype=np.int64)
        assert given is not None
        return np.maximum.accumulate(given.reshape(-1, 2), axis=0)

    @property
    def starts(self) -> np.ndarray:
        """int64 (T,), non-decreasing: the first character of each token (some tokenizers leave out a leading space)."""
        return self._offsets[:, 0]

    @property
    def ends(self) -> np.ndarray:
        """int64 (T,), non-decreasing: one past the last character of each token."""
        return self._offsets[:, 1]

    def first_token(self, start: int) -> int:
        """The first token that holds character ``start`` or a later one."""
        token = None if self._encoding is None else self._encoding.char_to_token(start)
        return int(np.searchsorted(self.ends, start, side="right")) if token is None else token

    def tokens_of(self, start: int, end: int) -> slice:
        """The tokens that hold any character of [start, end)."""
        first = self.first_token(start)
        last = int(np.searchsorted(self.starts, end, side="left"))
        return slice(first, max(first, last))

    def tokens_up_to(self, start: int, end: int, stop_ids: frozenset[int]) -> slice | None:
        """The tokens of [start, end) where the last of them is one of ``stop_ids``, else None."""
        last = None if self._encoding is None else self._encoding.char_to_token(end - 1)
        if last is None or int(self.input_ids[last]) not in stop_ids:
            # A character may belong to several tokens, the last of which counts.
            tokens = self.tokens_of(start, end)
            return tokens if tokens.start < tokens.stop and int(self.input_ids[tokens.stop - 1]) in stop_ids else None
        return slice(self.first_token(start), last + 1)


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[Encoded]:
    """Tokenize texts that hold their special tokens already. Raises DataError where offsets are unknown."""
    if not tokenizer.is_fast:
        raise DataError(
            "the tokenizer gives no character offsets, which the loss mask needs",
            where=tokenizer.name_or_path or None,
            fix="use a model folder with a tokenizer.json",
        )
    if not texts:
        return []
    encodings = plain_backend(tokenizer).encode_batch(list(texts), add_special_tokens=False)
    return [Encoded(encoding.ids, encoding=encoding) for encoding in encodings]


def plain_backend(tokenizer: Any) -> Any:
    """The tokenizer's own ``tokenizers.Tokenizer``, neither padding nor cutting, which knows its special tokens: asked
    directly, since a tokenizer's call builds lists that nothing here reads."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    return backend
