"""Rows set aside for the held-out loss are never trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.data.dataset import TokenDataset, TokenRow
from finetune.data.holdout import hold_out
from finetune.data.settings import DatasetSettings
from finetune.data.tokens import prepare_dataset, tokenize_dataset
from finetune.errors import DataError
from tests.tiny import tiny_tokenizer


def dataset(num_rows: int) -> TokenDataset:
    rows = [TokenRow(np.array([index, 1], dtype=np.int32), np.array([False, True])) for index in range(num_rows)]
    return TokenDataset(rows, {"rows": num_rows})


def names(part: TokenDataset) -> list[int]:
    return [int(row.input_ids[0]) for row in part.rows]


def test_every_row_is_in_exactly_one_part_and_the_seed_decides() -> None:
    kept, held = hold_out(dataset(20), num_rows=5, seed=3)
    assert len(held.rows) == 5
    assert sorted(names(kept) + names(held)) == list(range(20))
    assert names(kept) == sorted(names(kept))
    assert kept.counts["held_out"] == 5
    assert names(hold_out(dataset(20), num_rows=5, seed=3)[1]) == names(held)
    assert names(hold_out(dataset(20), num_rows=5, seed=4)[1]) != names(held)


def test_holding_everything_out_is_refused() -> None:
    with pytest.raises(DataError, match="20"):
        hold_out(dataset(20), num_rows=20, seed=3)


@pytest.mark.parametrize("stored", [False, True])
def test_pieces_of_one_document_lie_in_one_part(stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("finetune.data.stored.BATCH_TOKENS", 40)  # batches end inside a document
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"{line} " * 30}) + "\n" for line in range(10)))
    options: dict[str, Any] = {"tokenizer": tiny_tokenizer(), "max_seq_length": 16, "overlong": "split"}
    source = [DatasetSettings(path=str(path))]
    whole = prepare_dataset(source, **options)[0] if stored else tokenize_dataset(source, **options)
    assert len(whole) >= 30
    for seed in range(3):
        kept, held = hold_out(whole, num_rows=7, seed=seed)
        assert 7 <= len(held) < 7 + len(whole) / 10 + 1
        assert len(kept) + len(held) == len(whole)
        assert kept.counts["held_out"] == len(held)
        assert not {row.place for row in kept} & {row.place for row in held}
    with pytest.raises(DataError, match="none would be left"):
        hold_out(whole, num_rows=len(whole) - 1, seed=0)
