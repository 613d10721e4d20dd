"""A text file as non-overlapping windows of token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune.errors import DataError

TOKENS_PER_FORWARD = 2048
"""Tokens of one forward pass. More gains nothing on a CPU, and 2,048 x 128k logits in bfloat16 are 0.5 GiB already."""


def text_windows(path: Path, tokenizer: Any, *, window: int, max_tokens: int | None = None) -> list[np.ndarray]:
    """The token stream of a text file, cut into int64 arrays of ``window`` tokens; the last one may be shorter.

    The stream starts with one bos where the tokenizer prepends one, whether or not the text brings its own.
    A last window of a single token predicts nothing and is left out.
    Raises DataError for a file that is missing, isn't UTF-8 or has fewer than two tokens.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as cause:
        raise DataError("there is no such text file", where=path, fix="give the path of a text file") from cause
    except (UnicodeDecodeError, IsADirectoryError) as cause:
        raise DataError(f"this is not a UTF-8 text file: {cause}", where=path, fix="give a text file") from cause
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if prepends_bos(tokenizer) and ids[:1] != [tokenizer.bos_token_id]:
        ids = [tokenizer.bos_token_id, *ids]
    stream = np.asarray(ids[:max_tokens], dtype=np.int64)
    windows = [stream[start : start + window] for start in range(0, len(stream), window)]
    windows = [ids_S for ids_S in windows if len(ids_S) >= 2]
    if not windows:
        raise DataError(
            f"the text has {len(stream)} tokens, too few to predict one", where=path, fix="give a longer text"
        )
    return windows


def prepends_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer itself puts its bos token before a text."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def window_batches(windows: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Stack neighbouring windows of equal length to (B, S) arrays of at most TOKENS_PER_FORWARD tokens."""
    batch: list[np.ndarray] = []
    for ids_S in windows:
        if batch and (len(ids_S) != len(batch[0]) or (len(batch) + 1) * len(ids_S) > TOKENS_PER_FORWARD):
            yield np.stack(batch)
            batch = []
        batch.append(ids_S)
    if batch:
        yield np.stack(batch)
