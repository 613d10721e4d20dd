"""What of an example counts when rows are compared: all of it, its prompt, and the words people wrote in it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.data.formats import Completion, Conversation, Document, Example, Preference, TokenIds
from finetune.data_preview.words import ngrams, word_hashes

EXCERPT_LETTERS = 160


@dataclass(frozen=True)
class Content:
    whole: int
    """64 bits of a hash: equal where the rows are equal in every character (white space around them apart)."""
    prompt: int | None
    """The same of what comes before the first reply that is learnt; None where nothing does."""
    ngrams: np.ndarray
    """uint32 (G,), sorted: see ``words.ngrams``. System prompts and tools are left out: many rows share them."""
    excerpt: str


def content_of(example: Example) -> Content:
    if isinstance(example, Document):
        return _content(example.text.strip(), None, example.text)
    if isinstance(example, Completion):
        return _content([example.prompt, example.completion], example.prompt, f"{example.prompt}{example.completion}")
    if isinstance(example, TokenIds):
        ids = np.array(example.input_ids, dtype=np.uint64)
        excerpt = " ".join(map(str, example.input_ids[: EXCERPT_LETTERS // 4]))
        return Content(_hash([example.input_ids, example.labels]), None, ngrams(ids), excerpt)
    if isinstance(example, Preference):
        messages = [*example.prompt, *example.chosen, *example.rejected]
        return _content([messages, example.tools], example.prompt, _written(messages))
    assert isinstance(example, Conversation)
    asked = example.messages[: example.trained[0]] if example.trained else []
    return _content([example.messages, example.tools], asked or None, _written(example.messages))


def _content(whole: Any, prompt: Any, words: str) -> Content:
    excerpt = " ".join(words[: 4 * EXCERPT_LETTERS].split())[:EXCERPT_LETTERS]
    return Content(_hash(whole), _hash(prompt) if prompt else None, ngrams(word_hashes(words)), excerpt)


def _hash(value: Any) -> int:
    text = json.dumps(_stripped(value), ensure_ascii=False, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _stripped(value: Any) -> Any:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list | tuple):
        return [_stripped(item) for item in value]
    if isinstance(value, dict):
        return {key: _stripped(item) for key, item in value.items()}
    return value


def _written(messages: list[dict[str, Any]]) -> str:
    return "\n".join(message_text(message) for message in messages if message.get("role") != "system")


def message_text(message: dict[str, Any]) -> str:
    """The text of a message: its reasoning, its content (text, or parts of it), and the calls it makes."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    calls = message.get("tool_calls")
    parts = [message.get("reasoning_content"), content, json.dumps(calls, ensure_ascii=False) if calls else None]
    return "\n".join(part for part in parts if isinstance(part, str) and part)
