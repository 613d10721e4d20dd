"""The plain text of a recipe's data, as a tokenizer is trained on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from finetune.data.formats import Document
from finetune.data.settings import DatasetSettings
from finetune.data.sources import read_examples
from finetune.errors import DataError


def raw_texts(sources: Sequence[DatasetSettings]) -> Iterator[str]:
    """All text of the rows in order: documents, and the content of every chat message."""
    for source in sources:
        for example, _ in read_examples(source):
            if isinstance(example, Document):
                yield example.text
            elif not isinstance(example, DataError):
                yield from (message["content"] for message in example.messages)
