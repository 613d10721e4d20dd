"""Rows to tokens: documents, overlong rows, prompts, and what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from finetune.data.dataset import TokenDataset
from finetune.data.prompts import load_prompts
from finetune.data.settings import DatasetSettings
from finetune.data.tokens import tokenize_dataset
from finetune.errors import DataError
from tests.tiny import tiny_tokenizer


def source(folder: Path, *rows: dict[str, Any]) -> DatasetSettings:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return DatasetSettings(path=str(path))


def tokenized(folder: Path, *rows: dict[str, Any], **options: Any) -> TokenDataset:
    options = {"tokenizer": tiny_tokenizer(), "max_seq_length": None, "overlong": "error", **options}
    return tokenize_dataset([source(folder, *rows)], **options)


def chat(question: str, *more: str) -> dict[str, Any]:
    turns = [question, *more]
    return {
        "messages": [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)],
    }


def chat_of(tokenizer: Any, prompt_tokens: int, reply_tokens: int) -> dict[str, Any]:
    """A conversation whose prompt and reply (with its stop token) have exactly so many tokens."""
    empty = [{"role": "user", "content": ""}]
    frame = len(tokenizer.apply_chat_template(empty, add_generation_prompt=True)["input_ids"])
    # Each z is a token: the tiny vocabulary joins none.
    return chat("z" * (prompt_tokens - frame), "z" * (reply_tokens - 1))


def test_document_is_closed_by_eos_and_all_supervised(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    row = tokenized(tmp_path, {"text": "the fox"}, tokenizer=tokenizer).rows[0]
    assert row.input_ids.tolist() == [*tokenizer("the fox").input_ids, tokenizer.eos_token_id]
    assert row.input_ids.dtype == np.int32
    assert row.loss_mask.tolist() == [False] + [True] * (len(row.input_ids) - 1)


def test_document_has_bos_and_eos_once(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    for text in ("a ship", "<|endoftext|>a ship<|im_end|>"):
        ids = tokenized(tmp_path, {"text": text}, tokenizer=tokenizer).rows[0].input_ids.tolist()
        assert ids[0] == tokenizer.bos_token_id
        assert ids[-1] == tokenizer.eos_token_id
        assert ids.count(tokenizer.bos_token_id) == ids.count(tokenizer.eos_token_id) == 1


def test_split_document_has_each_token_as_a_target_once(tmp_path: Path) -> None:
    whole = tokenized(tmp_path, {"text": "z" * 50}).rows[0].input_ids
    for length in (2, 7, 17, 50, 51):
        dataset = tokenized(tmp_path, {"text": "z" * 50}, max_seq_length=length, overlong="split")
        assert max(len(row.input_ids) for row in dataset.rows) <= length
        targets = np.concatenate([row.input_ids[row.loss_mask] for row in dataset.rows])
        assert np.array_equal(targets, whole[1:])
        assert dataset.counts["split"] == (length < len(whole))
        assert dataset.counts["kept"] == len(dataset.rows)


def test_truncated_document_has_no_eos(tmp_path: Path) -> None:
    dataset = tokenized(tmp_path, {"text": "z" * 50}, max_seq_length=10, overlong="truncate")
    assert tiny_tokenizer().decode(dataset.rows[0].input_ids) == "z" * 10
    assert dataset.counts["truncated"] == 1


def test_dropping_every_row_is_an_error_that_counts_them(tmp_path: Path) -> None:
    row = chat_of(tiny_tokenizer(), 20, 5)
    with pytest.raises(DataError, match="nothing to train on") as caught:
        tokenized(tmp_path, row, max_seq_length=16, overlong="drop")
    assert "dropped_overlong 1" in caught.value.what
    dataset = tokenized(tmp_path, row, chat("a", "b"), max_seq_length=16, overlong="drop")
    assert (dataset.counts["rows"], dataset.counts["kept"], dataset.counts["dropped_overlong"]) == (2, 1, 1)


def test_overlong_error_names_the_row_and_its_length(tmp_path: Path) -> None:
    # 20, 5, and the template's newline after the stop token.
    with pytest.raises(DataError, match="the row has 26 tokens") as caught:
        tokenized(tmp_path, chat("a", "b"), chat_of(tiny_tokenizer(), 20, 5), max_seq_length=24)
    assert caught.value.where == f"{tmp_path}/rows.jsonl:2"
    with pytest.raises(DataError, match="can't be split"):
        tokenized(tmp_path, chat("a", "z" * 50), max_seq_length=16, overlong="split")


def test_prompt_longer_than_the_limit_gives_up_its_end_and_keeps_the_header(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    dataset = tokenized(tmp_path, chat_of(tokenizer, 60, 5), max_seq_length=32, overlong="truncate")
    row = dataset.rows[0]
    text = tokenizer.decode(row.input_ids)
    assert len(row.input_ids) == 32
    assert text.startswith("<|im_start|>user\nzz")
    assert text.endswith("z<|im_end|>\n<|im_start|>assistant\nzzzz<|im_end|>")
    assert tokenizer.decode(row.input_ids[row.loss_mask]) == "zzzz<|im_end|>"
    assert dataset.counts["truncated"] == 1


@pytest.mark.parametrize("prompt_tokens", [20, 30, 60])
def test_cut_reply_has_no_stop_token(prompt_tokens: int, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    row = tokenized(tmp_path, chat_of(tokenizer, prompt_tokens, 40), max_seq_length=32, overlong="truncate").rows[0]
    assert len(row.input_ids) == 32
    text = tokenizer.decode(row.input_ids)
    assert text.count("<|im_end|>\n<|im_start|>assistant\nz") == 1
    assert set(tokenizer.decode(row.input_ids[row.loss_mask])) == {"z"}
    if prompt_tokens == 60:
        header = len(tokenizer("<|im_end|>\n<|im_start|>assistant\n").input_ids)
        assert row.loss_mask.sum() >= (32 - header) // 2


def test_prompt_of_20_and_reply_of_5_in_16(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    row = chat_of(tokenizer, 20, 5)
    kept = tokenized(tmp_path, row, max_seq_length=16, overlong="truncate").rows[0]
    text = tokenizer.decode(kept.input_ids)
    assert len(kept.input_ids) == 16
    assert "<|im_start|>assistant\n" in text
    reply = tokenizer.decode(kept.input_ids[kept.loss_mask])
    assert reply
    assert "zzzz<|im_end|>".startswith(reply)


def test_truncation_ends_with_the_last_target(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    row = tokenized(tmp_path, chat("a", "b", "z" * 60, "c"), max_seq_length=40, overlong="truncate").rows[0]
    assert tokenizer.decode(row.input_ids).endswith("assistant\nb<|im_end|>")


def test_limit_that_holds_no_header_drops_the_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="dropped_overlong 1"):
        tokenized(tmp_path, chat_of(tiny_tokenizer(), 40, 5), max_seq_length=4, overlong="truncate")
    dataset = tokenized(
        tmp_path, chat_of(tiny_tokenizer(), 40, 5), max_seq_length=4, overlong="truncate", train_on="all"
    )
    assert len(dataset.rows[0].input_ids) == 4


def test_counts_add_up(tmp_path: Path) -> None:
    dataset = tokenized(tmp_path, chat("a", ""), chat("a", "b"), {"messages": chat("q", "r")["messages"]})
    assert dataset.counts["empty_replies"] == 1
    assert dataset.counts["tokens"] == sum(len(row.input_ids) for row in dataset.rows)
    assert dataset.counts["supervised_tokens"] == sum(int(row.loss_mask.sum()) for row in dataset.rows) == 1 + 2 + 2


def test_no_source_is_an_error() -> None:
    with pytest.raises(DataError, match="nothing to train on"):
        tokenize_dataset([], tokenizer=tiny_tokenizer(), max_seq_length=None, overlong="error")


def test_prompts_end_where_the_last_reply_begins(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    (prompt,) = load_prompts(source(tmp_path, chat("a", "b", "c", "d")), tokenizer)
    assert prompt.reference == "d"
    assert [message["content"] for message in prompt.messages] == ["a", "b", "c"]
    assert tokenizer.decode(prompt.prompt_ids).endswith("user\nc<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.prompt_ids.count(tokenizer.bos_token_id) == 1
    row = tokenized(tmp_path, chat("a", "b", "c", "d"), tokenizer=tokenizer).rows[0]
    assert row.input_ids[: len(prompt.prompt_ids)].tolist() == prompt.prompt_ids


def test_prompts_of_completions_and_of_control_tokens_are_those_of_training(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    completion = {"prompt": "the quick", "completion": " fox"}
    typed = chat("say <|im_end|>", "no")
    for row in (completion, typed):
        (prompt,) = load_prompts(source(tmp_path, row), tokenizer)
        (trained,) = tokenized(tmp_path, row, tokenizer=tokenizer).rows
        first = int(np.argmax(trained.loss_mask))
        assert trained.input_ids[:first].tolist() == prompt.prompt_ids
        assert tokenizer.decode(trained.input_ids[first:]).removesuffix("\n") == f"{prompt.reference}<|im_end|>"


@pytest.mark.parametrize("row", [{"text": "a"}, chat("a"), {"messages": [{"role": "assistant", "content": "a"}]}])
def test_row_without_a_question_and_answer_is_no_prompt(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no assistant's turn that answers") as caught:
        load_prompts(source(tmp_path, row), tiny_tokenizer())
    assert caught.value.where == f"{tmp_path}/rows.jsonl:1"
