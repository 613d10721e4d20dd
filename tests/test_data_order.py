"""The order of the rows: exact at any place, on any number of ranks, mixed by weight, grouped by length."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.dataset import TokenDataset, TokenRow
from finetune.data.loader import StepLoader

ROWS_A_STEP = 8


def dataset_of(lengths: list[int], *, sources: list[int] | None = None, weights: tuple[float, ...] = (1.0,)) -> Any:
    rows = [TokenRow(np.full(length, row, dtype=np.int32), np.arange(length) > 0) for row, length in enumerate(lengths)]
    return TokenDataset(rows, {}, None if sources is None else np.array(sources, dtype=np.int32), weights)


def loader(dataset: TokenDataset, **options: Any) -> StepLoader:
    options = {
        "packing": True,
        "max_seq_length": 24,
        "micro_batch_size": 2,
        "world_size": 1,
        "rank": 0,
        "seed": 3,
        "epochs": 3.0,
        "max_steps": None,
        "pad_token_id": 0,
        **options,
    }
    options.setdefault(
        "gradient_accumulation_steps", ROWS_A_STEP // options["micro_batch_size"] // options["world_size"]
    )
    return StepLoader(dataset, **options)


def read(dataset: TokenDataset, steps: range, *, world_size: int, **options: Any) -> list[list[int]]:
    """The rows of each step as the ranks' batches hold them, each rank's in turn, once all ranks are put together."""
    ranks = [loader(dataset, world_size=world_size, rank=rank, **options) for rank in range(world_size)]
    found = []
    for step in steps:
        rounds = zip(*(rank.batches(step) for rank in ranks), strict=True)
        sequences = [
            batch.input_ids[row][(batch.position_ids[row] == 0) & (batch.document_ids[row] >= 0)].tolist()
            for batch in chain.from_iterable(rounds)
            for row in range(len(batch.input_ids))
        ]
        found.append(list(chain.from_iterable(sequences)))
    return found


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_two_stops_and_other_numbers_of_ranks_change_no_row_and_no_order(seed: int, packing: bool) -> None:
    """1 rank, stopped at a random step; 2 ranks from there, stopped; 1 rank to the end."""
    random = np.random.default_rng(seed)
    dataset = dataset_of(random.integers(2, 25, int(random.integers(20, 90))).tolist())
    options = {"packing": packing, "seed": seed}
    num_steps = loader(dataset, **options).num_steps
    first, second = sorted(random.choice(np.arange(1, num_steps), 2, replace=False).tolist())
    whole = read(dataset, range(num_steps), world_size=1, **options)
    parts = [
        *read(dataset, range(first), world_size=1, **options),
        *read(dataset, range(first, second), world_size=2, **options),
        *read(dataset, range(second, num_steps), world_size=1, **options),
    ]
    assert parts == whole
    assert Counter(chain.from_iterable(parts)) == dict.fromkeys(range(len(dataset)), 3)


def epochs_of(dataset: TokenDataset, number: int, **options: Any) -> list[list[int]]:
    """The rows of each epoch, in order."""
    one = loader(dataset, epochs=float(number), **options)
    steps = range(number * one.steps_per_epoch)
    rows = [list(chain.from_iterable(one.sequences(step))) for step in steps]
    cut = one.steps_per_epoch
    return [list(chain.from_iterable(rows[start : start + cut])) for start in range(0, len(rows), cut)]


@pytest.mark.parametrize("packing", [True, False])
def test_weights_say_how_often_an_epoch_uses_the_rows_of_a_source(packing: bool) -> None:
    lengths = np.random.default_rng(0).integers(2, 25, 60).tolist()
    sources = [0] * 20 + [1] * 20 + [2] * 20
    dataset = dataset_of(lengths, sources=sources, weights=(2.0, 0.5, 1.25))
    epochs = epochs_of(dataset, 4, packing=packing)
    for rows in epochs:
        assert Counter(sources[row] for row in rows) == {0: 40, 1: 10, 2: 25}
    used = [Counter(chain.from_iterable(epochs[:number])) for number in range(5)]
    assert {used[1][row] for row in range(20)} == {2}
    # Half of a source in the first epoch, the other half in the second; another half in the third.
    assert {used[2][row] for row in range(20, 40)} == {1}
    assert {row for row in epochs[0] if sources[row] == 1} != {row for row in epochs[2] if sources[row] == 1}
    assert {used[4][row] for row in range(40, 60)} == {5}
    assert epochs == epochs_of(dataset, 4, packing=packing)
    assert epochs != epochs_of(dataset, 4, packing=packing, seed=4)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 24), min_size=4, max_size=60),
    weight=st.sampled_from([0.3, 0.5, 0.75, 1.5]),
    seed=st.integers(0, 99),
    accumulation=st.sampled_from([1, 8]),
)
def test_every_epoch_has_the_steps_of_the_first_and_uses_all_it_draws(
    lengths: list[int], weight: float, seed: int, accumulation: int
) -> None:
    """The rows that a fraction draws pack into more sequences in one epoch than in another."""
    half = len(lengths) // 2
    sources = [0] * half + [1] * (len(lengths) - half)
    dataset = dataset_of(lengths, sources=sources, weights=(1.0, weight))
    options = {"seed": seed, "gradient_accumulation_steps": accumulation, "micro_batch_size": 1}
    one = loader(dataset, epochs=5.0, **options)
    number = max(1, round(weight * (len(lengths) - half)))
    for rows in epochs_of(dataset, 5, **options):
        assert Counter(sources[row] for row in rows)[1] == number
        assert sorted(row for row in rows if sources[row] == 0) == list(range(half))
    halved = {**options, "gradient_accumulation_steps": max(1, accumulation // 2)}
    two = [loader(dataset, epochs=5.0, world_size=2, rank=rank, **halved) for rank in range(2)]
    for step in range(one.num_steps):
        assert one.sequences(step)
        if accumulation > 1:
            assert one.sequences(step) == two[0].sequences(step)
            assert len(two[0].batches(step)) == len(two[1].batches(step))


def test_an_epoch_with_more_packs_than_the_first_loses_none() -> None:
    """Of one long and many short rows half are drawn: an epoch with long ones needs more packs."""
    dataset = dataset_of([24] * 16 + [2] * 16, sources=[0] * 32, weights=(0.5,))
    counts = set()
    for seed in range(30):
        one = loader(dataset, seed=seed, epochs=2.0, micro_batch_size=1, gradient_accumulation_steps=2)
        epochs = epochs_of(dataset, 2, seed=seed, micro_batch_size=1, gradient_accumulation_steps=2)
        assert [len(rows) for rows in epochs] == [16, 16]
        assert sorted(epochs[0] + epochs[1]) == list(range(32))
        counts.add(one.steps_per_epoch)
    assert len(counts) > 3


def test_rows_of_like_length_share_a_batch_and_every_row_is_used_once() -> None:
    lengths = np.random.default_rng(1).integers(2, 400, 1500).tolist()
    dataset = dataset_of(lengths)
    options = {"packing": False, "max_seq_length": 512, "micro_batch_size": 8, "gradient_accumulation_steps": 1}
    shares = {}
    for group in (True, False):
        one = loader(dataset, group_by_length=group, **options)
        shares[group] = one.padding_share()
        for rows in epochs_of(dataset, 2, group_by_length=group, **options):
            assert sorted(rows) == list(range(1500))
        positions = sum(batch.input_ids.numel() for step in range(20) for batch in one.batches(step))
        assert positions == sum(one.num_positions(step) for step in range(20))
    assert shares[True] < 0.15 < 0.3 < shares[False]
    one = loader(dataset, **options)
    steps = [sum(lengths[row] for (row,) in one.sequences(step)) for step in range(one.steps_per_epoch)]
    # Long and short steps alternate: the first half isn't the longer one.
    assert abs(sum(steps[: len(steps) // 2]) / sum(steps) - 0.5) < 0.05


def test_a_grouped_order_does_not_depend_on_the_rows_a_step() -> None:
    """So a run may go on with another number of rows a step without losing or repeating one."""
    dataset = dataset_of(np.random.default_rng(1).integers(2, 20, 300).tolist())
    small, large = (loader(dataset, packing=False, gradient_accumulation_steps=n) for n in (2, 4))
    for step in range(large.steps_per_epoch - 1):
        together = small.sequences(2 * step) + small.sequences(2 * step + 1)
        assert sorted(together) == sorted(large.sequences(step))


def test_any_step_is_found_without_reading_those_before_it() -> None:
    dataset = dataset_of([5] * 1000)
    far = loader(dataset, epochs=1e6)
    assert far.num_steps > 10_000_000
    step = far.num_steps - 3
    assert far.sequences(step) == loader(dataset, epochs=1e6).sequences(step)


def test_held_out_rows_keep_their_weights_and_the_digest_tells_mixtures_apart() -> None:
    from finetune.data.holdout import hold_out

    dataset = dataset_of([4] * 20, sources=[0] * 10 + [1] * 10, weights=(1.0, 2.0))
    kept, held = hold_out(dataset, num_rows=5, seed=0)
    assert len(kept) == 15
    assert kept.weights == (1.0, 2.0)
    assert kept.sources is not None
    for row, source in zip(kept, kept.sources, strict=True):
        assert (row.input_ids[0] >= 10) == (source == 1)
    other = TokenDataset(dataset.rows, {}, dataset.sources, (2.0, 1.0))
    assert len({loader(one).digest for one in (dataset, other, kept, held)}) == 4
