"""``{"instruction", "input", "output"}``, optionally ``system`` and ``history`` ([[question, answer], ...]).

``input`` follows the instruction after a blank line. History is context: its answers are learnt as well.
"""

from __future__ import annotations

from typing import Any

from finetune.data.formats import FORMATS, Conversation, RowFormat, text_field
from finetune.errors import DataError


def parse_alpaca(row: dict[str, Any], place: str) -> Conversation:
    question = text_field(row, "instruction", place)
    answer = text_field(row, "output", place)
    # Tables often spell an absent optional column as null.
    given = text_field(row, "input", place) if row.get("input") is not None else ""
    system = text_field(row, "system", place) if row.get("system") is not None else ""
    turns = [*_history(row, place), (f"{question}\n\n{given}" if given and question else question or given, answer)]
    messages = [{"role": "system", "content": system}] if system else []
    for asked, answered in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    trained = tuple(index for index, message in enumerate(messages) if message["role"] == "assistant")
    return Conversation(messages, trained)


def _history(row: dict[str, Any], place: str) -> list[tuple[str, str]]:
    history = row.get("history") or []
    well_formed = isinstance(history, list) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in history
    )
    if not well_formed:
        raise DataError(
            "the field `history` must be a list of [question, answer] pairs of text", where=place, fix="correct the row"
        )
    return [(asked, answered) for asked, answered in history]


FORMATS.register("alpaca")(
    RowFormat(required=("instruction", "output"), optional=("input", "system", "history"), parse=parse_alpaca)
)
