"""``{"chosen", "rejected"}``: two ways on from one prompt, the first of which people preferred.

The prompt is ``prompt`` (text or messages), or ``conversations`` (from/value or role/content), or it is what the two
have in common, where both are whole conversations. A way on is a text, a message, or a list of messages. Optionally
``system`` and ``tools``.
"""

from __future__ import annotations

from typing import Any

from finetune.data.chat import Message, read_tools, with_system
from finetune.data.formats import FORMATS, Preference, RowFormat, text_field
from finetune.data.formats.sharegpt import read_turns
from finetune.errors import DataError


def parse_preference(row: dict[str, Any], place: str) -> Preference:
    chosen, rejected = _way_on(row, "chosen", place), _way_on(row, "rejected", place)
    if chosen == rejected:
        raise DataError("`chosen` and `rejected` are the same", where=place, fix="remove the row")
    prompt = _prompt(row, place)
    common = _common_turns(chosen, rejected)
    if prompt:
        # Some repeat the prompt in both.
        if chosen[: len(prompt)] == prompt and rejected[: len(prompt)] == prompt:
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
    if not prompt:
        raise DataError(
            "`chosen` and `rejected` have no prompt in common, and the row has none",
            where=place,
            fix="add `prompt`, or begin both with the same messages",
        )
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in turns):
            raise DataError(f"`{name}` has no assistant's turn after the prompt", where=place, fix="remove the row")
    prompt, _ = with_system(row.get("system"), prompt, (), place)
    return Preference(prompt, chosen, rejected, read_tools(row.get("tools"), place))


def _prompt(row: dict[str, Any], place: str) -> list[Message]:
    """The messages of ``prompt`` or ``conversations``; none where the row has neither."""
    given = [name for name in ("prompt", "conversations") if row.get(name) is not None]
    if len(given) == 2:
        raise DataError("the row has both `prompt` and `conversations`", where=place, fix="leave one of them out")
    if given == ["prompt"] and isinstance(row["prompt"], str):
        return [{"role": "user", "content": row["prompt"]}]
    return read_turns(row[given[0]], place, of=given[0])[0] if given else []


def _way_on(row: dict[str, Any], name: str, place: str) -> list[Message]:
    value = row.get(name)
    if isinstance(value, dict | list):
        return read_turns(value if isinstance(value, list) else [value], place, of=name)[0]
    return [{"role": "assistant", "content": text_field(row, name, place)}]


def _common_turns(first: list[Message], second: list[Message]) -> int:
    """How many messages both begin with."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


FORMATS.register("preference")(
    RowFormat(
        required=("chosen", "rejected"),
        optional=("prompt", "conversations", "system", "tools"),
        parse=parse_preference,
    )
)
