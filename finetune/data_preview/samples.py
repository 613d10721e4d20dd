"""Some rows as the model will see them: each encoded as the training encodes it, then taken apart into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from finetune.data.dataset import TokenRow
from finetune.data.encoder import RowEncoder
from finetune.data.encoding import Encoding
from finetune.data.formats import Conversation, Example, Preference
from finetune.data_preview.pieces import Piece, pieces_of
from finetune.errors import DataError
from finetune.train.settings import TrainSettings

FATES = {
    "skipped_invalid": "skipped: it can't be used",
    "dropped_overlong": "dropped: longer than max_seq_length",
    "dropped_without_target": "dropped: nothing in it is learnt",
    "dropped_pieces": "pieces of it are dropped: too long, or nothing in them is learnt",
    "truncated": "cut to max_seq_length",
    "split": "split at max_seq_length",
    "split_by_turn": "split: a row a turn",
    "cut_to_last_turn": "only its last turn is learnt",
    "empty_replies": "an empty reply",
    "control_tokens_in_content": "control tokens written out in its text",
}
"""What a count of a single row says about it."""


@dataclass(frozen=True)
class SampleRow:
    label: str
    """Blank, ``piece 1 of 3``, or of a preference row ``prompt``, ``chosen``, ``rejected``."""
    num_tokens: int
    num_learnt: int
    pieces: list[Piece]


@dataclass(frozen=True)
class Sample:
    place: str
    """``file:line``"""
    kind: str
    """``conversation``, ``document``, ``completion``, ``token ids`` or ``preference``"""
    notes: list[str]
    """What became of it, where it isn't simply kept."""
    rows: list[SampleRow]
    """The rows that were made of it: none where it was dropped, several where it was split."""


class Reservoir:
    """``size`` items of a stream of unknown length, each equally likely (Vitter's algorithm R), in the order seen."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._random = np.random.default_rng((seed, 0x5A3B1E))
        self._seen = 0
        self._kept: list[tuple[int, Any]] = []

    def offer(self, item: Any) -> None:
        self._seen += 1
        if len(self._kept) < self._size:
            self._kept.append((self._seen, item))
        elif self._size:
            place = int(self._random.integers(self._seen))
            if place < self._size:
                self._kept[place] = (self._seen, item)

    def items(self) -> list[Any]:
        return [item for _, item in sorted(self._kept, key=lambda kept: kept[0])]


def encoding_of(settings: TrainSettings) -> Encoding:
    return Encoding(settings.max_seq_length, settings.overlong, settings.train_on, settings.chat_options)


def sample_of(
    example: Example | DataError, place: str, tokenizer: Any, settings: TrainSettings, *, skip_invalid: bool
) -> Sample:
    """``example`` encoded under the stage's settings. Raises DataError where the stage would."""
    if isinstance(example, DataError):
        return Sample(place, "invalid", [f"skipped: {example.what}"], [])
    try:
        if isinstance(example, Preference):
            return _preference(example, place, tokenizer, settings)
        return _plain(example, place, tokenizer, settings)
    except DataError as error:
        if not skip_invalid:
            raise
        return Sample(place, kind_of(example), [f"skipped: {error.what}"], [])


def _plain(example: Example, place: str, tokenizer: Any, settings: TrainSettings) -> Sample:
    encoder = encoding_of(settings).encoder(tokenizer)
    rows, notes = _encode(encoder, example, place)
    shown = [_row(tokenizer, row, encoder.stop_ids) for row in rows]
    if len(shown) > 1:
        shown = [replace(row, label=f"row {number} of {len(shown)}") for number, row in enumerate(shown, start=1)]
    return Sample(place, kind_of(example), notes, shown)


def kind_of(example: Example) -> str:
    return {"TokenIds": "token ids"}.get(type(example).__name__, type(example).__name__.lower())


def _encode(encoder: RowEncoder, example: Example, place: str) -> tuple[list[TokenRow], list[str]]:
    encoder.add([(example, place)], skip_invalid=False)
    counts = encoder.finish()
    return list(encoder.rows), [text for name, text in FATES.items() if counts.get(name)]


def _row(tokenizer: Any, row: TokenRow, stop_ids: Sequence[int], label: str = "") -> SampleRow:
    ids, learnt = np.asarray(row.input_ids), np.asarray(row.loss_mask)
    return SampleRow(
        label, len(ids), int(np.count_nonzero(learnt)), pieces_of(tokenizer, ids, learnt, stop_ids=stop_ids)
    )


def ways_on(example: Preference) -> dict[str, Conversation]:
    """The two conversations of a preference row, each with its own way on as what is learnt."""
    found = {}
    for name, reply in (("chosen", example.chosen), ("rejected", example.rejected)):
        messages = [*example.prompt, *reply]
        trained = (
            turn for turn in range(len(example.prompt), len(messages)) if messages[turn].get("role") == "assistant"
        )
        found[name] = Conversation(messages, tuple(trained), example.tools)
    return found


def _preference(example: Preference, place: str, tokenizer: Any, settings: TrainSettings) -> Sample:
    """The prompt that both ways on share, then each of them."""
    rows: dict[str, TokenRow] = {}
    notes: list[str] = []
    encoder = encoding_of(settings).encoder(tokenizer)
    for name, conversation in ways_on(example).items():
        encoder = encoding_of(settings).encoder(tokenizer)
        made, fates = _encode(encoder, conversation, place)
        notes += [f"{name}: {fate}" for fate in fates]
        if len(made) == 1:
            rows[name] = made[0]
    if len(rows) < 2:
        shown = [_row(tokenizer, row, encoder.stop_ids, name) for name, row in rows.items()]
        return Sample(place, "preference", notes, shown)
    chosen, rejected = rows["chosen"], rows["rejected"]
    shared = min(int(np.argmax(chosen.loss_mask)), int(np.argmax(rejected.loss_mask)))
    if not np.array_equal(chosen.input_ids[:shared], rejected.input_ids[:shared]):
        shared = 0
    parts = {name: TokenRow(row.input_ids[shared:], row.loss_mask[shared:], place) for name, row in rows.items()}
    if shared:
        parts = {"prompt": TokenRow(chosen.input_ids[:shared], chosen.loss_mask[:shared], place), **parts}
    return Sample(
        place, "preference", notes, [_row(tokenizer, row, encoder.stop_ids, name) for name, row in parts.items()]
    )
