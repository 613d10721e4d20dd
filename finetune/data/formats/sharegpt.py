"""``{"conversations": [{"from", "value"}, ...]}``, optionally with ``tools`` and ``system``.

``from`` is human or user, gpt (assistant, model, bot), system, observation or tool (what a tool gave back), or
function_call, whose ``value`` is the JSON text of one call, {"name", "arguments"}, or of several. Messages of
role/content under the same column are read too.
"""

from __future__ import annotations

from typing import Any

from finetune.data.chat import Message, parse_json, read_messages, read_tools, with_system
from finetune.data.formats import FORMATS, Conversation, RowFormat, text_field
from finetune.errors import DataError

CALLS = ("function_call", "tool_call")


def parse_sharegpt(row: dict[str, Any], place: str) -> Conversation:
    messages, trained = read_turns(row.get("conversations"), place)
    messages, trained = with_system(row.get("system"), messages, trained, place)
    return Conversation(messages, trained, read_tools(row.get("tools"), place))


def read_turns(value: Any, place: str, *, of: str = "conversations") -> tuple[list[Message], tuple[int, ...]]:
    """As ``read_messages``, of turns with ``from`` and ``value``."""
    raw = parse_json(value, f"the field `{of}`", place) if isinstance(value, str) else value
    if isinstance(raw, list):
        raw = [as_message(turn, place, f"message {number}") for number, turn in enumerate(raw, start=1)]
    return read_messages(raw, place, of=of)


def as_message(turn: Any, place: str, name: str) -> Any:
    """A turn of from/value under role/content; anything else as it is."""
    if not isinstance(turn, dict) or "role" in turn:
        return turn
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    speaker, value = text_field(turn, "from", place, of=name), text_field(turn, "value", place, of=name)
    if speaker not in CALLS:
        return {"role": speaker, "content": value, **rest}
    calls = parse_json(value, f"the function call in {name}", place)
    if not isinstance(calls, dict | list) or not calls:
        raise DataError(
            f"the function call in {name} is not an object",
            where=place,
            fix='write {"name": …, "arguments": {…}} as JSON text',
        )
    return {"role": "assistant", "content": "", "tool_calls": calls, **rest}


FORMATS.register("sharegpt")(RowFormat(required=("conversations",), optional=("tools", "system"), parse=parse_sharegpt))
