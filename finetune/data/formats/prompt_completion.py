"""``{"prompt", "completion"}``: what goes on from a prompt, which alone is learnt.

Two texts are a plain text and its continuation; two lists of messages (optionally with ``tools``) are a chat, of which
the assistant's turns in ``completion`` are learnt.
"""

from __future__ import annotations

from typing import Any

from finetune.data.chat import read_messages, read_tools
from finetune.data.formats import FORMATS, Completion, Conversation, RowFormat, text_field
from finetune.errors import DataError


def parse_prompt_completion(row: dict[str, Any], place: str) -> Completion | Conversation:
    for name in ("prompt", "completion"):
        if row.get(name) is None:
            text_field(row, name, place)
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before, _ = read_messages(prompt, place, of="prompt")
        after, trained = read_messages(completion, place, of="completion")
        if not trained:
            raise DataError("`completion` has no assistant's turn to learn", where=place, fix="remove the row")
        shifted = tuple(len(before) + index for index in trained)
        return Conversation([*before, *after], shifted, read_tools(row.get("tools"), place))
    if isinstance(prompt, list) != isinstance(completion, list):
        raise DataError(
            "one of `prompt` and `completion` is text, the other a list of messages",
            where=place,
            fix="write both in the same way",
        )
    return Completion(text_field(row, "prompt", place), text_field(row, "completion", place))


FORMATS.register("prompt_completion")(
    RowFormat(required=("prompt", "completion"), optional=("tools",), parse=parse_prompt_completion)
)
