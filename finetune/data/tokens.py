"""A recipe's data sections to token rows."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from finetune.data.cache import CACHE_VARIABLE, DamagedEntryError, identity_of, open_entry, open_or_build
from finetune.data.dataset import COUNTS, TokenDataset, TokenRow
from finetune.data.encoding import Encoding, chunks_of, encode_in_order, first_skipped
from finetune.data.options import (
    DEFAULT_CHAT_OPTIONS,
    DEFAULT_MAX_DROPPED_SHARE,
    ChatOptions,
    Overlong,
    TrainOn,
    check_dropped,
)
from finetune.data.settings import DatasetSettings
from finetune.data.stored import EncodedRows, RowWriter
from finetune.errors import DataError, ResourceError


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
    num_workers: int | None = None,
    show_progress: bool = True,
) -> TokenDataset:
    """Read, render and tokenize all rows of ``sources``, in order, into memory.

    Documents become the beginning-of-sequence token where the tokenizer writes one, the text, and eos, all supervised.
    Conversations are rendered by the tokenizer's own chat template; ``train_on="assistant"`` supervises the
    assistant's replies with the stop token of each turn, ``"all"`` every token.
    A row of more than ``max_seq_length`` tokens is dropped and counted, truncated (see ``overlong.py``), an error, or
    (documents only) split into pieces.
    ``seed`` decides nothing yet: rows stay in file order, and the loader shuffles them.
    ``num_workers``: processes that share the work where it takes long, see ``encoding.py``.
    Raises DataError, with file and line, for a row that can't be used, when no row is left to train on,
    and when more than ``max_dropped_share`` of the rows were dropped.
    """
    encoding = Encoding(max_seq_length, overlong, train_on, chat)
    rows: list[TokenRow] = []
    numbers: list[np.ndarray] = []
    counts: Counter[str] = Counter()
    for number, portion in _encoded(sources, tokenizer, encoding, num_workers=num_workers, show_progress=show_progress):
        rows += portion.rows()
        numbers.append(np.full(len(portion.lengths), number, dtype=np.int32))
        counts.update(portion.counts)
    whole = _whole(counts)
    _check(sources, tokenizer, encoding, whole, max_dropped_share)
    return TokenDataset(rows, whole, np.concatenate(numbers), _weights(sources))


def prepare_dataset(
    sources: Sequence[DatasetSettings],
    *,
    tokenizer: Any,
    max_seq_length: int | None,
    overlong: Overlong,
    train_on: TrainOn = "assistant",
    chat: ChatOptions = DEFAULT_CHAT_OPTIONS,
    max_dropped_share: float = DEFAULT_MAX_DROPPED_SHARE,
    num_workers: int | None = None,
    show_progress: bool = True,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> tuple[TokenDataset, Path]:
    """(the rows of ``tokenize_dataset``, memory-mapped from the token cache; the entry's folder).

    They are made only where the cache doesn't hold them, or holds them damaged, which is told to ``say``. In memory
    stay a few bytes a row, however many there are. Raises what ``tokenize_dataset`` does, and ResourceError where the
    cache can't be written.
    """
    encoding = Encoding(max_seq_length, overlong, train_on, chat)

    def build(writer: RowWriter) -> dict[str, int]:
        counts: Counter[str] = Counter()
        encoded = _encoded(sources, tokenizer, encoding, num_workers=num_workers, show_progress=show_progress)
        for number, portion in encoded:
            writer.add(portion, number)
            counts.update(portion.counts)
        whole = _whole(counts)
        _check(sources, tokenizer, encoding, whole, max_dropped_share)
        return whole

    folder, rows, counts = open_or_build(identity_of(sources, tokenizer, encoding), _files(sources), build, say=say)
    _check(sources, tokenizer, encoding, counts, max_dropped_share)
    return TokenDataset(rows, counts, rows.sources, _weights(sources)), folder


def open_prepared(folder: Path, sources: Sequence[DatasetSettings]) -> TokenDataset:
    """What another process of this machine has prepared from ``sources`` and left in ``folder``.

    Raises ResourceError where it can't be opened.
    """
    try:
        rows, counts = open_entry(folder, _files(sources))
    except DamagedEntryError as cause:
        raise ResourceError(
            f"the rows that another process of this machine has prepared can't be opened: {cause}",
            where=folder,
            fix=f"set {CACHE_VARIABLE} to a folder that all of its processes see",
        ) from cause
    return TokenDataset(rows, counts, rows.sources, _weights(sources))


def _encoded(
    sources: Sequence[DatasetSettings],
    tokenizer: Any,
    encoding: Encoding,
    *,
    num_workers: int | None,
    show_progress: bool,
) -> Iterator[tuple[int, EncodedRows]]:
    with tqdm(desc="tokenize", unit=" rows", disable=None if show_progress else True) as progress:
        for chunk, rows in encode_in_order(chunks_of(sources), tokenizer, encoding, num_workers=num_workers):
            progress.update(len(chunk.examples))
            yield chunk.source, rows


def _whole(counts: Mapping[str, int]) -> dict[str, int]:
    assert counts.keys() <= set(COUNTS)
    return {name: counts.get(name, 0) for name in COUNTS}


def _check(
    sources: Sequence[DatasetSettings],
    tokenizer: Any,
    encoding: Encoding,
    counts: Mapping[str, int],
    max_dropped_share: float,
) -> None:
    try:
        _require_kept(sources, counts)
        check_dropped(counts, max_dropped_share, _shown(sources))
    except DataError as error:
        first = first_skipped(sources, tokenizer, encoding, read=True) if counts["skipped_invalid"] else None
        if first is None:
            raise
        what = f"{error.what}; the first that is skipped as invalid: {first}"
        raise DataError(what, where=error.where, fix=error.fix) from None


def _require_kept(sources: Sequence[DatasetSettings], counts: Mapping[str, int]) -> None:
    if not counts["kept"]:
        told = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        raise DataError(
            f"nothing to train on: no row is left ({told or 'no data is given'})",
            where=_shown(sources) or None,
            fix="raise max_seq_length, choose another `overlong`, or correct the rows",
        )


def _shown(sources: Sequence[DatasetSettings]) -> str:
    return ", ".join(source.shown for source in sources)


def _files(sources: Sequence[DatasetSettings]) -> list[str]:
    return [name for source in sources for name in source.data_files()]


def _weights(sources: Sequence[DatasetSettings]) -> tuple[float, ...]:
    return tuple(source.weight for source in sources)
