"""Prompts with a reference answer, for exact-match evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune.data.formats import Conversation
from finetune.data.settings import DatasetSettings
from finetune.data.sources import read_examples
from finetune.data.template import render
from finetune.errors import DataError


@dataclass(frozen=True)
class Prompt:
    messages: list[dict[str, Any]]
    """The conversation before its last assistant's turn."""
    prompt_ids: list[int]
    """Those messages rendered with the generation prompt: what generation starts from."""
    reference: str
    """The last assistant's turn."""


def load_prompts(source: DatasetSettings, tokenizer: Any) -> list[Prompt]:
    """Cut each conversation before its last assistant's turn. Raises DataError for a row without one, or a document."""
    cut: list[tuple[list[dict[str, Any]], str]] = []
    places = []
    for example, place in read_examples(source):
        if isinstance(example, DataError):
            continue
        turns = (
            [index for index, message in enumerate(example.messages) if message["role"] == "assistant"]
            if isinstance(example, Conversation)
            else []
        )
        if not isinstance(example, Conversation) or not turns or turns[-1] == 0:
            raise DataError(
                "the row has no assistant's turn that answers something",
                where=place,
                fix="evaluate on conversations (messages or alpaca rows) that end in the assistant's answer",
            )
        cut.append((example.messages[: turns[-1]], example.messages[turns[-1]]["content"]))
        places.append(place)
    if not cut:
        raise DataError("no row is left to evaluate", where=source.shown, fix="correct the rows")
    texts = render(tokenizer, [messages for messages, _ in cut], places=places, add_generation_prompt=True)
    batch = tokenizer(texts, add_special_tokens=False, verbose=False)
    return [
        Prompt(messages, list(ids), reference)
        for (messages, reference), ids in zip(cut, batch["input_ids"], strict=True)
    ]
