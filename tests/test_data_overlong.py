"""A conversation that is cut keeps the question that its reply answers, or is dropped."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.data.encoder import RowEncoder
from finetune.data.formats import Conversation
from tests.tiny import tiny_tokenizer


def cut(messages: list[tuple[str, str]], trained: int, max_seq_length: int) -> tuple[list[str], dict[str, int]]:
    tokenizer: Any = tiny_tokenizer()
    encoder = RowEncoder(tokenizer, max_seq_length, "truncate", "assistant")
    chat = Conversation([{"role": role, "content": content} for role, content in messages], (trained,))
    encoder.add([(chat, "rows.jsonl:1")], skip_invalid=False)
    return [tokenizer.decode(row.input_ids) for row in encoder.rows], encoder.finish()


LONG = "the quick brown fox jumps over the lazy dog " * 6


def test_the_question_gives_up_its_end() -> None:
    (text,), counts = cut([("user", "First of all: " + LONG), ("assistant", "It is Paris.")], 1, 40)
    assert text.startswith("<|im_start|>user\nFirst of all: the quick")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\nIt is Paris.<|im_end|>")
    assert counts["truncated"] == 1


@pytest.mark.parametrize("before", [[("system", LONG)], [("user", "Hello"), ("assistant", LONG)]])
def test_a_row_is_dropped_whose_question_would_be_gone(before: list[tuple[str, str]]) -> None:
    """Else the reply would answer the system prompt, or an earlier turn."""
    messages = [*before, ("user", "Where is it?"), ("assistant", "It is Paris.")]
    rows, counts = cut(messages, len(messages) - 1, 40)
    assert rows == []
    assert counts["dropped_overlong"] == 1
