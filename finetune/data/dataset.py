"""Tokenized rows: what the model reads, and which of it counts in the loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

COUNTS = (
    "rows",  # read
    "kept",
    "skipped_invalid",
    "dropped_overlong",
    "dropped_without_target",
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


@dataclass(frozen=True)
class TokenDataset:
    rows: list[TokenRow]
    counts: dict[str, int]
    """Under the names of ``COUNTS``. ``kept`` is what ``rows`` holds, so the pieces of a split document each."""
