"""Whether a rendering holds what its messages say: a template leaves out in silence what it doesn't know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from finetune.data.formats import Conversation
from finetune.errors import DataError

_FIX = "use a template that writes it, or take it out of the row"


class Rendering:
    """A rendered text, of which white space and the escapes of JSON don't count."""

    def __init__(self, text: str) -> None:
        self._squeezed = _squeeze(text)

    def holds(self, part: str) -> bool:
        return (
            _squeeze(part) in self._squeezed or _squeeze(json.dumps(part, ensure_ascii=False)[1:-1]) in self._squeezed
        )

    def missing(self, message: dict[str, Any]) -> tuple[str, str] | None:
        """(what, text) of the first part of ``message`` that isn't there."""
        return next(((name, part) for name, part in _parts(message) if not self.holds(part)), None)


def require_message(message: dict[str, Any], rendering: Rendering, *, number: int, place: str) -> None:
    """Raises DataError where the rendering of ``message`` (and others before it) lacks part of it."""
    missing = rendering.missing(message)
    if missing is not None:
        raise left_out(*missing, message, number, place)


def left_out(what: str, text: str, message: dict[str, Any], number: int, place: str) -> DataError:
    """``text``: the part of ``message`` that isn't written."""
    shown = text if len(text) <= 60 else text[:57] + "…"
    return DataError(
        f"the chat template leaves out the {what} of message {number} ({message['role']}): {shown!r}",
        where=place,
        fix=_FIX,
    )


def tool_left_out(name: str, place: str) -> DataError:
    return DataError(f"the chat template leaves out the tool {name!r}", where=place, fix=_FIX)


def require_tools(conversation: Conversation, rendering: Rendering, *, place: str) -> None:
    """Raises DataError where the rendering lacks the name of a tool."""
    for tool in conversation.tools or ():
        name = _tool_name(tool)
        if not rendering.holds(name):
            raise tool_left_out(name, place)


def _parts(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    content = message.get("content")
    if isinstance(content, str):
        # Templates that know reasoning take it out of the content, and write it in their own way.
        for part in content.replace("<think>", "</think>").split("</think>"):
            yield "content", part
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str):
        yield "reasoning", reasoning
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        yield "tool call", str(function.get("name", ""))
        for leaf in _leaves(function.get("arguments")):
            yield "tool call's argument", leaf


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)


def _tool_name(tool: dict[str, Any]) -> str:
    function = tool.get("function", tool)
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _squeeze(text: str) -> str:
    return "".join(text.split()).replace("\\", "")
