"""Files as people of this field publish them: each is recognised, and no row is lost uncounted."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from finetune.data.formats import Conversation, Document, Preference
from finetune.data.settings import DatasetSettings
from finetune.data.sources import RowParser, read_examples

DATA = os.environ.get("FINETUNE_TEST_DATA")

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not DATA, reason="FINETUNE_TEST_DATA names no folder"),
]

FILES = {
    "alpaca_en.json": ("alpaca", Conversation),
    "toolcall_sharegpt.json": ("sharegpt", Conversation),
    "preference_sharegpt.json": ("preference", Preference),
    "gsm8k_train.jsonl": ("question_answer", Conversation),
    "c4_calibration.jsonl": ("text", Document),
}


def rows_of(name: str) -> list[dict[str, Any]]:
    text = Path(str(DATA), name).read_text(encoding="utf-8")
    # Not str.splitlines: JSON strings may hold U+2028.
    found: list[dict[str, Any]] = (
        [json.loads(line) for line in text.split("\n") if line] if name.endswith(".jsonl") else json.loads(text)
    )
    return found


def read(name: str, **options: Any) -> list[Any]:
    return [example for example, _ in read_examples(DatasetSettings(path=f"{DATA}/{name}", **options))]


@pytest.mark.parametrize("name", FILES)
def test_every_row_is_read_under_its_own_line(name: str) -> None:
    form, kind = FILES[name]
    source = DatasetSettings(path=f"{DATA}/{name}")
    parser = RowParser(source)
    found = list(read_examples(source, parser))
    assert parser.format == form
    assert Counter(type(example) for example, _ in found) == {kind: len(rows_of(name))}
    lines = Path(source.shown).read_text(encoding="utf-8").split("\n")
    numbers = [int(place.rpartition(":")[2]) for _, place in found]
    assert numbers == sorted(set(numbers))
    assert all(lines[number - 1].lstrip().startswith("{") for number in numbers)


def test_contents_are_those_of_the_rows() -> None:
    for row, example in zip(rows_of("gsm8k_train.jsonl"), read("gsm8k_train.jsonl"), strict=True):
        assert [message["content"] for message in example.messages] == [row["question"], row["answer"]]
    columns = {"question": "user", "answer": "assistant"}
    assert read("gsm8k_train.jsonl", columns=columns) == read("gsm8k_train.jsonl")
    for row, example in zip(rows_of("alpaca_en.json"), read("alpaca_en.json"), strict=True):
        question, answer = example.messages
        assert (question["content"], answer["content"]) == (
            "\n\n".join(filter(None, (row["instruction"], row["input"]))),
            row["output"],
        )
    texts = [example.text for example in read("c4_calibration.jsonl")]
    assert texts == [row["text"] for row in rows_of("c4_calibration.jsonl")]


def test_tool_calls_are_objects() -> None:
    calls = 0
    for row, example in zip(rows_of("toolcall_sharegpt.json"), read("toolcall_sharegpt.json"), strict=True):
        assert [tool["function"] for tool in example.tools or []] == json.loads(row["tools"] or "[]")
        for turn, message in zip(row["conversations"], example.messages, strict=True):
            if turn["from"] == "function_call":
                (called,) = message["tool_calls"]
                assert called["function"] == json.loads(turn["value"])
                calls += 1
            else:
                assert message["content"] == turn["value"]
        learnt = [i for i, turn in enumerate(row["conversations"]) if turn["from"] in ("gpt", "function_call")]
        assert list(example.trained) == learnt
    assert calls == 108


def test_the_chosen_answers_can_be_learnt() -> None:
    rows = rows_of("preference_sharegpt.json")
    chosen = read("preference_sharegpt.json", use="chosen")
    for row, example, learnt in zip(rows, read("preference_sharegpt.json"), chosen, strict=True):
        assert [message["content"] for message in example.prompt] == [turn["value"] for turn in row["conversations"]]
        assert example.chosen == [{"role": "assistant", "content": row["chosen"]["value"]}]
        assert example.rejected == [{"role": "assistant", "content": row["rejected"]["value"]}]
        assert learnt.messages == [*example.prompt, *example.chosen]
        assert learnt.trained == (len(example.prompt),)
