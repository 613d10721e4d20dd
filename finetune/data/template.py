"""What a chat template renders, and which characters of it the assistant wrote.

Two ways lead to the reply's characters. A template with ``{% generation %}`` markers says them itself. Any other is
asked twice more: the messages before turn i with the generation prompt give the turn's start, those up to turn i its
end, and both must be beginnings of the whole rendering. Either way the span ends with the stop token that closes the
turn, and leaves out what the template writes after it (ChatML's newline).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.data.formats import Conversation
from finetune.errors import DataError

Span = tuple[int, int]
Messages = list[dict[str, Any]]

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_QUESTION, _REPLY = "the first probe", "the second probe"
_PROBE: Messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _REPLY}]
_MASK_FIX = "put {% generation %} markers around the assistant's turn in the chat template, or set `train_on: all`"


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
    """int64 (T,), non-decreasing: the first character of each token."""
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
        ends = np.maximum.accumulate(pairs[:, 1])
        # Byte-level tokenizers may trim the leading space off a token's offsets: it begins where the last one ended.
        starts = np.minimum(pairs[:, 0], np.concatenate(([0], ends[:-1]))) if len(pairs) else pairs[:, 0]
        yield Encoded(np.array(ids, dtype=np.int32), np.maximum.accumulate(starts), ends)


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
        raise DataError("the chat template doesn't write the assistant's reply", where=where, fix=_MASK_FIX)
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
            fix=_MASK_FIX,
        )
    rest = before_reply[len(prompt) :]
    return rest if prompt == bare and rest.strip() else ""


def render_replies(
    tokenizer: Any, shape: TurnShape, conversations: Sequence[Conversation], *, places: Sequence[str]
) -> tuple[list[str], list[list[Span]]]:
    """Render conversations and find, in characters, each trained reply with its stop token: (texts, spans of each).

    Raises DataError with the place of the first conversation whose replies can't be found.
    """
    texts = render(tokenizer, [conversation.messages for conversation in conversations], places=places)
    for conversation, place in zip(conversations, places, strict=True):
        if not conversation.trained:
            raise DataError(
                "the conversation has no assistant's turn to learn",
                where=place,
                fix="remove the row, or set train_on: all",
            )
    if shape.has_markers:
        spans = _marked_spans(tokenizer, shape, conversations, texts, places)
    else:
        spans = _prefix_spans(tokenizer, shape, conversations, texts, places)
    return texts, spans


def _prefix_spans(
    tokenizer: Any, shape: TurnShape, conversations: Sequence[Conversation], texts: list[str], places: Sequence[str]
) -> list[list[Span]]:
    turns = [(row, turn) for row, conversation in enumerate(conversations) for turn in conversation.trained]
    for row, turn in turns:
        if turn == 0:
            what = "the conversation begins with an assistant's turn"
            raise DataError(what, where=places[row], fix="begin with a user's turn, or set train_on: all")
    prompts = render(
        tokenizer,
        [conversations[row].messages[:turn] for row, turn in turns],
        places=[places[row] for row, _ in turns],
        add_generation_prompt=True,
    )
    inner = [(row, turn) for row, turn in turns if turn + 1 < len(conversations[row].messages)]
    rendered = render(
        tokenizer,
        [conversations[row].messages[: turn + 1] for row, turn in inner],
        places=[places[row] for row, _ in inner],
    )
    turn_ends = dict(zip(inner, rendered, strict=True))
    spans: list[list[Span]] = [[] for _ in conversations]
    for (row, turn), prompt in zip(turns, prompts, strict=True):
        text = texts[row]
        upto = turn_ends.get((row, turn), text)
        if not text.startswith(upto) or not upto.startswith(prompt):
            raise DataError(
                f"the chat template can't be masked: it renders the first {turn + 1} messages differently alone and in "
                "the whole conversation",
                where=places[row],
                fix=_MASK_FIX,
            )
        start = len(prompt) + (len(shape.header) if upto.startswith(shape.header, len(prompt)) else 0)
        closed = len(upto) - len(shape.closing)
        if closed < start or not upto.endswith(shape.closing):
            raise _unclosed(shape, turn, places[row])
        spans[row].append((start, closed + len(shape.stop_text)))
    return spans


def _marked_spans(
    tokenizer: Any, shape: TurnShape, conversations: Sequence[Conversation], texts: list[str], places: Sequence[str]
) -> list[list[Span]]:
    marked = tokenizer.apply_chat_template(
        [conversation.messages for conversation in conversations],
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
    )
    all_spans = []
    for row, (mask, offsets) in enumerate(zip(marked["assistant_masks"], marked["offset_mapping"], strict=True)):
        edges = np.flatnonzero(np.diff(np.array([0, *mask, 0], dtype=np.int8)))
        runs = [(offsets[first][0], offsets[last - 1][1]) for first, last in edges.reshape(-1, 2).tolist()]
        messages, trained = conversations[row].messages, conversations[row].trained
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if len(turns) != len(runs):
            what = f"the template's generation markers enclose {len(runs)} of the {len(turns)} assistant's turns"
            raise DataError(what, where=places[row], fix="correct the markers of the chat template")
        spans = []
        for turn, (start, end) in zip(turns, runs, strict=True):
            if turn not in trained:
                continue
            # The markers may stop before the stop token, with it, or after what follows it.
            lowest = max(start, end - len(shape.closing))
            stop = texts[row].rfind(shape.stop_text, lowest, end + len(shape.stop_text))
            if stop < 0:
                raise _unclosed(shape, turn, places[row])
            spans.append((start, stop + len(shape.stop_text)))
        all_spans.append(spans)
    return all_spans


def _unclosed(shape: TurnShape, turn: int, place: str) -> DataError:
    return DataError(
        f"the chat template doesn't end message {turn + 1}, an assistant's turn, with {shape.stop_text!r}",
        where=place,
        fix="correct the chat template, or set `train_on: all`",
    )


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
