"""The plain text of a recipe's data, as a tokenizer is trained on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from finetune.data.formats import Completion, Conversation, Document, Preference
from finetune.data.settings import DatasetSettings
from finetune.data.sources import read_examples


def raw_texts(sources: Sequence[DatasetSettings]) -> Iterator[str]:
    """All text of the rows in order: documents, and the content of every chat message."""
    for source in sources:
        for example, _ in read_examples(source):
            if isinstance(example, Document):
                yield example.text
            elif isinstance(example, Completion):
                yield example.prompt + example.completion
            elif isinstance(example, Conversation):
                yield from _contents(example.messages)
            elif isinstance(example, Preference):
                yield from _contents([*example.prompt, *example.chosen, *example.rejected])


def _contents(messages: list[dict[str, Any]]) -> Iterator[str]:
    return (content for message in messages if isinstance(content := message.get("content"), str))
