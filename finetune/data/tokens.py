"""A recipe's data sections to token rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from tqdm import tqdm

from finetune.data.dataset import TokenDataset
from finetune.data.encoder import RowEncoder
from finetune.data.options import (
    DEFAULT_CHAT_OPTIONS,
    DEFAULT_MAX_DROPPED_SHARE,
    ChatOptions,
    Overlong,
    TrainOn,
    check_dropped,
)
from finetune.data.settings import DatasetSettings
from finetune.data.sources import read_examples
from finetune.errors import DataError

# Rows tokenized in one call: enough to feed every core, few enough that their offsets (Python tuples) stay small.
CHUNK_ROWS = 1000


def tokenize_dataset(
    sources: Sequence[DatasetSettings],
    *,
    tokenizer: Any,
    max_seq_length: int | None,
    overlong: Overlong,
    train_on: TrainOn = "assistant",
    chat: ChatOptions = DEFAULT_CHAT_OPTIONS,
    max_dropped_share: float = DEFAULT_MAX_DROPPED_SHARE,
    seed: int = 0,
    show_progress: bool = True,
) -> TokenDataset:
    """Read, render and tokenize all rows of ``sources``, in order.

    Documents become the beginning-of-sequence token where the tokenizer writes one, the text, and eos, all supervised.
    Conversations are rendered by the tokenizer's own chat template; ``train_on="assistant"`` supervises the
    assistant's replies with the stop token of each turn, ``"all"`` every token.
    A row of more than ``max_seq_length`` tokens is dropped and counted, truncated (see ``overlong.py``), an error, or
    (documents only) split into pieces.
    ``seed`` decides nothing yet: rows stay in file order, and the loader shuffles them.
    Raises DataError, with file and line, for a row that can't be used, when no row is left to train on,
    and when more than ``max_dropped_share`` of the rows were dropped.
    """
    work = RowEncoder(tokenizer, max_seq_length, overlong, train_on, chat)
    with tqdm(desc="tokenize", unit=" rows", disable=None if show_progress else True) as progress:
        for source in sources:
            examples = read_examples(source)
            while chunk := list(islice(examples, CHUNK_ROWS)):
                work.add(chunk, skip_invalid=source.invalid_rows == "skip")
                progress.update(len(chunk))
    counts = work.finish()
    if not work.rows:
        told = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        raise DataError(
            f"nothing to train on: no row is left ({told or 'no data is given'})",
            where=", ".join(source.shown for source in sources) or None,
            fix="raise max_seq_length, choose another `overlong`, or correct the rows",
        )
    check_dropped(counts, max_dropped_share, ", ".join(source.shown for source in sources))
    return TokenDataset(work.rows, counts)
