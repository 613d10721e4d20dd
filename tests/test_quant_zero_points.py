"""Scales with zero points: what they cover, and what searching them, or GPTQ on them, gains."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from finetune.quant.methods import METHODS, QuantizedWeight
from finetune.quant.scales import relative_error, round_to_codes, weight_values
from finetune.quant.scheme import WeightArgs, scheme_with
from finetune.quant.zero_points import extreme_scales_and_zero_points, searched_scales_and_zero_points, shifted
from tests.test_quant_maths import correlated_inputs, hessian_of, weight_of

RATIOS = [1.0, 0.95, 0.9, 0.85, 0.8, 0.7]


def asymmetric(num_bits: int, group_size: int | None = 16) -> WeightArgs:
    return scheme_with(f"w{num_bits}a16", group_size=group_size, symmetric=False).weights


def run(method: str, weight_OI: Tensor, hessian_II: Tensor, weights: WeightArgs) -> QuantizedWeight:
    options = {"weights": weights, "scale_dtype": torch.bfloat16, "damp": 0.01, "act_order": True}
    return METHODS[method].quantize(weight_OI, hessian_II, **options)


@settings(deadline=None)
@given(st.sampled_from([2, 3, 4, 8]), st.floats(-3, 3), st.floats(1e-3, 10), st.integers(0, 2**31))
def test_both_ends_of_each_group_are_covered(num_bits: int, middle: float, spread: float, seed: int) -> None:
    weights = asymmetric(num_bits)
    generator = torch.Generator().manual_seed(seed)
    weight_OI = middle + spread * torch.randn(6, 32, generator=generator)
    weight_OI[0] = 0
    scale_OG, zero_OG = extreme_scales_and_zero_points(weight_OI, weights, torch.float32)
    assert zero_OG.dtype == torch.int8
    assert zero_OG.min() > weights.code_min
    assert zero_OG.max() <= weights.code_max
    codes_OI = round_to_codes(shifted(weight_OI, scale_OG, zero_OG), scale_OG, weights)
    values_OI = weight_values(QuantizedWeight(codes_OI, scale_OG, zero_OG), torch.float32)
    assert (values_OI[0] == 0).all(), "a row of zeros stays exactly zero"
    # Half a step by rounding the weight; at an end another half by rounding the zero point.
    steps_OI = (values_OI - weight_OI).abs() / scale_OG.repeat_interleave(16, 1)
    assert steps_OI.max() < 1.01


@pytest.mark.parametrize("num_bits", [2, 3, 4, 8])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_every_method_gives_codes_and_zero_points_in_range(method: str, num_bits: int) -> None:
    weights = asymmetric(num_bits)
    weight_OI = weight_of(24, 64)
    weight_OI[3] = 0
    result = run(method, weight_OI, hessian_of(correlated_inputs(512, 64)), weights)
    assert result.zero_point is not None
    assert result.zero_point.shape == result.scale.shape == (24, 4)
    assert result.codes.min() >= weights.code_min
    assert result.codes.max() <= weights.code_max
    assert (result.scale > 0).all()
    assert (weight_values(result, torch.float32)[3] == 0).all()


def test_a_zero_point_pays_where_weights_lie_on_one_side() -> None:
    hessian_II = hessian_of(correlated_inputs(512, 64))
    weight_OI = weight_of(24, 64).abs() + 0.5
    symmetric = scheme_with("w4a16", group_size=16).weights
    for method in ("rtn", "gptq"):
        errors = [
            relative_error(weight_OI, weight_values(run(method, weight_OI, hessian_II, weights), torch.float32), None)
            for weights in (symmetric, asymmetric(4))
        ]
        assert errors[1] < errors[0]


def test_the_search_lowers_the_weighted_error() -> None:
    weights, weight_OI = asymmetric(4), weight_of(64, 64)
    importance_I = torch.linspace(0.01, 10, 64) ** 2

    def errors(scale_OG: Tensor, zero_OG: Tensor) -> Tensor:
        codes_OI = round_to_codes(shifted(weight_OI, scale_OG, zero_OG), scale_OG, weights)
        lost_OI = weight_values(QuantizedWeight(codes_OI, scale_OG, zero_OG), torch.float32) - weight_OI
        return (lost_OI.square() * importance_I).unflatten(1, (4, 16)).sum(-1)

    plain = errors(*extreme_scales_and_zero_points(weight_OI, weights, torch.float32))
    scale_OG, zero_OG, clip = searched_scales_and_zero_points(weight_OI, importance_I, weights, torch.float32, RATIOS)
    assert (errors(scale_OG, zero_OG) <= plain * (1 + 1e-5)).all()
    assert errors(scale_OG, zero_OG).sum() < 0.97 * plain.sum()
    assert 0 < clip["clipped_fraction"] <= 1


def test_gptq_keeps_the_outputs_better_than_rounding() -> None:
    inputs_NI, weight_OI = correlated_inputs(2048, 64), weight_of(48, 64)
    hessian_II = hessian_of(inputs_NI)
    gptq, rtn = (
        relative_error(
            weight_OI, weight_values(run(method, weight_OI, hessian_II, asymmetric(4)), torch.float32), hessian_II
        )
        for method in ("gptq", "rtn")
    )
    assert gptq < 0.5 * rtn


def test_weights_with_zero_points_are_computed_in_the_scales_dtype() -> None:
    """As transformers dequantizes them: compressed-tensors computes in that dtype, the load casts afterwards."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    result = run("rtn", weight_of(24, 64), torch.eye(64), asymmetric(4))
    args = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=16)
    expected = dequantize(result.codes, result.scale, result.zero_point, args)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(weight_values(result, torch.float32), expected.float())
