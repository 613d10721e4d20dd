"""Calibration samples: what is joined, cut, left over and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.errors import DataError, RecipeError
from finetune.quant.calibration import join_rows, load_calibration, notes_on
from finetune.quant.settings import CalibrationSettings, QuantizeSettings
from finetune.recipe import load_recipe
from tests.tiny import CORPUS, tiny_tokenizer


def rows_of(*lengths: int) -> list[np.ndarray]:
    """Rows whose tokens are numbered on from row to row."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end, dtype=np.int32) for length, end in zip(lengths, ends, strict=True)]


def test_rows_shorter_than_the_length_are_joined_and_none_is_dropped() -> None:
    samples = join_rows(rows_of(3, 5, 2, 4), num_samples=8, length=7)
    assert samples.input_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13]]
    assert samples.mask.all()
    assert samples.counts["calibration_rows"] == 4
    assert samples.counts["tokens_used"] == 14
    assert samples.counts["tokens_left_over"] == 0


def test_what_is_more_than_asked_for_is_counted() -> None:
    samples = join_rows(rows_of(10, 10), num_samples=2, length=6)
    assert samples.input_ids.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert samples.counts["tokens_left_over"] == 8
    assert samples.counts["samples"] == samples.counts["samples_asked_for"] == 2


def test_the_last_sample_is_padded_and_masked_where_tokens_run_out() -> None:
    samples = join_rows(rows_of(4, 3), num_samples=3, length=5)
    assert samples.input_ids.shape == (2, 5)
    assert samples.input_ids[samples.mask].tolist() == list(range(7))
    assert samples.mask[1].tolist() == [True, True, False, False, False]
    assert samples.counts["samples"] == 2
    assert samples.counts["samples_asked_for"] == 3


def test_one_short_sample_is_not_padded() -> None:
    samples = join_rows(rows_of(2, 1), num_samples=3, length=5)
    assert samples.input_ids.tolist() == [[0, 1, 2]]


def test_no_token_at_all_is_an_error() -> None:
    with pytest.raises(DataError):
        join_rows([], num_samples=3, length=5)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    tokenizer = tiny_tokenizer()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    tokenizer.save_pretrained(tmp_path)
    return tokenizer


def loaded(folder: Path, rows: list[dict[str, Any]], *, seed: int = 0) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = CalibrationSettings(data=[{"path": str(path)}], num_samples=100, max_seq_length=16)
    return load_calibration(folder, settings, seed=seed)


def test_documents_are_taken_whole_with_their_end_in_an_order_of_the_seed(tmp_path: Path, tokenizer: Any) -> None:
    first, again, other = (loaded(tmp_path, [{"text": text} for text in CORPUS], seed=seed) for seed in (1, 1, 2))
    tokens = first.input_ids[first.mask].tolist()
    documents = "".join(tokenizer.decode(tokens)).split(tokenizer.eos_token)
    assert sorted(documents) == sorted([*CORPUS, ""])
    assert first.input_ids.tolist() == again.input_ids.tolist()
    assert first.input_ids.tolist() != other.input_ids.tolist()
    assert sorted(tokens) == sorted(other.input_ids[other.mask].tolist())


def test_conversations_are_rendered_by_the_models_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Is it far?"}, {"role": "assistant", "content": "Yes, it is."}]
    samples = loaded(tmp_path, [{"messages": messages}])
    expected = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(samples.input_ids[samples.mask].tolist()) == expected


def test_sequences_behind_the_samples_are_held_out_and_without_any_the_last_samples_are_taken() -> None:
    samples = join_rows(rows_of(7, 9, 4), num_samples=2, length=5)
    assert samples.held_out
    assert samples.evaluation_ids.tolist() == [[10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]
    none_left = join_rows(rows_of(7, 5), num_samples=4, length=5)
    assert not none_left.held_out
    assert none_left.evaluation_ids.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [len(notes_on(found)) for found in (samples, none_left)] == [0, 2]


TRAINING = "data: [{path: a.jsonl, format: messages, limit: 9}], max_seq_length: 256"


@pytest.mark.parametrize(
    ("quantize", "expected"),
    [
        ("{scheme: w4a16}", ("a.jsonl", 128, 256)),
        ("{scheme: w4a16, calibration: {}}", ("a.jsonl", 128, 256)),
        ("{scheme: w4a16, calibration: {num_samples: 4, max_seq_length: 512}}", ("a.jsonl", 4, 512)),
        ("{scheme: w4a16, from: pretrain}", ("p.txt", 128, 512)),
        ("{scheme: w8a8, method: rtn}", ("a.jsonl", 128, 256)),
        ("{scheme: w8a16, method: rtn}", None),
        ("{scheme: w8a16, method: rtn, calibration: {}}", ("a.jsonl", 128, 256)),
        ("{scheme: w4a16, calibration: {data: [{path: c.jsonl}]}}", ("c.jsonl", 128, 512)),
    ],
)
def test_a_stage_calibrates_on_what_its_model_was_trained_on(
    quantize: str, expected: tuple[str, int, int] | None, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "name: it\nmodel: {path: somewhere}\nstages:\n"
        "  - pretrain: {data: [{path: p.txt}], max_seq_length: 2048}\n"
        f"  - sft: {{{TRAINING}}}\n  - evaluate: {{perplexity: x.txt}}\n  - quantize: {quantize}\n"
    )
    loaded = load_recipe(path)
    stage = loaded.stages[-1]
    assert isinstance(stage.settings, QuantizeSettings)
    calibration = stage.settings.calibration
    if expected is None:
        assert calibration is None
        return
    assert calibration is not None
    assert (calibration.data[0].path, calibration.num_samples, calibration.max_seq_length) == expected
    if expected[0] == "a.jsonl":
        assert (calibration.data[0].format, calibration.data[0].limit) == ("messages", 9)
    assert stage.implementation.data_files(stage.settings) == [expected[0]]
    (tmp_path / "resolved.yaml").write_text(loaded.to_yaml())
    assert load_recipe(tmp_path / "resolved.yaml").resolved() == loaded.resolved()


@pytest.mark.parametrize("calibration", ["", ", calibration: {num_samples: 4}"])
def test_without_a_training_before_it_a_stage_says_what_it_needs(calibration: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: it\nmodel: {{path: x}}\nstages:\n  - quantize: {{scheme: w4a16{calibration}}}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert "calibration.data" in str(caught.value)
    assert f"{path}:4" in str(caught.value)
