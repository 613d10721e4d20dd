"""Chat messages as people write them, to messages as chat templates take them.

What comes out: ``role`` is one of ROLES, ``content`` always text; an assistant's turn may hold ``reasoning_content``
(text) and ``tool_calls`` ([{"type": "function", "function": {"name", "arguments": {…}}}]). Other keys stay as they are.
"""

from __future__ import annotations

import json
from typing import Any

from finetune.data.formats import text_field
from finetune.data.json_values import fault_of
from finetune.errors import DataError, did_you_mean

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_NAMES = {
    **{"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatbot": "assistant"},
    **{"observation": "tool", "tool_response": "tool", "function_response": "tool", "function": "tool"},
    "ipython": "tool",
}
"""Roles as other tools name them."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
REASONING_PARTS = {"reasoning": ("reasoning", "text"), "thinking": ("thinking", "text"), "think": ("think", "text")}
OTHER_MEDIA = ("image", "image_url", "input_image", "audio", "input_audio", "video", "video_url", "file")
_SWITCHES = ("weight", "train")


def read_messages(value: Any, place: str, *, of: str = "messages") -> tuple[list[Message], tuple[int, ...]]:
    """(messages, positions of the assistant's turns to learn) from a list of messages, or such a list as JSON text.

    ``"weight": 0`` or ``"train": false`` takes a turn out of what is learnt.
    Raises DataError with ``place`` for what isn't a list of messages or can't be rendered by a chat template.
    """
    raw = parse_json(value, f"the field `{of}`", place) if isinstance(value, str) else value
    if not isinstance(raw, list) or not raw:
        found = "missing or null" if raw is None else "empty" if raw == [] else "not a list"
        raise DataError(
            f"the field `{of}` is {found}", where=place, fix='give a list of {"role": …, "content": …} objects'
        )
    messages, trained = [], []
    for index, message in enumerate(raw):
        if _is_plain(message):
            messages.append(message)
            if message["role"] == "assistant":
                trained.append(index)
            continue
        name = f"message {index + 1}"
        if not isinstance(message, dict):
            raise DataError(f"{name} is not an object", where=place, fix='write {"role": …, "content": …}')
        messages.append(read_message(message, place, name))
        if is_trained(message, messages[-1]["role"], place, name):
            trained.append(index)
    return messages, tuple(trained)


def _is_plain(message: Any) -> bool:
    """Nearly all are: a known role, a text, nothing else."""
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("content")) is str
        and message.get("role") in ROLES
    )


def read_message(message: Message, place: str, name: str) -> Message:
    """One message under ``role``/``content``. ``name`` is what an error calls it: ``message 3``."""
    # A column of structs has all fields in every row; the ones that a message lacks are null.
    rest = {key: value for key, value in message.items() if value is not None and key not in _SWITCHES}
    role = read_role(text_field(message, "role", place, of=name), place, name)
    rest.pop("role")
    calls = rest.pop("tool_calls", None)
    if calls is None and "function_call" in rest:
        calls = [rest.pop("function_call")]
    tool_calls = read_tool_calls(calls, place, name) if calls else []
    content, reasoning = _read_content(rest.pop("content", None), place, name)
    for key in REASONING_KEYS:
        if key in rest:
            reasoning.append(text_field({key: rest.pop(key)}, key, place, of=name))
    if role != "assistant" and (tool_calls or reasoning):
        what = "tool calls" if tool_calls else "reasoning"
        raise DataError(f"{name} has {what}, but its role is `{role}`", where=place, fix="only an assistant has these")
    if content is None:
        if not tool_calls:
            # An empty list of parts is no content either.
            text_field({"content": None} if "content" in message else {}, "content", place, of=name)
        content = ""
    read = {"role": role, "content": content, **rest}
    if reasoning:
        read["reasoning_content"] = "".join(reasoning)
    if tool_calls:
        read["tool_calls"] = tool_calls
    return read


def read_role(role: str, place: str, name: str) -> str:
    role = OTHER_NAMES.get(role, role)
    if role not in ROLES:
        raise DataError(
            f"{name} has the unknown role `{role}`", where=place, fix=did_you_mean(role, [*ROLES, *OTHER_NAMES])
        )
    return role


def is_trained(message: Message, role: str, place: str, name: str) -> bool:
    """Whether the turn is learnt: an assistant's whose ``weight`` or ``train`` doesn't say otherwise."""
    said = {key: message[key] for key in _SWITCHES if message.get(key) is not None}
    for key, value in said.items():
        if value not in (0, 1) or (key == "train" and not isinstance(value, bool)):
            allowed = "0 or 1" if key == "weight" else "true or false"
            raise DataError(
                f"the `{key}` of {name} must be {allowed}, not {value!r}", where=place, fix="correct the row"
            )
    if len(said) == 2 and bool(said["weight"]) != said["train"]:
        raise DataError(f"`weight` and `train` of {name} disagree", where=place, fix="leave one of them out")
    if role == "assistant":
        return all(said.values())
    if any(said.values()):
        raise DataError(
            f"{name} is to be learnt, but its role is `{role}`",
            where=place,
            fix="only the assistant's turns can be chosen: remove its `weight` or `train`",
        )
    return False


def _read_content(content: Any, place: str, name: str) -> tuple[str | None, list[str]]:
    """(text, reasoning) of a message's content, which is text or a list of parts. None: there is none."""
    if content is None or isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        text_field({"content": content}, "content", place, of=name)
    texts: list[str] = []
    reasoning: list[str] = []
    for number, part in enumerate(content, start=1):
        of = f"part {number} of {name}"
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise DataError(f"{of} is not an object", where=place, fix='write {"type": "text", "text": …}')
        kind = text_field(part, "type", place, of=of)
        if kind in ("text", "input_text", "output_text"):
            texts.append(text_field(part, "text", place, of=of))
        elif kind in REASONING_PARTS:
            keys = REASONING_PARTS[kind]
            key = next((key for key in keys if part.get(key) is not None), keys[0])
            reasoning.append(text_field(part, key, place, of=of))
        elif kind in OTHER_MEDIA:
            raise DataError(
                f"{of} is of the type `{kind}`; finetune trains on text alone", where=place, fix="remove the row"
            )
        else:
            raise DataError(
                f"{of} has the unknown type `{kind}`", where=place, fix=did_you_mean(kind, ["text", *REASONING_PARTS])
            )
    return ("".join(texts) if texts or reasoning else None), reasoning


def read_tool_calls(value: Any, place: str, name: str) -> list[dict[str, Any]]:
    """Calls as templates take them, from calls with or without the ``function`` level, arguments an object or JSON."""
    calls = parse_json(value, f"`tool_calls` of {name}", place) if isinstance(value, str) else value
    read = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"a tool call of {name} has no function's name",
                where=place,
                fix='write {"type": "function", "function": {"name": …, "arguments": {…}}}',
            )
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):
            arguments = parse_json(arguments or "{}", f"the arguments of `{function['name']}` in {name}", place)
        if not isinstance(arguments, dict | None):
            raise DataError(
                f"the arguments of `{function['name']}` in {name} must be an object, not {type(arguments).__name__}",
                where=place,
                fix="correct the row",
            )
        kept = {"id": call["id"]} if function is not call and call.get("id") is not None else {}
        read.append({**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments or {}}})
    return read


def read_tools(value: Any, place: str) -> list[dict[str, Any]] | None:
    """The ``tools`` column, a list or JSON text, as templates take it: [{"type": "function", "function": {…}}]."""
    tools = parse_json(value, "the field `tools`", place) if isinstance(value, str) and value.strip() else value
    if not tools:
        return None
    if isinstance(tools, dict):
        tools = [tools]
    read = []
    for tool in tools if isinstance(tools, list) else [tools]:
        if isinstance(tool, str):
            tool = parse_json(tool, "a tool", place)
        if not isinstance(tool, dict) or not isinstance(tool.get("function", tool), dict):
            raise DataError(
                "the field `tools` must be a list of functions' JSON schemas",
                where=place,
                fix='write [{"type": "function", "function": {"name": …, "parameters": {…}}}]',
            )
        function = tool.get("function", tool)
        text_field(function, "name", place, of="a tool")
        read.append(tool if function is not tool else {"type": "function", "function": tool})
    return read


def parse_json(text: str, what: str, place: str) -> Any:
    """The value of JSON text in a field. Raises DataError naming ``what`` and its place."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise DataError(f"{what} is text but not JSON: {cause}", where=place, fix="correct the row") from cause
    fault = fault_of(text, value)
    if fault is not None:
        raise DataError(f"{what} can't be used: {fault}", where=place, fix="correct the row")
    return value


def with_system(system: Any, messages: list[Message], trained: tuple[int, ...], place: str) -> tuple[Any, Any]:
    """(messages, trained) with the row's ``system`` column, where it says something, as the first message."""
    if system is None or system == "":
        return messages, trained
    text = text_field({"system": system}, "system", place)
    if messages[0]["role"] == "system":
        raise DataError(
            "the row has a `system` column and a system message", where=place, fix="leave one of the two out"
        )
    return [{"role": "system", "content": text}, *messages], tuple(index + 1 for index in trained)
