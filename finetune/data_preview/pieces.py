"""Token ids as pieces of text, each with what the loss makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

UNDECODED = "\ufffd"
MOST_IDS = 8
"""Tokens that may make up one character: UTF-8 has four bytes at most, and some tokenizers write one byte a token."""


@dataclass(frozen=True)
class Piece:
    """A token, or several where only together they are a character."""

    text: str
    ids: list[int]
    learnt: bool
    """Whether it is a target of the loss."""
    special: bool
    """Whether it is one of the tokenizer's control tokens rather than text."""
    stop: bool
    """Whether generation stops at it."""


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The tokenizer's control tokens: its special tokens and the added ones that it calls special."""
    added = tokenizer.added_tokens_decoder
    return frozenset({*tokenizer.all_special_ids, *(token for token in added if added[token].special)})


def pieces_of(tokenizer: Any, input_ids: np.ndarray, learnt: np.ndarray, *, stop_ids: Sequence[int]) -> list[Piece]:
    """The pieces of a row, whose texts joined are the row decoded. ``input_ids`` (T,) integer, ``learnt`` (T,) bool.

    A decoder may drop a leading space, or hold back bytes of an unfinished character: each piece is what its tokens add
    to the text of those just before them.
    """
    controls, stops = special_ids(tokenizer), frozenset(stop_ids)
    ids, mask = [int(token) for token in input_ids], [bool(value) for value in learnt]
    pieces: list[Piece] = []
    before, start = 0, 0

    def decode(first: int, last: int) -> str:
        text: str = tokenizer.decode(ids[first:last], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    for end in range(1, len(ids) + 1):
        last, special = ids[end - 1], ids[end - 1] in controls
        ends_here = end == len(ids) or mask[end] != mask[start] or ids[end] in controls or special
        known = decode(before, start)
        text = decode(before, end)
        if not ends_here and end - start < MOST_IDS and (text.endswith(UNDECODED) or len(text) <= len(known)):
            continue
        added = text[len(known) :] if text.startswith(known) else decode(start, end)
        pieces.append(Piece(added, ids[start:end], mask[start], special, last in stops))
        before, start = start, end
    return pieces
