"""The plain text of a recipe's data, as a tokenizer is trained on it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from finetune.data.formats import Completion, Conversation, Document, Preference, TokenIds
from finetune.data.settings import DatasetSettings
from finetune.data.sources import read_examples
from finetune.errors import DataError


def raw_texts(sources: Sequence[DatasetSettings]) -> Iterator[str]:
    """All text of the rows in order: documents, and of chats the contents, reasoning, tool calls and tools.

    Raises DataError for a row of token ids.
    """
    for source in sources:
        for example, place in read_examples(source):
            if isinstance(example, Document):
                yield example.text
            elif isinstance(example, Completion):
                yield example.prompt + example.completion
            elif isinstance(example, Conversation):
                yield from _chat_texts(example.messages, example.tools)
            elif isinstance(example, Preference):
                yield from _chat_texts([*example.prompt, *example.chosen, *example.rejected], example.tools)
            elif isinstance(example, TokenIds):
                raise DataError("the row is token ids and has no text", where=place, fix="give the text they stand for")


def _chat_texts(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Iterator[str]:
    if tools:
        yield json.dumps(tools, ensure_ascii=False)
    for message in messages:
        if "reasoning_content" in message:
            yield message["reasoning_content"]
        yield message["content"]
        if "tool_calls" in message:
            yield json.dumps(message["tool_calls"], ensure_ascii=False)
