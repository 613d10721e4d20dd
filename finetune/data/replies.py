"""Which characters of a rendered conversation the assistant wrote.

Two ways lead to a reply. A template with ``{% generation %}`` markers says it itself. Any other is asked twice more:
the messages before turn i with the generation prompt give the turn's start, those up to turn i its end, and both must
be beginnings of the whole rendering. Either way the span ends with the stop token that closes the turn, and leaves out
what the template writes after it (ChatML's newline).

Asking costs two renderings a turn, so it is done once for each sequence of roles, on placeholders. What the template
writes around those is the sequence's outline; a conversation whose text is that outline filled with its own contents
has its replies where the outline has them. Any other conversation is asked about itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.data.formats import Conversation
from finetune.data.template import MASK_FIX, TurnShape, render
from finetune.errors import DataError

Span = tuple[int, int]


@dataclass(frozen=True)
class Outline:
    """What a template writes around the contents of one sequence of roles."""

    opening: str
    after: tuple[str, ...]
    """The text between each message's content and the next one's (the last: and the end)."""
    margins: dict[int, tuple[int, int]]
    """For each trained turn: characters of its span before its content, and after it."""


class ReplyFinder:
    """Finds the replies of conversations rendered by one tokenizer's template."""

    def __init__(self, tokenizer: Any, shape: TurnShape) -> None:
        self._tokenizer = tokenizer
        self._shape = shape
        self._outlines: dict[tuple[tuple[str, ...], tuple[int, ...]], Outline | None] = {}

    def find(
        self, conversations: Sequence[Conversation], texts: Sequence[str], places: Sequence[str]
    ) -> list[list[Span]]:
        """The characters of each trained reply with its stop token, conversation by conversation.

        Raises DataError with the place of the first conversation whose replies can't be found.
        """
        spans = [self._by_outline(chat, text) for chat, text in zip(conversations, texts, strict=True)]
        odd = [row for row, found in enumerate(spans) if found is None]
        asked = self._ask(
            [conversations[row] for row in odd], [texts[row] for row in odd], [places[row] for row in odd]
        )
        for row, found in zip(odd, asked, strict=True):
            spans[row] = found
        return [found for found in spans if found is not None]

    def _ask(
        self, conversations: Sequence[Conversation], texts: Sequence[str], places: Sequence[str]
    ) -> list[list[Span]]:
        for conversation, place in zip(conversations, places, strict=True):
            if not conversation.trained:
                what = "the conversation has no assistant's turn to learn"
                raise DataError(what, where=place, fix="remove the row, or set `train_on: all`")
        if not conversations:
            return []
        ask = _marked_spans if self._shape.has_markers else _prefix_spans
        return ask(self._tokenizer, self._shape, conversations, texts, places)

    def _by_outline(self, conversation: Conversation, text: str) -> list[Span] | None:
        messages = conversation.messages
        if not conversation.trained or any(len(message) != 2 for message in messages):
            return None
        key = tuple(message["role"] for message in messages), conversation.trained
        if key not in self._outlines:
            self._outlines[key] = self._outline(*key)
        outline = self._outlines[key]
        if outline is None or not text.startswith(outline.opening):
            return None
        spans, position = [], len(outline.opening)
        for turn, (message, after) in enumerate(zip(messages, outline.after, strict=True)):
            content = message["content"]
            if not text.startswith(content + after, position):
                content = content.strip()
                if not text.startswith(content + after, position):
                    return None
            if turn in outline.margins:
                before, behind = outline.margins[turn]
                spans.append((position - before, position + len(content) + behind))
            position += len(content) + len(after)
        return spans if position == len(text) else None

    def _outline(self, roles: tuple[str, ...], trained: tuple[int, ...]) -> Outline | None:
        """None where the template refuses the roles, can't be masked for them, or reorders or repeats contents."""
        contents = [f"placeholder {index} stands here" for index in range(len(roles))]
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            (text,) = render(self._tokenizer, [messages], places=["an outline"])
            (spans,) = self._ask([Conversation(messages, trained)], [text], ["an outline"])
        except DataError:
            return None
        starts = [text.find(content) for content in contents]
        ends = [start + len(content) for start, content in zip(starts, contents, strict=True)]
        in_order = all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        if min(starts) < 0 or not in_order or any(text.count(content) != 1 for content in contents):
            return None
        after = tuple(text[end:start] for end, start in zip(ends, [*starts[1:], len(text)], strict=True))
        margins = {
            turn: (starts[turn] - start, end - ends[turn]) for turn, (start, end) in zip(trained, spans, strict=True)
        }
        if any(before < 0 or behind < 0 for before, behind in margins.values()):
            return None
        return Outline(opening=text[: starts[0]], after=after, margins=margins)


def _prefix_spans(
    tokenizer: Any, shape: TurnShape, conversations: Sequence[Conversation], texts: Sequence[str], places: Sequence[str]
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
        text, upto = texts[row], turn_ends.get((row, turn), texts[row])
        start = len(prompt) + (len(shape.header) if upto.startswith(shape.header, len(prompt)) else 0)
        closed = len(upto) - len(shape.closing)
        end = closed + len(shape.stop_text)
        if closed < start or not upto.endswith(shape.closing):
            raise _unclosed(shape, turn, places[row])
        # What follows the stop token isn't learnt and may differ: Phi-3 ends a conversation, not a turn, with its eos.
        if not upto.startswith(prompt) or not text.startswith(upto[:end]):
            raise DataError(
                f"the chat template can't be masked: it renders the first {turn + 1} messages differently alone and in "
                "the whole conversation",
                where=places[row],
                fix=MASK_FIX,
            )
        spans[row].append((start, end))
    return spans


def _marked_spans(
    tokenizer: Any, shape: TurnShape, conversations: Sequence[Conversation], texts: Sequence[str], places: Sequence[str]
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
