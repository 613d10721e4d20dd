"""Conversations to token rows with their targets, before any is cut or dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from finetune.data.control import ControlTokens, Hidden
from finetune.data.encoded import Encoded, encode_texts
from finetune.data.formats import Conversation
from finetune.data.options import ChatOptions, TrainOn
from finetune.data.probes import ShapeProbes
from finetune.data.replies import ReplyFinder, Rewritten
from finetune.data.template import ChatTemplate, Span, TurnShape, read_turn_shape
from finetune.errors import DataError


class HistoryError(DataError):
    """The chat template rewrites earlier turns, and the recipe doesn't say what to do about it."""


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """One row. Of a conversation that is split by turn there are several."""

    conversation: Conversation
    """With a stand-in for each special token that is written out in it; ``text`` likewise."""
    text: str
    encoded: Encoded
    loss_mask: np.ndarray
    """bool (T,); never True at position 0."""
    policy: str | None = None
    """The count under which its conversation falls, where the template rewrites it."""


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    num_controls: int
    """Special tokens that are written out in it."""
    rows: list[EncodedChat]
    """None where there is no turn to train, several where it is split."""


@dataclass(frozen=True, slots=True)
class _Work:
    index: int
    conversation: Conversation
    place: str
    num_controls: int
    hidden: Hidden
    policy: str | None = None


class ConversationEncoder:
    """Renders, tokenizes and masks conversations with one tokenizer's chat template."""

    def __init__(self, tokenizer: Any, train_on: TrainOn, options: ChatOptions) -> None:
        self.template = ChatTemplate(tokenizer, options.template_kwargs)
        self.controls = ControlTokens(tokenizer)
        self._tokenizer = tokenizer
        self._train_on = train_on
        self._options = options
        self._probes = ShapeProbes(self.template)
        self._shape: TurnShape | None = None
        self._replies: ReplyFinder | None = None

    def encode(self, conversations: Sequence[tuple[Conversation, str]]) -> list[EncodedConversation]:
        """The rows of each (conversation, place).

        Raises DataError with the place of a conversation that can't be rendered or masked, HistoryError with that of
        one that the template rewrites, where the recipe refuses such.
        """
        work = [
            self._hide(index, self.chosen(conversation), place)
            for index, (conversation, place) in enumerate(conversations)
        ]
        results = [EncodedConversation(one.num_controls, []) for one in work]
        found: list[tuple[_Work, str, list[Span] | None]] = []
        if self._train_on == "all":
            found += [(one, text, None) for one, text in zip(work, self._render(work), strict=True)]
            for one in work:
                self._probes.require(one.conversation, one.place)
        else:
            self._learn_shape()
            found += self._with_spans([one for one in work if one.conversation.trained])
        encodings = self._tokenize([one for one, _, _ in found], [text for _, text, _ in found])
        for (one, text, spans), encoded in zip(found, encodings, strict=True):
            length = len(encoded.input_ids)
            mask = all_but_first(length) if spans is None else self._mask(encoded, spans, one.place)
            results[one.index].rows.append(EncodedChat(one.conversation, text, encoded, mask, one.policy))
        return results

    def prompts(self, conversations: Sequence[tuple[Conversation, str]]) -> list[list[int]]:
        """The token ids of each (conversation, place) up to where the assistant's next turn begins.

        Raises DataError with the place of one that the template refuses, or of which it leaves something out.
        """
        work = [self._hide(index, *one) for index, one in enumerate(conversations)]
        for one in work:
            self._probes.require(one.conversation, one.place)
        encoded = self._tokenize(work, self._render(work, add_generation_prompt=True))
        return [one.input_ids.tolist() for one in encoded]

    def chosen(self, conversation: Conversation) -> Conversation:
        """The conversation with those of its trained turns that the recipe trains on."""
        if self._train_on in ("assistant", "all"):
            return conversation
        roles = [message["role"] for message in conversation.messages]
        last = max((turn for turn, role in enumerate(roles) if role == "assistant"), default=-1)
        first = last
        if self._train_on == "completion":
            first = max((turn for turn, role in enumerate(roles[: last + 1]) if role == "user"), default=0)
        return replace(conversation, trained=tuple(turn for turn in conversation.trained if first <= turn <= last))

    def _learn_shape(self) -> None:
        if self._shape is None:
            self._shape = read_turn_shape(self.template, require_stop=self._options.require_stop)
            self._replies = ReplyFinder(self.template, self._shape, self._probes)

    def _hide(self, index: int, conversation: Conversation, place: str) -> _Work:
        found = self.controls.count_in(conversation)
        if self._options.allow_control_tokens or not found:
            return _Work(index, conversation, place, found, {})
        conversation, hidden = self.controls.hide(conversation)
        return _Work(index, conversation, place, found, hidden)

    def _render(self, work: Sequence[_Work], *, add_generation_prompt: bool = False) -> list[str]:
        return self.template.render(
            [one.conversation.messages for one in work],
            places=[one.place for one in work],
            tools=[one.conversation.tools for one in work],
            add_generation_prompt=add_generation_prompt,
        )

    def _tokenize(self, work: Sequence[_Work], texts: Sequence[str]) -> list[Encoded]:
        encoded = encode_texts(self._tokenizer, texts)
        for row, one in enumerate(work):
            if one.hidden:
                encoded[row] = self.controls.encode(texts[row], one.hidden)
        return encoded

    def _with_spans(self, work: Sequence[_Work]) -> Iterator[tuple[_Work, str, list[Span]]]:
        assert self._replies is not None
        texts = self._render(work)
        found = self._replies.find([one.conversation for one in work], texts, [one.place for one in work])
        for one, text, spans in zip(work, texts, found, strict=True):
            if isinstance(spans, Rewritten):
                yield from self._with_spans(self._cut(one, spans))
            else:
                yield one, text, spans

    def _cut(self, one: _Work, rewritten: Rewritten) -> list[_Work]:
        """The conversation up to each of its trained turns that is learnt, where only that turn is."""
        if self._options.history == "refuse" or one.policy is not None:
            raise HistoryError(
                f"the chat template writes message {rewritten.turn + 1}, an assistant's turn, otherwise once later "
                f"messages follow: {rewritten.before!r} is not there any more",
                where=one.place,
                fix="say `history: split` (a row for each turn, as it was written then) or `history: last` (train the "
                "last turn alone)",
            )
        trained = one.conversation.trained
        split = self._options.history == "split"
        policy = "split_by_turn" if split else "cut_to_last_turn"
        return [
            replace(
                one,
                conversation=replace(one.conversation, messages=one.conversation.messages[: turn + 1], trained=(turn,)),
                policy=policy,
            )
            for turn in (trained if split else trained[-1:])
        ]

    def _mask(self, encoded: Encoded, spans: Sequence[Span], place: str) -> np.ndarray:
        assert self._shape is not None
        mask = np.zeros(len(encoded.input_ids), dtype=np.bool_)
        stop_ids = self._shape.stop_ids
        for start, end in spans:
            tokens = encoded.tokens_up_to(start, end, stop_ids) if stop_ids else encoded.tokens_of(start, end)
            if tokens is None:
                raise DataError(
                    f"a reply doesn't end in the stop token {self._shape.closings[0].stop_text.strip()!r} once "
                    "tokenized",
                    where=place,
                    fix="make it a special token of the tokenizer",
                )
            mask[self._own(encoded, tokens, start, end)] = True
        mask[:1] = False
        return mask

    def _own(self, encoded: Encoded, tokens: slice, start: int, end: int) -> slice:
        """``tokens`` without the header's or the next turn's token that also holds the white space of the reply, as one
        does that strips what stands beside it (Phi-3's strip behind)."""
        first, stop = tokens.start, tokens.stop
        strips_behind, strips_before = self._stripping_ids
        if first < stop and int(encoded.input_ids[first]) in strips_behind and encoded.starts[first] < start:
            first += 1
        last = int(encoded.input_ids[stop - 1])
        is_stop = self._shape is not None and last in self._shape.stop_ids
        if first < stop and last in strips_before and encoded.ends[stop - 1] > end and not is_stop:
            stop -= 1
        return slice(first, stop)

    @cached_property
    def _stripping_ids(self) -> tuple[frozenset[int], frozenset[int]]:
        added = self._tokenizer.added_tokens_decoder
        return (
            frozenset(token_id for token_id, token in added.items() if token.rstrip),
            frozenset(token_id for token_id, token in added.items() if token.lstrip),
        )


def all_but_first(length: int) -> np.ndarray:
    mask = np.ones(length, dtype=np.bool_)
    mask[:1] = False
    return mask
