"""What the tokenizer's own chat template renders, and how it closes an assistant's turn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.errors import DataError

Messages = list[dict[str, Any]]

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_QUESTION, _REPLY = "the first probe", "the second probe"
_PROBE: Messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _REPLY}]
MASK_FIX = "put {% generation %} markers around the assistant's turn in the chat template, or set `train_on: all`"


@dataclass(frozen=True)
class TurnShape:
    """How a template closes an assistant's turn."""

    stop_id: int
    stop_text: str
    """What follows the reply, up to the end of the stop token."""
    closing: str
    """All that follows the reply in the turn; begins with ``stop_text``."""
    header: str
    """Fixed text that the template writes before the reply where it has no generation prompt to write it."""
    has_markers: bool


@dataclass(frozen=True)
class Encoded:
    """One tokenization of a rendering, with the characters of each token."""

    input_ids: np.ndarray
    """int32 (T,)"""
    starts: np.ndarray
    """int64 (T,), non-decreasing: the first character of each token (some tokenizers leave out its leading space)."""
    ends: np.ndarray
    """int64 (T,), non-decreasing: one past the last character of each token."""

    def tokens_of(self, start: int, end: int) -> slice:
        """The tokens that hold any character of [start, end)."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left"))
        return slice(first, max(first, last))


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> Iterator[Encoded]:
    """Tokenize rendered texts, which hold their special tokens already. Raises DataError where offsets are unknown."""
    if not tokenizer.is_fast:
        raise DataError(
            "the tokenizer gives no character offsets, which the loss mask needs",
            where=tokenizer.name_or_path or None,
            fix="use a model folder with a tokenizer.json",
        )
    batch = tokenizer(
        list(texts),
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    for ids, offsets in zip(batch["input_ids"], batch["offset_mapping"], strict=True):
        pairs = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        starts, ends = np.maximum.accumulate(pairs, axis=0).T
        yield Encoded(np.array(ids, dtype=np.int32), starts, ends)


def render(
    tokenizer: Any, conversations: Sequence[Messages], *, places: Sequence[str], add_generation_prompt: bool = False
) -> list[str]:
    """Each conversation's text by the tokenizer's chat template. Raises DataError with the place of one it refuses."""
    import jinja2

    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template, and the rows are conversations",
            where=tokenizer.name_or_path or None,
            fix="use a chat model's folder, or add a chat_template.jinja to this one",
        )
    if not conversations:
        return []
    try:
        return tokenizer.apply_chat_template(
            list(conversations), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as cause:
        if len(conversations) > 1:
            for messages, place in zip(conversations, places, strict=True):
                render(tokenizer, [messages], places=[place], add_generation_prompt=add_generation_prompt)
        raise DataError(
            f"the chat template refuses this conversation: {cause}",
            where=places[0],
            fix="correct the row, or use a template that takes it",
        ) from cause


def read_turn_shape(tokenizer: Any) -> TurnShape:
    """Find out how the tokenizer's chat template closes an assistant's turn, by rendering a short conversation.

    Raises DataError where there is no template, or it doesn't end the turn with a token that can stop generation,
    or the turn can't be told apart from what stands around it.
    """
    where = _template_place(tokenizer)
    (whole,) = render(tokenizer, [_PROBE], places=[where])
    reply = whole.rfind(_REPLY)
    if reply < 0:
        raise DataError("the chat template doesn't write the assistant's reply", where=where, fix=MASK_FIX)
    closing = whole[reply + len(_REPLY) :]
    (encoded,) = encode_texts(tokenizer, [whole])
    stop = _find_stop(tokenizer, encoded, whole, len(whole) - len(closing))
    if stop is None:
        raise DataError(
            f"the chat template doesn't end the assistant's turn with a stop token (it writes {closing!r})",
            where=where,
            fix=f"end the turn with {tokenizer.eos_token or 'an end-of-turn token'} in the chat template",
        )
    stop_id, stop_end = stop
    has_markers = _GENERATION_MARKER.search(tokenizer.get_chat_template()) is not None
    header = "" if has_markers else _header(tokenizer, whole[:reply], where)
    stop_text = closing[: stop_end - (len(whole) - len(closing))]
    return TurnShape(stop_id=stop_id, stop_text=stop_text, closing=closing, header=header, has_markers=has_markers)


def _template_place(tokenizer: Any) -> str:
    return f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"


def _find_stop(tokenizer: Any, encoded: Encoded, text: str, start: int) -> tuple[int, int] | None:
    """(id, end character) of the first special token from character ``start`` on; else of the first added token."""
    special = set(tokenizer.all_special_ids)
    added = tokenizer.added_tokens_decoder
    fallback = None
    for index in range(encoded.tokens_of(start, len(text)).start, len(encoded.input_ids)):
        token_id, end = int(encoded.input_ids[index]), int(encoded.ends[index])
        if token_id in special or (token_id in added and added[token_id].special):
            return token_id, end
        # Some tokenizers (Gemma's) add runs of newlines as tokens, which templates write as ordinary text.
        if fallback is None and token_id in added and added[token_id].content.strip():
            fallback = token_id, end
    return fallback


def _header(tokenizer: Any, before_reply: str, where: str) -> str:
    """What stands before a reply and isn't for the model to write.

    A generation prompt holds it all, so that the rest (a space after Mistral's [/INST]) is the model's to write. Where
    the template has none, the visible text between the question's rendering and the reply is the turn's header.
    """
    (prompt,) = render(tokenizer, [_PROBE[:1]], places=[where], add_generation_prompt=True)
    (bare,) = render(tokenizer, [_PROBE[:1]], places=[where])
    if not before_reply.startswith(prompt):
        raise DataError(
            "the chat template can't be masked: its generation prompt isn't how it begins an assistant's turn",
            where=where,
            fix=MASK_FIX,
        )
    rest = before_reply[len(prompt) :]
    return rest if prompt == bare and rest.strip() else ""


def stop_token_ids(tokenizer: Any) -> list[int]:
    """Ids at which generation must stop: the tokenizer's eos, then the template's end of turn where it is another.

    A tokenizer without a template, or whose template ends the turn by no token, has its eos alone.
    """
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if tokenizer.chat_template:
        where = _template_place(tokenizer)
        (whole,) = render(tokenizer, [_PROBE], places=[where])
        (encoded,) = encode_texts(tokenizer, [whole])
        reply = whole.rfind(_REPLY)
        stop = _find_stop(tokenizer, encoded, whole, reply + len(_REPLY)) if reply >= 0 else None
        if stop is not None and stop[0] not in ids:
            ids.append(stop[0])
    return ids
