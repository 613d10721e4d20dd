"""Rows set aside for the held-out loss are never trained on."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.data.dataset import TokenDataset, TokenRow
from finetune.data.holdout import hold_out
from finetune.errors import DataError


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
