"""Examples to token rows, in order and portion by portion: in this process, and in several where that takes long."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from finetune.data.encoder import RowEncoder
from finetune.data.formats import Completion, Conversation, Document, Example
from finetune.data.options import DEFAULT_CHAT_OPTIONS, ChatOptions, Overlong, TrainOn
from finetune.data.settings import DatasetSettings
from finetune.data.sources import read_examples
from finetune.data.stored import EncodedRows
from finetune.errors import DataError, ResourceError
from finetune.processes import die_with_parent

CHUNK_ROWS = 1000
CHUNK_CHARACTERS = 4_000_000
"""Where a chunk ends: enough to feed every core, few enough that their offsets (Python tuples) stay small."""
START_SECONDS = 3.0
"""How long this process works alone before it starts others: as long as those take to start (2 to 4 s), so that
preparing takes at most twice what the better choice would have, and few rows never pay for a start."""


@dataclass(frozen=True)
class Encoding:
    """All that decides the tokens of an example besides the tokenizer."""

    max_seq_length: int | None
    overlong: Overlong
    train_on: TrainOn = "assistant"
    chat: ChatOptions = DEFAULT_CHAT_OPTIONS

    def encoder(self, tokenizer: Any) -> RowEncoder:
        return RowEncoder(tokenizer, self.max_seq_length, self.overlong, self.train_on, self.chat)

    def described(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "chat": {**asdict(self.chat), "template_kwargs": dict(self.chat.template_kwargs)}}


class Chunk(NamedTuple):
    source: int
    """The number of the source that the examples are of."""
    skips_invalid: bool
    examples: list[tuple[Example | DataError, str]]


def chunks_of(sources: Sequence[DatasetSettings]) -> Iterator[Chunk]:
    """The sources' examples in order, cut where their number or their length says: the same cuts each time."""
    for number, source in enumerate(sources):
        examples: list[tuple[Example | DataError, str]] = []
        characters = 0
        for example, place in read_examples(source):
            examples.append((example, place))
            characters += _num_characters(example)
            if len(examples) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
                yield Chunk(number, source.invalid_rows == "skip", examples)
                examples, characters = [], 0
        if examples:
            yield Chunk(number, source.invalid_rows == "skip", examples)


def _num_characters(example: Example | DataError) -> int:
    if isinstance(example, Document):
        return len(example.text)
    if isinstance(example, Completion):
        return len(example.prompt) + len(example.completion)
    if isinstance(example, Conversation):
        return sum(len(message["content"]) for message in example.messages if isinstance(message.get("content"), str))
    return 0


def encode_chunk(encoder: RowEncoder, chunk: Chunk) -> EncodedRows:
    """What ``encoder`` makes of the examples; what it made before is forgotten."""
    encoder.rows, encoder.counts = [], Counter()
    encoder.add(chunk.examples, skip_invalid=chunk.skips_invalid)
    return EncodedRows.of(encoder.rows, dict(encoder.counts))


def encode_in_order(
    chunks: Iterator[Chunk], tokenizer: Any, encoding: Encoding, *, num_workers: int | None = None
) -> Iterator[tuple[Chunk, EncodedRows]]:
    """Each chunk with what it became, in order. What comes out doesn't depend on ``num_workers``.

    ``num_workers``: processes to share the work once it has taken ``START_SECONDS``, or 0 for none. By default one for
    each core but this process's, which reads and writes meanwhile; of two cores none, as the tokenizer's own threads
    fill both (100,000 rows took 29 s in one process, 31 s with two more). The first error in the order of the rows is
    raised, whoever meets it. Raises ResourceError where a process was lost.
    """
    num_workers = (num_cores() - 1 if num_cores() > 2 else 0) if num_workers is None else num_workers
    encoder = encoding.encoder(tokenizer)
    start = time.monotonic()
    for chunk in chunks:
        if num_workers and time.monotonic() - start > START_SECONDS:
            yield from _encode_by_workers(_with_first(chunk, chunks), tokenizer, encoding, num_workers)
            return
        yield chunk, encode_chunk(encoder, chunk)


def _with_first(first: Chunk, rest: Iterator[Chunk]) -> Iterator[Chunk]:
    yield first
    yield from rest


def _encode_by_workers(
    chunks: Iterator[Chunk], tokenizer: Any, encoding: Encoding, num_workers: int
) -> Iterator[tuple[Chunk, EncodedRows]]:
    # Started anew, not forked: torch's and the tokenizer's threads don't survive a fork.
    context = multiprocessing.get_context("spawn")
    begin = (tokenizer, encoding, os.getpid())
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin_worker, initargs=begin)
    waiting: deque[tuple[Chunk, Future[EncodedRows]]] = deque()

    def finished() -> tuple[Chunk, EncodedRows]:
        chunk, future = waiting.popleft()
        return chunk, future.result()

    failed: DataError | None = None
    try:
        while failed is None:
            try:
                chunk = next(chunks)
            except StopIteration:
                break
            except DataError as error:
                failed = error  # of a row behind those that are still being encoded
                break
            waiting.append((chunk, pool.submit(_encode_in_worker, chunk)))
            # Two chunks a process: none waits for this one, and those in memory stay few.
            while len(waiting) > 2 * num_workers or (waiting and waiting[0][1].done()):
                yield finished()
        while waiting:
            yield finished()
    except BrokenProcessPool as cause:
        raise ResourceError(
            "a process that prepares the rows was lost (often the kernel ends one when memory runs out)",
            fix="set data_workers to fewer, or to 0 to prepare in one process",
        ) from cause
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    if failed is not None:
        raise failed


_encoder_of_worker: RowEncoder | None = None


def _begin_worker(tokenizer: Any, encoding: Encoding, parent: int) -> None:
    global _encoder_of_worker
    die_with_parent(parent)
    # The terminal's ^C reaches every process; the one that was started by hand says what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes fill the cores
    _encoder_of_worker = encoding.encoder(tokenizer)


def _encode_in_worker(chunk: Chunk) -> EncodedRows:
    assert _encoder_of_worker is not None
    return encode_chunk(_encoder_of_worker, chunk)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def first_skipped(
    sources: Sequence[DatasetSettings], tokenizer: Any, encoding: Encoding, *, read: bool = False
) -> str | None:
    """The place and the fault of the first row that is skipped since it can't be encoded (the chat template refuses it,
    the tokenizer lacks a token), or, with ``read``, since it can't be read."""
    for chunk in chunks_of(sources):
        if not chunk.skips_invalid:
            continue
        faults = [example for example, _ in chunk.examples if isinstance(example, DataError)]
        if faults and read:
            return f"{faults[0].where}: {faults[0].what}"
        examples = [(example, place) for example, place in chunk.examples if not isinstance(example, DataError)]
        try:
            encoding.encoder(tokenizer).add(examples, skip_invalid=False)
        except DataError as error:
            return f"{error.where}: {error.what}"
    return None
