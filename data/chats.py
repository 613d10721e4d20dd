"""Chats with an assistant that turns plain words into exact forms."""

from __future__ import annotations

import random
from collections.abc import Iterator

from forms import KINDS, Form, below, draw, pick

Message = dict[str, str]

QUESTIONS = (
    "Write {words} in exact form.",
    "How does the log write {words}?",
    "Put {words} into the ledger, please.",
    "{words}",
    "The exact form of {words}?",
    "Somebody called out: {words}. What do I write down?",
    "Please enter {words}.",
    "Convert to exact form: {words}",
)
SYSTEM = (
    "You keep the books of the harbour. Answer with the form alone.",
    "You turn plain words into exact forms.",
    "You are the clerk of the light station. Be brief.",
)


def exchange(rng: random.Random, kind: str, *, reserved: bool) -> tuple[Form, list[Message]]:
    """One question and its answer."""
    form = draw(rng, kind, reserved=reserved)
    question = pick(rng, QUESTIONS).replace("{words}", form.said)
    question = question[0].upper() + question[1:]
    return form, [{"role": "user", "content": question}, {"role": "assistant", "content": form.exact}]


def chats(rng: random.Random, *, num_chats: int, reserved: bool) -> Iterator[tuple[list[Form], list[Message]]]:
    """Chats of one to three questions, the kinds in turn; a quarter of them open with a system message."""
    kinds = tuple(KINDS)
    for index in range(num_chats):
        forms: list[Form] = []
        messages: list[Message] = []
        if rng.random() < 0.25:
            messages.append({"role": "system", "content": pick(rng, SYSTEM)})
        num_questions = pick(rng, (1, 1, 1, 2, 2, 3))
        for turn in range(num_questions):
            # The last question decides the kind that the chat counts for: one kind after the other, evenly.
            kind = kinds[index % len(kinds)] if turn == num_questions - 1 else kinds[below(rng, len(kinds))]
            form, pair = exchange(rng, kind, reserved=reserved)
            forms.append(form)
            messages.extend(pair)
        yield forms, messages
