"""Whether a template writes each part of a conversation, found out on a conversation of the same shape.

A part may be left out and its text stand elsewhere all the same: a tool's result `42`, and an answer that says 42. So
each text, name and number of the conversation is replaced by a word that stands nowhere else, and the rendering says
which of these the template writes. What it writes depends on roles and keys, not on words: it is asked once a shape.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from finetune.data.formats import Conversation
from finetune.data.template import ChatTemplate, Messages, Tools
from finetune.data.written import left_out, tool_left_out
from finetune.errors import DataError

_THINK = re.compile(r"(</?think>)")
_FIRST_NUMBER = 73_019_000_000
"""So far off that no template and no other part of a row holds it."""


@dataclass(frozen=True, slots=True)
class _Part:
    what: str
    message: int | None
    """Position in the conversation; None for a tool."""
    text: str
    word: str
    """What stands for it in the probe."""


class ShapeProbes:
    """What one chat template leaves out of conversations, by their shape."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._missing: dict[bytes, int | None] = {}

    def require(self, conversation: Conversation, place: str) -> None:
        """Raises DataError where the template leaves out a tool, or part of a message that was said to the model or is
        learnt. A template that refuses the probe tells nothing."""
        probe = _Probe(conversation)
        key = hashlib.blake2b(probe.described().encode(), digest_size=16).digest()
        if key not in self._missing:
            try:
                self._missing[key] = self._first_missing(probe, conversation.trained)
            except DataError:
                self._missing[key] = None
        found = self._missing[key]
        if found is None:
            return
        part = probe.parts[found]
        if part.message is None:
            raise tool_left_out(part.text, place)
        raise left_out(part.what, part.text, conversation.messages[part.message], part.message + 1, place)

    def _first_missing(self, probe: _Probe, trained: tuple[int, ...]) -> int | None:
        whole = self._render(probe, len(probe.messages))
        for index, part in enumerate(probe.parts):
            turn = part.message
            if turn is None:
                if part.word not in whole:
                    return index
            elif probe.messages[turn]["role"] == "assistant":
                # What the assistant said before may be shortened: so it will be when the model is asked.
                if turn in trained and part.word not in self._render(probe, turn + 1):
                    return index
            elif part.word not in whole and part.word not in self._render(probe, turn + 1, prompt=True):
                # A template may drop a tool's result later on, but not leave it out from the start.
                return index
        return None

    def _render(self, probe: _Probe, number: int, *, prompt: bool = False) -> str:
        key = number, prompt
        if key not in probe.rendered:
            (probe.rendered[key],) = self._template.render(
                [probe.messages[:number]], places=["a probe"], tools=[probe.tools], add_generation_prompt=prompt
            )
        return probe.rendered[key]


class _Probe:
    """A conversation with a word of its own for each part."""

    def __init__(self, conversation: Conversation) -> None:
        self.parts: list[_Part] = []
        self.rendered: dict[tuple[int, bool], str] = {}
        self._trained = conversation.trained
        self._ids: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self.tools: Tools = None if conversation.tools is None else [self._tool(tool) for tool in conversation.tools]
        self.messages: Messages = [self._message(turn, message) for turn, message in enumerate(conversation.messages)]

    def described(self) -> str:
        """The same for conversations of one shape."""
        return json.dumps([self.messages, self.tools, self._trained], default=repr)

    def _word(self, what: str, message: int | None, text: str) -> str:
        # Letters and digits alone, which templates neither trim nor escape; no word is part of another.
        word = f"probe{len(self.parts)}word"
        self.parts.append(_Part(what, message, text, word))
        return word

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool.get("function", tool)
        if not isinstance(function, dict):
            return tool
        named = {**_undescribed(function), "name": self._word("tool", None, str(function.get("name", "")))}
        return {**tool, "function": named} if function is not tool else named

    def _message(self, turn: int, message: dict[str, Any]) -> dict[str, Any]:
        shaped: dict[str, Any] = {}
        for key, value in message.items():
            if key == "content" and isinstance(value, str):
                # Templates that know reasoning take it out of the content, and write it in their own way.
                pieces = _THINK.split(value) if "think>" in value else [value]
                shaped[key] = "".join([self._text("content", turn, piece) for piece in pieces])
            elif key == "reasoning_content" and isinstance(value, str):
                shaped[key] = self._text("reasoning", turn, value)
            elif key == "tool_calls" and value:
                shaped[key] = [self._call(turn, call) for call in value]
            elif key == "tool_call_id" and isinstance(value, str):
                shaped[key] = self._id(value)
            elif key == "name" and isinstance(value, str):
                shaped[key] = self._names.setdefault(value, f"name{len(self._names)}word")
            else:
                shaped[key] = value
        return shaped

    def _text(self, what: str, turn: int, text: str) -> str:
        is_mark = _THINK.fullmatch(text) is not None
        return text if is_mark or not text.strip() else self._word(what, turn, text)

    def _call(self, turn: int, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        name = str(function.get("name", ""))
        self._names[name] = self._word("tool call", turn, name)
        shaped = {**function, "name": self._names[name]}
        if function.get("arguments") is not None:
            shaped["arguments"] = self._argument(turn, function["arguments"])
        whole = {**call, "function": shaped} if function is not call else shaped
        return {**whole, "id": self._id(call["id"])} if isinstance(call.get("id"), str) else whole

    def _argument(self, turn: int, value: Any) -> Any:
        what = "tool call's argument"
        if isinstance(value, dict):
            return {self._word(what, turn, str(key)): self._argument(turn, item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._argument(turn, item) for item in value]
        if isinstance(value, str):
            return self._text(what, turn, value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = _FIRST_NUMBER + len(self.parts)
            self.parts.append(_Part(what, turn, repr(value), str(number)))
            return number if isinstance(value, int) else number + 0.5
        return value

    def _id(self, value: str) -> str:
        # Mistral's templates want nine letters and digits.
        return self._ids.setdefault(value, f"probe{len(self._ids):04d}")


def _undescribed(value: Any) -> Any:
    """A schema without the words that differ between tools of one shape."""
    if isinstance(value, dict):
        return {
            key: "said" if key == "description" and isinstance(item, str) else _undescribed(item)
            for key, item in value.items()
        }
    return [_undescribed(item) for item in value] if isinstance(value, list) else value
