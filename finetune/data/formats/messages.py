"""``{"messages": [{"role", "content"}, ...]}``: a chat. An assistant's turn with ``"weight": 0`` is not learnt."""

from __future__ import annotations

from typing import Any

from finetune.data.formats import FORMATS, Conversation, RowFormat, text_field
from finetune.errors import DataError, did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_messages(row: dict[str, Any], place: str) -> Conversation:
    raw = row.get("messages")
    if not isinstance(raw, list) or not raw:
        found = (
            "missing" if "messages" not in row else "null" if raw is None else "empty" if raw == [] else "not a list"
        )
        raise DataError(
            f"the field `messages` is {found}", where=place, fix='give a list of {"role": …, "content": …} objects'
        )
    if row.get("tools"):
        raise DataError("the row has `tools`, which this format doesn't render", where=place, fix="remove the column")
    messages, trained = [], []
    for index, message in enumerate(raw):
        name = f"message {index + 1}"
        if not isinstance(message, dict):
            raise DataError(f"{name} is not an object", where=place, fix='write {"role": …, "content": …}')
        role = text_field(message, "role", place, of=name)
        if role not in ROLES:
            raise DataError(f"{name} has the unknown role `{role}`", where=place, fix=did_you_mean(role, ROLES))
        text_field(message, "content", place, of=name)
        weight = message.get("weight", 1)
        if weight not in (0, 1, None):
            raise DataError(
                f"the `weight` of {name} must be 0 or 1, not {weight!r}", where=place, fix="correct the row"
            )
        if role == "assistant" and weight != 0:
            trained.append(index)
        messages.append({key: value for key, value in message.items() if key != "weight"})
    return Conversation(messages, tuple(trained))


FORMATS.register("messages")(RowFormat(required=("messages",), optional=(), parse=parse_messages))
