"""Which characters of a rendered conversation the assistant wrote.

Two ways lead to a reply. A template with ``{% generation %}`` markers says it itself. Any other is asked twice more:
the messages before turn i with the generation prompt give the turn's start, those up to turn i its end, and the one
must be a beginning of the other. Either way the span ends with the stop token that closes the turn, and leaves out
what the template writes after it (ChatML's newline).

The messages up to turn i must also be a beginning of the whole rendering. Where they aren't, the template rewrites what
was said before: Qwen3's and DeepSeek's take the reasoning out of earlier turns. The model would learn a turn that it
never writes, so such a conversation is given back as ``Rewritten``.

Asking costs two renderings a turn, so it is done once for each sequence of roles, on placeholders. What the template
writes around those is the sequence's outline; a conversation whose text is that outline filled with its own contents
has its replies where the outline has them. Any other conversation is asked about itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.data.formats import Conversation
from finetune.data.probes import ShapeProbes
from finetune.data.template import MASK_FIX, ChatTemplate, Span, TurnShape
from finetune.data.written import Rendering, require_message, require_tools
from finetune.errors import DataError


@dataclass(frozen=True)
class Rewritten:
    """A conversation that the template renders otherwise as a whole than up to one of its trained turns."""

    turn: int
    before: str
    """What the rendering up to the turn holds where the whole rendering goes on otherwise."""


@dataclass(frozen=True)
class Outline:
    """What a template writes around the contents of one sequence of roles."""

    opening: str
    after: tuple[str, ...]
    """The text between each message's content and the next one's (the last: and the end)."""
    margins: dict[int, tuple[int, int]]
    """For each trained turn: characters of its span before its content, and after it."""


class ReplyFinder:
    """Finds the replies of conversations rendered by one chat template."""

    def __init__(self, template: ChatTemplate, shape: TurnShape, probes: ShapeProbes) -> None:
        self._template = template
        self._shape = shape
        self._probes = probes
        self._outlines: dict[tuple[tuple[str, ...], tuple[int, ...]], Outline | None] = {}

    def find(
        self, conversations: Sequence[Conversation], texts: Sequence[str], places: Sequence[str]
    ) -> list[list[Span] | Rewritten]:
        """The characters of each trained reply with its stop token, conversation by conversation. Each has one.

        Raises DataError with the place of the first conversation whose replies can't be found.
        """
        found: list[list[Span] | Rewritten | None] = []
        odd = []
        for row, (conversation, text) in enumerate(zip(conversations, texts, strict=True)):
            assert conversation.trained
            spans = self._by_outline(conversation, text)
            found.append(spans)
            if spans is None:
                odd.append(row)
        asked = self._ask(
            [conversations[row] for row in odd], [texts[row] for row in odd], [places[row] for row in odd]
        )
        for row, answer in zip(odd, asked, strict=True):
            found[row] = answer
        return [answer for answer in found if answer is not None]

    def _by_outline(self, conversation: Conversation, text: str) -> list[Span] | None:
        messages = conversation.messages
        if conversation.tools is not None or any(len(message) != 2 for message in messages):
            return None
        key = tuple([message["role"] for message in messages]), conversation.trained
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
            (text,) = self._template.render([messages], places=["an outline"])
            (spans,) = self._ask([Conversation(messages, trained)], [text], ["an outline"])
        except DataError:
            return None
        if isinstance(spans, Rewritten):
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

    def _ask(
        self, conversations: Sequence[Conversation], texts: Sequence[str], places: Sequence[str]
    ) -> list[list[Span] | Rewritten]:
        turns = [(row, turn) for row, conversation in enumerate(conversations) for turn in conversation.trained]
        inner = [(row, turn) for row, turn in turns if turn + 1 < len(conversations[row].messages)]
        rendered = self._render_up_to(conversations, [(row, turn + 1) for row, turn in inner], places)
        up_to = dict(zip(inner, rendered, strict=True))
        marked = [self._template.has_markers(conversation.tools) for conversation in conversations]
        prompted = [(row, turn) for row, turn in turns if not marked[row]]
        for row, turn in prompted:
            if turn == 0:
                what = "the conversation begins with an assistant's turn"
                raise DataError(what, where=places[row], fix="begin with a user's turn, or set train_on: all")
        prompts = dict(zip(prompted, self._render_up_to(conversations, prompted, places, prompt=True), strict=True))
        answers: list[list[Span] | Rewritten] = []
        for row, (conversation, text, place) in enumerate(zip(conversations, texts, places, strict=True)):
            alone = [up_to.get((row, turn), text) for turn in conversation.trained]
            if marked[row]:
                answers.append(self._by_markers(conversation, text, alone, place))
            else:
                row_prompts = [prompts[row, turn] for turn in conversation.trained]
                answers.append(self._by_prompts(conversation, text, alone, row_prompts, place))
            if not isinstance(answers[-1], Rewritten):
                self._require_context(conversation, text, place)
        return answers

    def _require_context(self, conversation: Conversation, text: str, place: str) -> None:
        self._probes.require(conversation, place)
        # Where the probe is refused, or a template looks at the words, what can be said of the text itself.
        rendering = Rendering(text)
        require_tools(conversation, rendering, place=place)
        for number, message in enumerate(conversation.messages, start=1):
            # What the assistant said before may be shortened: so it will be when the model is asked.
            if message["role"] == "assistant" or rendering.missing(message) is None:
                continue
            # A template may drop a tool's result later on, but not leave it out from the start.
            (upto,) = self._render_up_to([conversation], [(0, number)], [place], prompt=True)
            require_message(message, Rendering(upto), number=number, place=place)

    def _render_up_to(
        self,
        conversations: Sequence[Conversation],
        cuts: Sequence[tuple[int, int]],
        places: Sequence[str],
        *,
        prompt: bool = False,
    ) -> list[str]:
        """The rendering of each (row, number of messages)."""
        return self._template.render(
            [conversations[row].messages[:number] for row, number in cuts],
            places=[places[row] for row, _ in cuts],
            tools=[conversations[row].tools for row, _ in cuts],
            add_generation_prompt=prompt,
        )

    def _by_prompts(
        self, conversation: Conversation, text: str, alone: Sequence[str], prompts: Sequence[str], place: str
    ) -> list[Span] | Rewritten:
        """``alone``: for each trained turn, the rendering that ends with it."""
        shape = self._shape
        spans = []
        for turn, upto, prompt in zip(conversation.trained, alone, prompts, strict=True):
            if not upto.startswith(prompt):
                raise DataError(
                    f"the chat template can't be masked: its generation prompt isn't how it begins message {turn + 1}",
                    where=place,
                    fix=MASK_FIX,
                )
            start = len(prompt) + (len(shape.header) if upto.startswith(shape.header, len(prompt)) else 0)
            end = self._end(upto, start, turn, place)
            require_message(conversation.messages[turn], Rendering(upto[start:end]), number=turn + 1, place=place)
            if not text.startswith(upto[:end]):
                return _rewritten(turn, upto[:end], text)
            spans.append((start, end))
        return spans

    def _by_markers(
        self, conversation: Conversation, text: str, alone: Sequence[str], place: str
    ) -> list[Span] | Rewritten:
        messages = conversation.messages
        for turn, upto in zip(conversation.trained, alone, strict=True):
            require_message(messages[turn], Rendering(upto), number=turn + 1, place=place)
            end = self._end(upto, 0, turn, place)
            if not text.startswith(upto[:end]):
                return _rewritten(turn, upto[:end], text)
        runs = self._template.marked(messages, place=place, tools=conversation.tools)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if len(turns) != len(runs):
            what = f"the template's generation markers enclose {len(runs)} of the {len(turns)} assistant's turns"
            raise DataError(what, where=place, fix="correct the markers of the chat template")
        spans = []
        for turn, (start, end) in zip(turns, runs, strict=True):
            if turn not in conversation.trained:
                continue
            spans.append((start, self._marked_end(text, start, end, turn, place)))
        return spans

    def _end(self, upto: str, start: int, turn: int, place: str) -> int:
        """Where the stop token of the turn ends, with which the rendering ends.

        What follows it isn't learnt and may differ: Phi-3 ends a conversation, not a turn, with its eos.
        """
        for closing in self._shape.closings:
            closed = len(upto) - len(closing.text)
            if closed >= start and upto.endswith(closing.text):
                return closed + len(closing.stop_text)
        raise self._unclosed(turn, place)

    def _marked_end(self, text: str, start: int, end: int, turn: int, place: str) -> int:
        """The same for the turn of which the markers enclose [start, end): they may stop before the stop token, with
        it, or after what follows it."""
        for closing in self._shape.closings:
            if closing.stop_id is None:
                return end
            lowest = max(start, end - len(closing.text))
            stop = text.rfind(closing.stop_text, lowest, end + len(closing.stop_text))
            if stop >= 0:
                return stop + len(closing.stop_text)
        raise self._unclosed(turn, place)

    def _unclosed(self, turn: int, place: str) -> DataError:
        stops = " or ".join(repr(closing.stop_text or closing.text) for closing in self._shape.closings)
        return DataError(
            f"the chat template doesn't end message {turn + 1}, an assistant's turn, with {stops}",
            where=place,
            fix="correct the chat template, or set `train_on: all`",
        )


def _rewritten(turn: int, upto: str, text: str) -> Rewritten:
    at = next(
        (index for index, (a, b) in enumerate(zip(upto, text, strict=False)) if a != b), min(len(upto), len(text))
    )
    return Rewritten(turn, upto[at : at + 60])
