"""Rows that are read and encoded while the training goes on, for data that neither memory nor disk could hold prepared.

The order. Sources are interleaved, one example each in turn until each has ended. Every ``buffer_rows`` examples are a
block: it is encoded, its rows are shuffled by (seed, epoch, block) and, with packing, packed; blocks follow one
another, and epochs too, without a short step at their end. So no row is lost, the order is the same on any number of
ranks, and a row moves by less than a block from where it stands in its file: files sorted by kind need shuffling first.

The place. (epoch, block, sequences taken from it) says where a step begins. To go on there, the epoch's earlier
examples are read and passed over (100,000 short rows a second or two), and the block is encoded anew.

The cost. Every rank encodes all rows and keeps its share, in a thread beside the training: no rank waits for another,
and none is told what another has read. Where encoding is slower than training, preparing the rows is the better choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from finetune.data.batch import LENGTH_MULTIPLE, Batch, BatchLayout
from finetune.data.cache import stream_identity
from finetune.data.dataset import COUNTS, TokenRow
from finetune.data.encoding import Chunk, Encoding, encode_chunk
from finetune.data.formats import Example
from finetune.data.options import check_dropped
from finetune.data.order import arrange
from finetune.data.settings import DatasetSettings
from finetune.data.sources import read_examples
from finetune.errors import CheckpointError, DataError
from finetune.files import sha256_json


@dataclass(frozen=True)
class _Block:
    epoch: int
    number: int
    sequences: list[list[TokenRow]]
    counts: dict[str, int]


@dataclass(frozen=True)
class _Step:
    number: int
    sequences: list[list[TokenRow]]
    next_position: dict[str, Any]
    """Where the next step begins."""


class StreamLoader:
    """The micro-batches of each optimizer step, as ``StepLoader`` gives them, of rows that are read as they are needed.

    Steps are asked for in order; an earlier one is read anew from the beginning. Raises DataError, with file and line,
    for a row that can't be used, for a token that the model doesn't have, and where no row of a whole epoch is left.
    """

    def __init__(
        self,
        sources: Sequence[DatasetSettings],
        *,
        tokenizer: Any,
        encoding: Encoding,
        max_dropped_share: float,
        vocab_size: int,
        packing: bool,
        max_seq_length: int,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        world_size: int,
        rank: int,
        seed: int,
        max_steps: int,
        pad_token_id: int,
        buffer_rows: int,
        group_by_length: bool = True,
        length_multiple: int = LENGTH_MULTIPLE,
    ) -> None:
        self.num_steps = max_steps
        self._sources = list(sources)
        self._encoder = encoding.encoder(tokenizer)
        self._max_dropped_share = max_dropped_share
        self._vocab_size = vocab_size
        self._pack_length = max_seq_length if packing else None
        self._groups = group_by_length and not packing
        self._seed = seed
        self._buffer_rows = buffer_rows
        self._layout = BatchLayout(micro_batch_size, world_size, rank, max_seq_length, pad_token_id, length_multiple)
        self._global_batch = micro_batch_size * gradient_accumulation_steps * world_size
        self.digest = sha256_json([stream_identity(sources, tokenizer, encoding), buffer_rows])
        """What is streamed, by the names and sizes of the files: their content isn't read beforehand."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="finetune-stream")
        self.seek(0, {"epoch": 0, "block": 0, "index": 0, "counts": {}})

    # Where it stands.

    def seek(self, step: int, position: dict[str, Any]) -> None:
        """Let step ``step`` begin at ``position``, which ``position_after`` gave."""
        self._blocks = self._read_blocks(position["epoch"], position["block"])
        self._coming: Future[_Block] = self._reader.submit(next, self._blocks)
        self._counts: Counter[str] = Counter(position["counts"])
        """Of the blocks before the present one."""
        self._block: _Block | None = None
        self._index = position["index"]
        self._next_step = step
        self._step: _Step | None = None

    def position_after(self, step: int) -> dict[str, Any]:
        """Plain JSON: where the step behind ``step`` begins, which must be the last that was read."""
        return self._read(step).next_position

    @property
    def counts(self) -> dict[str, int]:
        """Under the names of ``COUNTS``, of the rows read so far; those of a second epoch count again."""
        counts = self._counts + Counter(self._block.counts if self._block else {})
        return {name: counts[name] for name in COUNTS}

    @property
    def first_row(self) -> TokenRow:
        return self._read(self._next_step if self._step is None else self._step.number).sequences[0][0]

    # What a step holds.

    def sequences(self, step: int) -> list[list[TokenRow]]:
        """The global step's sequences over all ranks."""
        return self._read(step).sequences

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of optimizer step ``step`` (from 0): as many on every rank."""
        sequences = self.sequences(step)
        return [
            self._layout.collate([sequences[at] for at in parts[self._layout.rank]])
            for parts in self._layout.deal(len(sequences))
        ]

    def global_supervised_tokens(self, step: int) -> int:
        return sum(int(np.count_nonzero(row.loss_mask)) for rows in self.sequences(step) for row in rows)

    def num_tokens(self, step: int) -> int:
        return sum(map(_length, self.sequences(step)))

    def num_positions(self, step: int) -> int:
        return self._layout.num_positions([_length(rows) for rows in self.sequences(step)])

    def _read(self, step: int) -> _Step:
        assert 0 <= step < self.num_steps, f"step {step} of {self.num_steps}"
        if self._step is not None and self._step.number == step:
            return self._step
        if step < self._next_step:
            self.seek(0, {"epoch": 0, "block": 0, "index": 0, "counts": {}})
        while self._step is None or self._step.number < step:
            self._step = self._take()
        return self._step

    def _take(self) -> _Step:
        sequences: list[list[TokenRow]] = []
        while len(sequences) < self._global_batch:
            if self._block is None or self._index >= len(self._block.sequences):
                self._next_block()
                continue
            taken = self._block.sequences[self._index : self._index + self._global_batch - len(sequences)]
            sequences += taken
            self._index += len(taken)
        assert self._block is not None
        if self._groups:
            sequences.sort(key=lambda rows: -_length(rows))
        position = {
            "epoch": self._block.epoch,
            "block": self._block.number,
            "index": self._index,
            "counts": dict(self._counts),
        }
        step = _Step(self._next_step, sequences, position)
        self._next_step += 1
        return step

    def _next_block(self) -> None:
        if self._block is not None:
            self._counts.update(self._block.counts)
            self._index -= len(self._block.sequences)
        self._block = self._coming.result()
        self._coming = self._reader.submit(next, self._blocks)
        check_dropped(self.counts, self._max_dropped_share, ", ".join(source.shown for source in self._sources))

    # What the thread does.

    def _read_blocks(self, epoch: int, number: int) -> Iterator[_Block]:
        """Blocks without end, from block ``number`` of ``epoch`` on."""
        while True:
            examples = islice(_interleaved(self._sources), number * self._buffer_rows, None)
            is_whole, num_sequences = number == 0, 0
            while portion := list(islice(examples, self._buffer_rows)):
                block = self._encode(epoch, number, portion)
                num_sequences += len(block.sequences)
                yield block
                number += 1
            if is_whole and not num_sequences:
                raise DataError(
                    "nothing to train on: no row is left",
                    where=", ".join(source.shown for source in self._sources),
                    fix="raise max_seq_length, choose another `overlong`, or correct the rows",
                )
            epoch, number = epoch + 1, 0

    def _encode(self, epoch: int, number: int, portion: list[tuple[int, Example | DataError, str]]) -> _Block:
        rows: list[TokenRow] = []
        counts: Counter[str] = Counter()
        for source, settings in enumerate(self._sources):
            examples = [(example, place) for its, example, place in portion if its == source]
            if examples:
                encoded = encode_chunk(self._encoder, Chunk(source, settings.invalid_rows == "skip", examples))
                counts.update(encoded.counts)
                rows += encoded.rows()
        for row in rows:
            if int(row.input_ids.max()) >= self._vocab_size:
                raise CheckpointError(
                    f"the tokenizer writes token {int(row.input_ids.max())}, the model has {self._vocab_size}",
                    where=row.place,
                    fix="tokenizer and config.json must belong to one model",
                )
        lengths = np.array([len(row.input_ids) for row in rows], dtype=np.int64)
        generator = np.random.default_rng([self._seed, epoch, number])
        order = arrange(
            generator.permutation(len(rows)),
            lengths,
            generator,
            pack_length=self._pack_length,
            group_by_length=self._groups,
        )
        sequences = [[rows[at] for at in places] for places in order.sequences(0, len(order))]
        return _Block(epoch, number, sequences, dict(counts))


def _interleaved(sources: Sequence[DatasetSettings]) -> Iterator[tuple[int, Example | DataError, str]]:
    """(source's number, example, place): one of each source in turn, of those that haven't ended."""
    streams = [(number, read_examples(source)) for number, source in enumerate(sources)]
    while streams:
        for stream in list(streams):
            number, examples = stream
            for example, place in islice(examples, 1):
                yield number, example, place
                break
            else:
                streams.remove(stream)


def _length(rows: Sequence[TokenRow]) -> int:
    return sum(len(row.input_ids) for row in rows)
