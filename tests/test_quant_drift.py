"""Weights that make up for what their inputs have lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.quant.activations import HessianSum
from finetune.quant.drift import make_up, ridge
from finetune.quant.quantize import quantize_model
from finetune.quant.settings import QuantizeSettings
from tests.families import tiny_model
from tests.tiny import CORPUS


def test_made_up_weights_are_those_of_least_error() -> None:
    generator = torch.Generator().manual_seed(0)
    exact_NI = torch.randn(400, 12, generator=generator) * torch.linspace(0.1, 3, 12)
    drifted_NI = exact_NI + 0.3 * torch.randn(400, 12, generator=generator) + 0.2 * exact_NI.roll(1, 1)
    weight_OI = torch.randn(5, 12, generator=generator)
    sums = HessianSum(12)
    for rows in (slice(0, 150), slice(150, 400)):
        sums.add(drifted_NI[rows], None, exact_NI[rows])
    drift_II = sums.mean_drift()
    assert drift_II is not None
    found_OI = make_up(weight_OI, sums.mean(), drift_II, num_tokens=sums.num_tokens)

    # The same by a plain least-squares solver: the ridge is rows of data that ask for the weights as they were.
    pull = (ridge(12, 400) * drifted_NI.square().mean() * 400).sqrt()
    rows_NI = torch.cat([drifted_NI, pull * torch.eye(12)])
    asked_NO = torch.cat([exact_NI @ weight_OI.T, pull * weight_OI.T])
    expected_OI = torch.linalg.lstsq(rows_NI.double(), asked_NO.double()).solution.T
    torch.testing.assert_close(found_OI.double(), expected_OI, rtol=1e-4, atol=1e-4)


def test_inputs_that_did_not_drift_and_inputs_of_zero_leave_the_weights() -> None:
    weight_OI, hidden_NI = torch.randn(3, 8), torch.randn(50, 8)
    for inputs_NI in (hidden_NI, torch.zeros(50, 8)):
        sums = HessianSum(8)
        sums.add(inputs_NI, None, inputs_NI)
        drift_II = sums.mean_drift()
        assert drift_II is not None
        torch.testing.assert_close(make_up(weight_OI, sums.mean(), drift_II, num_tokens=sums.num_tokens), weight_OI)


def test_padding_says_nothing_about_drift() -> None:
    exact, drifted, mask = torch.randn(2, 4, 6), torch.randn(2, 4, 6), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    padded, bare = HessianSum(6), HessianSum(6)
    padded.add(drifted, mask, exact)
    bare.add(drifted[mask], None, exact[mask])
    one, other = padded.mean_drift(), bare.mean_drift()
    assert one is not None
    assert other is not None
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("size", [1e-19, 1e-22, 1e15])
def test_inputs_of_any_size_are_made_up_for_or_left(size: float) -> None:
    exact_NI, weight_OI = size * torch.randn(50, 8), torch.randn(3, 8)
    sums = HessianSum(8)
    sums.add(0.9 * exact_NI, None, exact_NI)
    drift_II = sums.mean_drift()
    assert drift_II is not None
    found_OI = make_up(weight_OI, sums.mean(), drift_II, num_tokens=50)
    assert torch.isfinite(found_OI).all()
    if size > 1e-20:
        assert found_OI.norm() > weight_OI.norm()


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_whole_model_predicts_more_nearly_as_before(family: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    source = tiny_model(family, tmp_path / "source", **sizes)
    path = tmp_path / "calibration.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS * 12), encoding="utf-8")
    calibration = {"data": [{"path": str(path)}], "num_samples": 32, "max_seq_length": 32, "micro_batch_size": 8}
    kl: dict[bool, float] = {}
    for corrected in (False, True):
        settings = QuantizeSettings(
            scheme="w4a16",
            format="gptq",
            group_size=None,
            calibration=calibration,
            verify=False,
            tuning_steps=0,
            drift_correction=corrected,
        )
        report = quantize_model(source, settings=settings, out=tmp_path / f"{corrected}", seed=0)
        kl[corrected] = report["end_to_end"]["kl"]
    assert kl[True] < 0.8 * kl[False]
