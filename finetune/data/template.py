"""What the tokenizer's own chat template renders, and how it closes an assistant's turn."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from finetune.data.encoded import Encoded, encode_texts
from finetune.errors import DataError

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Span = tuple[int, int]

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_QUESTION, _REPLY = "the first probe", "the second probe"
_PROBE: Messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _REPLY}]
_ARGUMENT = "the third probe"
_CALL: dict[str, Any] = {"name": "probe", "arguments": {"text": _ARGUMENT}}
_CALL_PROBE: Messages = [
    {"role": "user", "content": _QUESTION},
    # Mistral's templates want an id of nine letters and digits.
    {"role": "assistant", "content": "", "tool_calls": [{"id": "probe0000", "type": "function", "function": _CALL}]},
]
_CALL_PROBE_TOOLS: Messages = [
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "A probe",
            "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "A text"}}},
        },
    }
]
MASK_FIX = "put {% generation %} markers around the assistant's turn in the chat template, or set `train_on: all`"


class ChatTemplate:
    """A tokenizer's chat template, with the arguments that a recipe gives it."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self._markers: dict[bool, bool] = {}

    @property
    def place(self) -> str:
        return f"the chat template of {self.tokenizer.name_or_path or 'the tokenizer'}"

    def has_markers(self, tools: Tools = None) -> bool:
        """Whether ``{% generation %}`` tells what the assistant writes."""
        # A tokenizer may have a template of its own for conversations with tools.
        with_tools = tools is not None
        if with_tools not in self._markers:
            written = self.tokenizer.get_chat_template(tools=tools)
            self._markers[with_tools] = _GENERATION_MARKER.search(written) is not None
        return self._markers[with_tools]

    def render(
        self,
        conversations: Sequence[Messages],
        *,
        places: Sequence[str],
        tools: Sequence[Tools] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[str]:
        """Each conversation's text. Raises DataError with the place of one that the template refuses."""
        self._require_template()
        conversations = [self._as_taken(messages) for messages in conversations]
        texts = [""] * len(conversations)
        for rows, shared in _by_tools(len(conversations), tools):
            rendered = self._render(
                [conversations[row] for row in rows], [places[row] for row in rows], shared, add_generation_prompt
            )
            for row, text in zip(rows, rendered, strict=True):
                texts[row] = text
        return texts

    def _render(
        self, conversations: list[Messages], places: list[str], tools: Tools, add_generation_prompt: bool
    ) -> list[str]:
        try:
            return self.tokenizer.apply_chat_template(
                conversations,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_kwargs,
            )
        except _template_errors() as cause:
            if len(conversations) > 1:
                for messages, place in zip(conversations, places, strict=True):
                    self._render([messages], [place], tools, add_generation_prompt)
            raise _refused(cause, places[0]) from cause

    def marked(self, messages: Messages, *, place: str, tools: Tools = None) -> list[Span]:
        """The characters of the rendering that the template's generation markers enclose, in order."""
        from transformers.utils.chat_template_utils import render_jinja_template

        # As apply_chat_template does: what is null isn't there.
        given = [
            {key: value for key, value in message.items() if value is not None} for message in self._as_taken(messages)
        ]
        try:
            # Its annotation says str; it returns ([text], [[(start, end), ...]]).
            rendered: Any = render_jinja_template(
                conversations=[given],
                tools=[*tools] if tools is not None else None,
                chat_template=self.tokenizer.get_chat_template(tools=tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.template_kwargs},
            )
        except _template_errors() as cause:
            raise _refused(cause, place) from cause
        return [(start, end) for start, end in rendered[1][0]]

    def _as_taken(self, messages: Messages) -> Messages:
        """The messages with the arguments of tool calls as JSON text, where the template takes them so."""
        if not any("tool_calls" in message for message in messages) or not self._takes_arguments_as_text:
            return messages
        return _arguments_as_text(messages)

    @cached_property
    def _takes_arguments_as_text(self) -> bool:
        """Some templates join arguments to other text as they are, as OpenAI's interface gives them (DeepSeek's do):
        an object is refused there, or written as Python writes it."""
        written = []
        for messages in (_CALL_PROBE, _arguments_as_text(_CALL_PROBE)):
            try:
                written += self._render([messages], [self.place], _CALL_PROBE_TOOLS, False)
            except DataError:
                written.append("")
        as_object, as_text = (_ARGUMENT in text and repr(_CALL["arguments"]) not in text for text in written)
        return as_text and not as_object

    def _require_template(self) -> None:
        if not self.tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template, and the rows are conversations",
                where=self.tokenizer.name_or_path or None,
                fix="use a chat model's folder, or add a chat_template.jinja to this one",
            )


def _arguments_as_text(messages: Messages) -> Messages:
    return [
        {**message, "tool_calls": [_call_as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _call_as_text(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _call_as_text(call["function"])}
    arguments = call.get("arguments")
    return (
        call
        if arguments is None or isinstance(arguments, str)
        else {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    )


def _by_tools(number: int, tools: Sequence[Tools] | None) -> Iterator[tuple[list[int], Tools]]:
    """(rows, their tools): one call of the template renders conversations that share their tools."""
    if tools is None:
        if number:
            yield list(range(number)), None
        return
    plain = [row for row in range(number) if tools[row] is None]
    if plain:
        yield plain, None
    for row in range(number):
        if tools[row] is not None:
            yield [row], tools[row]


def _template_errors() -> tuple[type[Exception], ...]:
    import jinja2

    return jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError


def _refused(cause: Exception, place: str) -> DataError:
    return DataError(
        f"the chat template refuses this conversation: {cause}",
        where=place,
        fix="correct the row, or use a template that takes it",
    )


@dataclass(frozen=True)
class Closing:
    """What a template writes after a reply."""

    stop_id: int | None
    """None where no token ends the turn."""
    stop_text: str
    """What follows the reply, up to the end of the stop token."""
    text: str
    """All that follows the reply in the turn; begins with ``stop_text``."""


@dataclass(frozen=True)
class TurnShape:
    """How a template begins and closes an assistant's turn."""

    closings: tuple[Closing, ...]
    """The first closes a reply; another a turn that calls tools (Llama 3's <|eom_id|>), where that differs."""
    header: str
    """Fixed text that the template writes before the reply where it has no generation prompt to write it."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Empty where no token ends a turn."""
        return frozenset(closing.stop_id for closing in self.closings if closing.stop_id is not None)


def read_turn_shape(template: ChatTemplate, *, require_stop: bool = True) -> TurnShape:
    """Find out how the chat template closes an assistant's turn, by rendering short conversations.

    Raises DataError where there is no template, or it doesn't end the turn with a token that can stop generation (but
    without ``require_stop``), or the turn can't be told apart from what stands around it.
    """
    tokenizer, where = template.tokenizer, template.place
    (whole,) = template.render([_PROBE], places=[where])
    reply = whole.rfind(_REPLY)
    if reply < 0:
        raise DataError("the chat template doesn't write the assistant's reply", where=where, fix=MASK_FIX)
    end = reply + len(_REPLY)
    closing = _closing(tokenizer, whole, end)
    if closing.stop_id is None and require_stop:
        raise DataError(
            f"the chat template doesn't end the assistant's turn with a stop token (it writes {closing.text!r})",
            where=where,
            fix=f"end the turn with {tokenizer.eos_token or 'an end-of-turn token'} in the chat template",
        )
    header = "" if template.has_markers() else _header(template, whole[:reply])
    return TurnShape((closing, *_closing_of_calls(template, closing)), header)


def _closing(tokenizer: Any, whole: str, end: int) -> Closing:
    (encoded,) = encode_texts(tokenizer, [whole])
    stop = _find_stop(tokenizer, encoded, end)
    return Closing(None, "", whole[end:]) if stop is None else Closing(stop[0], whole[end : stop[1]], whole[end:])


def _closing_of_calls(template: ChatTemplate, reply: Closing) -> tuple[Closing, ...]:
    """How a turn that calls tools is closed, where a template writes such turns and closes them in another way."""
    try:
        (whole,) = template.render([_CALL_PROBE], places=[template.place], tools=[_CALL_PROBE_TOOLS])
    except DataError:
        return ()
    if _ARGUMENT not in whole or whole.endswith(reply.text):
        return ()
    (encoded,) = encode_texts(template.tokenizer, [whole])
    # Special tokens may also close the call before the turn, so it is the last one that ends the turn.
    special = set(template.tokenizer.all_special_ids)
    added = template.tokenizer.added_tokens_decoder
    for index in reversed(range(encoded.first_token(whole.rfind(_ARGUMENT) + len(_ARGUMENT)), len(encoded.input_ids))):
        token_id = int(encoded.input_ids[index])
        if token_id in special or (token_id in added and added[token_id].special):
            start, end = int(encoded.starts[index]), int(encoded.ends[index])
            return (Closing(token_id, whole[start:end], whole[start:]),)
    return ()


def _find_stop(tokenizer: Any, encoded: Encoded, start: int) -> tuple[int, int] | None:
    """(id, end character) of the first special token from character ``start`` on; else of the first added token."""
    special = set(tokenizer.all_special_ids)
    added = tokenizer.added_tokens_decoder
    fallback = None
    for index in range(encoded.first_token(start), len(encoded.input_ids)):
        token_id, end = int(encoded.input_ids[index]), int(encoded.ends[index])
        if token_id in special or (token_id in added and added[token_id].special):
            return token_id, end
        # Some tokenizers (Gemma's) add runs of newlines as tokens, which templates write as ordinary text.
        if fallback is None and token_id in added and added[token_id].content.strip():
            fallback = token_id, end
    return fallback


def _header(template: ChatTemplate, before_reply: str) -> str:
    """What stands before a reply and isn't for the model to write.

    A generation prompt holds it all, so that the rest (a space after Mistral's [/INST]) is the model's to write. Where
    the template has none, the visible text between the question's rendering and the reply is the turn's header.
    """
    where = template.place
    (prompt,) = template.render([_PROBE[:1]], places=[where], add_generation_prompt=True)
    (bare,) = template.render([_PROBE[:1]], places=[where])
    if not before_reply.startswith(prompt):
        raise DataError(
            "the chat template can't be masked: its generation prompt isn't how it begins an assistant's turn",
            where=where,
            fix=MASK_FIX,
        )
    rest = before_reply[len(prompt) :]
    return rest if prompt == bare and rest.strip() else ""


def stop_token_ids(tokenizer: Any) -> list[int]:
    """Ids at which generation must stop: the tokenizer's eos, then the template's ends of turn where they are others.

    A tokenizer without a template, or whose template ends the turn by no token, has its eos alone.
    """
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if tokenizer.chat_template:
        template = ChatTemplate(tokenizer)
        (whole,) = template.render([_PROBE], places=[template.place])
        reply = whole.rfind(_REPLY)
        if reply >= 0:
            closing = _closing(tokenizer, whole, reply + len(_REPLY))
            for one in (closing, *_closing_of_calls(template, closing)):
                if one.stop_id is not None and one.stop_id not in ids:
                    ids.append(one.stop_id)
    return ids
