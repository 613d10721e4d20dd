"""Batches: packing, targets by position, and steps that depend on the seed and the global batch alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.dataset import TokenDataset, TokenRow
from finetune.data.loader import Batch, StepLoader
from finetune.data.packing import pack_rows

PAD = 0


def dataset_of(*lengths: int) -> TokenDataset:
    """Rows whose tokens say which row they are of: 100 * (row + 1) + position."""
    rows = []
    for row, length in enumerate(lengths):
        mask = np.ones(length, dtype=np.bool_)
        mask[0] = False
        rows.append(TokenRow(np.arange(length, dtype=np.int32) + 100 * (row + 1), mask))
    return TokenDataset(rows, {})


def loader(dataset: TokenDataset, **options: Any) -> StepLoader:
    options = {
        "packing": False,
        "max_seq_length": 16,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "world_size": 1,
        "rank": 0,
        "seed": 3,
        "epochs": 1.0,
        "max_steps": None,
        "pad_token_id": PAD,
        "length_multiple": 1,
        **options,
    }
    return StepLoader(dataset, **options)


def rows_in(batches: list[Batch]) -> list[int]:
    """Row numbers of all documents in the batches, sorted."""
    found = []
    for batch in batches:
        first = (batch.position_ids == 0) & (batch.document_ids >= 0)
        found += (batch.input_ids[first] // 100 - 1).tolist()
    return sorted(found)


def test_packed_documents_keep_apart() -> None:
    (batch,) = loader(dataset_of(3, 5), packing=True, max_seq_length=10).batches(0)
    # The longer row comes first in its pack.
    assert batch.input_ids.tolist() == [[200, 201, 202, 203, 204, 100, 101, 102]]
    assert batch.targets.tolist() == [[201, 202, 203, 204, -100, 101, 102, -100]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert (batch.num_tokens, batch.num_supervised_tokens) == (8, 6)
    kinds = [batch.input_ids, batch.targets, batch.position_ids, batch.document_ids]
    assert [tensor.dtype for tensor in kinds] == [torch.int64, torch.int64, torch.int64, torch.int32]


def test_real_eos_is_a_target_though_it_is_also_the_padding() -> None:
    eos = PAD
    rows = [TokenRow(np.array([*range(1, length), eos], dtype=np.int32), np.arange(length) > 0) for length in (4, 6)]
    (batch,) = loader(TokenDataset(rows, {}), micro_batch_size=2, pad_token_id=eos).batches(0)
    order = np.argsort((batch.document_ids >= 0).sum(1).numpy())
    assert batch.targets[order].tolist() == [[2, 3, eos, -100, -100, -100], [2, 3, 4, 5, eos, -100]]
    assert batch.document_ids[order].tolist() == [[0, 0, 0, 0, -1, -1], [0] * 6]


def test_only_masked_tokens_are_targets() -> None:
    row = TokenRow(np.array([5, 6, 7, 8, 9], dtype=np.int32), np.array([False, False, True, True, False]))
    (batch,) = loader(TokenDataset([row], {})).batches(0)
    assert batch.targets.tolist() == [[-100, 7, 8, -100, -100]]


LENGTHS = st.lists(st.integers(2, 16), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, packing=st.booleans(), accumulation=st.integers(1, 3), seed=st.integers(0, 9))
def test_ranks_together_read_what_one_process_reads(
    lengths: list[int], packing: bool, accumulation: int, seed: int
) -> None:
    dataset = dataset_of(*lengths)
    options = {"packing": packing, "seed": seed, "epochs": 2}
    one = loader(dataset, gradient_accumulation_steps=4 * accumulation, **options)
    ranks = [
        loader(dataset, micro_batch_size=2, gradient_accumulation_steps=accumulation, world_size=2, rank=r, **options)
        for r in range(2)
    ]
    read = []
    for step in range(one.num_steps):
        mine = [rank.batches(step) for rank in ranks]
        assert len(mine[0]) == len(mine[1]) <= accumulation
        rows = rows_in([batch for batches in mine for batch in batches])
        assert rows == rows_in(one.batches(step))
        supervised = sum(batch.num_supervised_tokens for batches in mine for batch in batches)
        assert supervised == one.global_supervised_tokens(step) == ranks[1].global_supervised_tokens(step)
        assert supervised == sum(lengths[row] - 1 for row in rows)
        read.append(rows)
    assert one.num_steps == ranks[0].num_steps == 2 * one.steps_per_epoch
    for epoch in range(2):
        steps = read[epoch * one.steps_per_epoch : (epoch + 1) * one.steps_per_epoch]
        assert sorted(row for rows in steps for row in rows) == list(range(len(lengths)))


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_is_the_same_whenever_it_is_read(packing: bool) -> None:
    dataset = dataset_of(*np.random.default_rng(0).integers(2, 17, 50).tolist())
    options = {"packing": packing, "micro_batch_size": 3, "epochs": 3}
    through = loader(dataset, **options)
    steps = [through.batches(step) for step in range(through.num_steps)]
    assert len({len(dataset.rows), *map(len, steps)}) > 1
    for step in (0, through.num_steps - 1, through.num_steps // 2, 1):
        for batch, again in zip(steps[step], loader(dataset, **options).batches(step), strict=True):
            assert torch.equal(batch.input_ids, again.input_ids)
            assert torch.equal(batch.targets, again.targets)
            assert torch.equal(batch.document_ids, again.document_ids)
    first, second = (
        [through.sequences(epoch * through.steps_per_epoch + i) for i in range(through.steps_per_epoch)]
        for epoch in (0, 1)
    )
    assert first != second


def test_last_step_deals_its_rows_to_all_ranks() -> None:
    dataset = dataset_of(*[4] * 5)
    options = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "world_size": 4}
    counts = [[len(rows_in([batch])) for batch in loader(dataset, rank=r, **options).batches(0)] for r in range(4)]
    assert counts == [[2], [1], [1], [1]]


def test_rank_without_rows_gets_a_batch_of_padding() -> None:
    (batch,) = loader(dataset_of(4), world_size=2, rank=1).batches(0)
    assert (batch.num_tokens, batch.num_supervised_tokens) == (0, 0)
    assert batch.input_ids.tolist() == [[PAD, PAD]]
    assert batch.document_ids.tolist() == [[-1, -1]]


def test_padding_reaches_to_the_longest_row_of_the_micro_batch() -> None:
    batches = loader(dataset_of(2, 3, 9, 4), gradient_accumulation_steps=4).batches(0)
    assert sorted(batch.input_ids.shape[1] for batch in batches) == [2, 3, 4, 9]
    rounded = loader(dataset_of(2, 3, 9, 4), gradient_accumulation_steps=4, length_multiple=4, max_seq_length=10)
    assert sorted(batch.input_ids.shape[1] for batch in rounded.batches(0)) == [4, 4, 4, 10]


def test_number_of_steps() -> None:
    dataset = dataset_of(*[4] * 10)
    assert loader(dataset, micro_batch_size=4).num_steps == 3
    assert loader(dataset, micro_batch_size=4, epochs=1.5).num_steps == 5
    assert loader(dataset, micro_batch_size=4, epochs=0.1).num_steps == 1
    assert loader(dataset, epochs=0.7).num_steps == 7
    assert loader(dataset, epochs=1.0, max_steps=25).num_steps == 25
    assert len(loader(dataset, epochs=None, max_steps=25).batches(24)) == 1


@given(lengths=st.lists(st.integers(1, 20), max_size=60), seed=st.integers(0, 99))
def test_packs_hold_each_row_once_and_no_two_could_be_joined(lengths: list[int], seed: int) -> None:
    packs = pack_rows(lengths, 20)
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    sizes = sorted(sum(lengths[row] for row in pack) for pack in packs)
    assert not sizes or sizes[-1] <= 20
    assert len(sizes) < 2 or sizes[0] + sizes[1] > 20
    shuffled = np.random.default_rng(seed).permutation(lengths)
    assert sizes == sorted(sum(int(shuffled[row]) for row in pack) for pack in pack_rows(shuffled, 20))


def test_equally_long_rows_are_packed_in_the_order_given() -> None:
    assert [pack[0] for pack in pack_rows([6, 4] * 200, 10)] == list(range(0, 400, 2))


def test_packing_is_tight() -> None:
    lengths = np.random.default_rng(0).integers(10, 500, 2000)
    assert lengths.sum() / (1024 * len(pack_rows(lengths, 1024))) > 0.99
