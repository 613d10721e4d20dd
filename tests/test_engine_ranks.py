"""Two ranks against one process: every stage and accumulation, one launch."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from finetune.checkpoint.consolidate import consolidate
from finetune.engine.launch import run_ranks
from tests.buffered import BUFFERS, odd_model, register_buffered
from tests.tiny import tiny_llama
from tests.training import DTYPES, FROZEN, ODD, make_engine, run_steps, whole_state

CASES = [(dtype, stage, accumulation) for dtype in DTYPES for stage in range(4) for accumulation in (1, 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # 63 rows of a matrix don't divide by two: ranks hold unequal parts.
    return tiny_llama(tmp_path_factory.mktemp("model"), hidden_size=40, intermediate_size=63)


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    odd_model(tied=True).save_pretrained(folder / "odd")
    arguments = ["-m", "tests.training", "engines", str(model), str(folder / "out.json")]
    run_ranks(arguments, num_processes=2, device="cpu", log_dir=folder / "logs")
    results, states = json.loads((folder / "out.json").read_text()), torch.load(folder / "out.pt")
    return results, states, folder


@pytest.fixture(scope="module")
def one_process(model):
    results, states = {}, {}
    for dtype in DTYPES:
        engine, _ = make_engine(model, dtype=dtype, weight_decay=0.1)
        results[dtype] = run_steps(engine, accumulation=4, rank=0, world_size=1)
        states[dtype] = whole_state(engine)
    return results, states


@pytest.mark.parametrize(("dtype", "stage", "accumulation"), CASES)
def test_losses_norms_and_weights_equal_one_process(two_ranks, one_process, dtype, stage, accumulation):
    """Rows of 3, 9, 0 and 5 targets, so that a mean over ranks or micro-batches would show at once."""
    results, states, _ = two_ranks
    got, expected = results[f"{dtype} {stage} {accumulation}"], one_process[0][dtype]
    tolerance = 1e-5 if dtype == "fp32" else 1e-3
    assert got["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-5 if dtype == "fp32" else 5e-3)
    assert got["held_out"] == pytest.approx(expected["held_out"], rel=tolerance)
    state = states[f"{dtype} {stage} {accumulation}"]
    assert state.keys() == one_process[1][dtype].keys()
    for name, value in one_process[1][dtype].items():
        assert state[name].dtype == value.dtype
        if dtype == "fp32" and name.startswith("model."):
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def test_a_rank_holds_about_half_of_the_sharded_state(two_ranks, one_process):
    results, *_ = two_ranks
    whole = sum(value.numel() for name, value in one_process[1]["fp32"].items() if name.startswith("model."))
    for stage in (1, 2, 3):
        assert results[f"fp32 {stage} 1"]["rows"][0] < 0.53 * whole


@pytest.mark.parametrize("name", ODD)
def test_frozen_and_tied_parameters_and_buffers_of_any_type_survive(two_ranks, tmp_path, name):
    _, states, folder = two_ranks
    state, before = states[f"odd {name}"], odd_model(tied=True)
    masters = dict(before.named_parameters())
    assert "model.lm_head.weight" not in state
    for parameter, value in masters.items():
        assert state[f"model.{parameter}"].dtype == torch.float32
        assert state[f"model.{parameter}"].equal(value.data) == (parameter in FROZEN), parameter
        assert (f"optimizer.exp_avg.{parameter}" in state) == (parameter not in FROZEN)
    for buffer, value in BUFFERS.items():
        assert state[f"buffer.{buffer}"].equal(value)
    register_buffered()
    consolidate(folder / f"odd-{name}/step-00000003", out=tmp_path / "model", dtype="float32")
    written = load_file(tmp_path / "model/model.safetensors")
    assert written.keys() == {*masters, *BUFFERS}
    for key, value in written.items():
        assert value.equal(state[f"{'buffer' if key in BUFFERS else 'model'}.{key}"]), key
