"""The arithmetic of quantization: scales, codes, GPTQ, packing, and the Hessian."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from finetune.quant.activations import HessianSum, fake_quantize_tokens
from finetune.quant.methods import METHODS, QuantizedWeight
from finetune.quant.methods.gptq import _descend, inverse_cholesky
from finetune.quant.scales import dequantize, extreme_scales, relative_error, round_to_codes, searched_scales
from finetune.quant.scheme import SCHEMES, ActivationArgs, scheme_with
from finetune.quant.writers.compressed_tensors import pack_codes, unpack_codes

INT4_G16 = scheme_with("w4a16", group_size=16).weights


def correlated_inputs(num_tokens: int, in_features: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(in_features, in_features, generator=generator) / in_features**0.5
    sizes = torch.rand(in_features, generator=generator).mul(3).exp()
    return torch.randn(num_tokens, in_features, generator=generator) @ mix * sizes


def hessian_of(inputs_NI: Tensor) -> Tensor:
    return inputs_NI.T @ inputs_NI / len(inputs_NI)


def weight_of(out_features: int, in_features: int, *, seed: int = 1) -> Tensor:
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed))


def run(method: str, weight_OI: Tensor, hessian_II: Tensor, **options: object) -> QuantizedWeight:
    options = {"weights": INT4_G16, "scale_dtype": torch.float32, "damp": 0.01, "act_order": True, **options}
    return METHODS[method].quantize(weight_OI, hessian_II, **options)


def error_of(weight_OI: Tensor, result: QuantizedWeight, hessian_II: Tensor) -> float:
    return relative_error(weight_OI, dequantize(result.codes, result.scale.float()), hessian_II)


@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if scheme.weights.type == "int"])
@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_gives_codes_in_range_and_scales_that_are_stored_exactly(method: str, scheme: str) -> None:
    weights = SCHEMES[scheme].weights
    hessian_II = hessian_of(correlated_inputs(512, 128))
    weight_OI = weight_of(24, 128)
    weight_OI[3] = 0
    result = run(method, weight_OI, hessian_II, weights=weights, scale_dtype=torch.bfloat16)
    assert result.codes.dtype == torch.int8
    assert result.codes.shape == (24, 128)
    assert result.codes.min() >= weights.code_min
    assert result.codes.max() <= weights.code_max
    assert result.scale.dtype == torch.bfloat16
    assert result.scale.shape == (24, weights.num_groups(128))
    assert torch.isfinite(result.scale).all()
    assert (result.scale != 0).all()
    assert (dequantize(result.codes, result.scale)[3] == 0).all(), "a row of zeros stays exactly zero"
    assert error_of(weight_OI, result, hessian_II) < {2: 0.4, 3: 0.1, 4: 0.02, 8: 2e-4}[weights.num_bits]


def test_extreme_scales_use_the_lowest_code_whatever_the_sign() -> None:
    weight_OI = torch.tensor([[7.0, -1.0, 2.0, 0.5], [-7.0, 1.0, 2.0, 0.5]])
    weights = scheme_with("w4a16", group_size=None).weights
    scale_OG = extreme_scales(weight_OI, weights, torch.float32)
    codes_OI = round_to_codes(weight_OI, scale_OG, weights)
    assert codes_OI[:, 0].tolist() == [-8, -8]
    assert scale_OG.flatten().tolist() == [-7 / 8, 7 / 8]
    assert dequantize(codes_OI, scale_OG)[:, 0].tolist() == [7.0, -7.0]


def test_codes_are_rounded_under_the_scale_that_is_stored() -> None:
    weight_OI = weight_of(8, 16)
    scale_OG = extreme_scales(weight_OI, INT4_G16, torch.bfloat16)
    nearest_OI = (weight_OI / scale_OG.float()).round().clamp(-8, 7)
    assert torch.equal(round_to_codes(weight_OI, scale_OG, INT4_G16).float(), nearest_OI)


def test_searched_scales_lower_the_weighted_error() -> None:
    weight_OI = weight_of(64, 64)
    importance_I = torch.linspace(0.01, 10, 64) ** 2
    plain_OG = extreme_scales(weight_OI, INT4_G16, torch.float32)
    ratios = [1.0, 0.95, 0.9, 0.85, 0.8, 0.7]
    searched_OG, clip = searched_scales(weight_OI, importance_I, INT4_G16, torch.float32, ratios)

    def errors(scale_OG: Tensor) -> Tensor:
        lost_OI = dequantize(round_to_codes(weight_OI, scale_OG, INT4_G16), scale_OG) - weight_OI
        return (lost_OI.square() * importance_I).unflatten(1, (4, 16)).sum(-1)

    assert (errors(searched_OG) <= errors(plain_OG) * (1 + 1e-5)).all()
    assert errors(searched_OG).sum() < 0.95 * errors(plain_OG).sum()
    assert 0 < clip["clipped_fraction"] <= 1
    assert clip["mean_ratio"] < 1


def test_gptq_keeps_the_outputs_better_than_rounding() -> None:
    inputs_NI, weight_OI = correlated_inputs(2048, 64), weight_of(48, 64)
    hessian_II = hessian_of(inputs_NI)
    gptq, rtn = (run(method, weight_OI, hessian_II) for method in ("gptq", "rtn"))
    assert error_of(weight_OI, gptq, hessian_II) < 0.5 * error_of(weight_OI, rtn, hessian_II)
    # The error that the report gives is that of the outputs.
    lost_NO = inputs_NI @ (dequantize(gptq.codes, gptq.scale) - weight_OI).T
    measured = (lost_NO.square().mean() / (inputs_NI @ weight_OI.T).square().mean()).item()
    assert measured == pytest.approx(error_of(weight_OI, gptq, hessian_II), rel=1e-3)


def test_no_single_code_can_be_improved_any_more_after_enough_descent() -> None:
    """And no pass makes the error larger."""
    hessian_II, weight_OI = hessian_of(correlated_inputs(1024, 48)), weight_of(16, 48)
    scale_IO = extreme_scales(weight_OI, INT4_G16, torch.float32).T.repeat_interleave(16, 0)
    codes_IO = (weight_OI.T / scale_IO).round().clamp(-8, 7)

    def error(codes_IO: Tensor) -> Tensor:
        lost_IO = weight_OI.T - codes_IO * scale_IO
        return (lost_IO * (hessian_II @ lost_IO)).sum(0)

    errors = [error(codes_IO)]
    for _ in range(30):
        _descend(weight_OI.T, codes_IO, scale_IO, hessian_II, INT4_G16)
        errors.append(error(codes_IO))
        assert (errors[-1] <= errors[-2] * (1 + 1e-4)).all()
    assert errors[-1].sum() < 0.6 * errors[0].sum()
    for index in range(0, 48, 5):
        for step in (-1, 1):
            moved_IO = codes_IO.clone()
            moved_IO[index] = (moved_IO[index] + step).clamp(-8, 7)
            assert (error(moved_IO) >= errors[-1] * (1 - 1e-4)).all()


def test_gptq_without_act_order_goes_left_to_right() -> None:
    """One group and the identity as Hessian: no column has anything to make up for, in whatever order."""
    weight_OI, hessian_II = weight_of(8, 16), torch.eye(16)
    ordered, plain = (run("gptq", weight_OI, hessian_II, act_order=order) for order in (True, False))
    assert torch.equal(ordered.codes, plain.codes)
    hessian_II = hessian_of(correlated_inputs(256, 16))
    ordered, plain = (run("gptq", weight_OI, hessian_II, act_order=order) for order in (True, False))
    assert torch.equal(ordered.scale, plain.scale), "groups are static: the order doesn't touch the scales"
    assert not torch.equal(ordered.codes, plain.codes)


def test_layers_stacked_along_their_rows_get_what_they_get_alone() -> None:
    hessian_II = hessian_of(correlated_inputs(512, 32))
    first, second = weight_of(8, 32, seed=2), weight_of(24, 32, seed=3)
    together = run("gptq", torch.cat([first, second]), hessian_II)
    assert torch.equal(together.codes[:8], run("gptq", first, hessian_II).codes)
    assert torch.equal(together.scale[8:], run("gptq", second, hessian_II).scale)


def test_a_constant_zero_input_gives_a_finite_result_and_its_weights_are_only_rounded() -> None:
    inputs_NI = correlated_inputs(512, 32)
    inputs_NI[:, 5] = 0
    hessian_II, weight_OI = hessian_of(inputs_NI), weight_of(8, 32)
    result = run("gptq", weight_OI, hessian_II)
    assert torch.isfinite(dequantize(result.codes, result.scale)).all()
    scale_O = result.scale[:, 0]
    nearest_O = (weight_OI[:, 5] / scale_O).round().clamp(-8, 7)
    assert torch.equal(result.codes[:, 5].float(), nearest_O)


def test_inputs_that_are_all_zero_give_a_finite_result() -> None:
    weight_OI = weight_of(8, 32)
    result = run("gptq", weight_OI, torch.zeros(32, 32))
    assert error_of(weight_OI, result, torch.eye(32)) < 0.02


@pytest.mark.parametrize(("damp", "grows"), [(0.01, False), (1e-12, True)])
def test_a_rank_one_hessian_is_damped_as_far_as_it_needs_and_that_is_reported(damp: float, grows: bool) -> None:
    direction_I = correlated_inputs(1, 64)
    hessian_II = direction_I.T @ direction_I
    weight_OI = weight_of(8, 64)
    result = run("gptq", weight_OI, hessian_II, damp=damp)
    assert torch.isfinite(dequantize(result.codes, result.scale)).all()
    assert result.damp is not None
    assert (result.damp > damp) == grows
    assert error_of(weight_OI, result, hessian_II) < 0.02


def test_inverse_cholesky_is_the_factor_of_the_damped_inverse() -> None:
    hessian_II = hessian_of(correlated_inputs(256, 24))
    upper_II, damp = inverse_cholesky(hessian_II, damp=0.01)
    assert damp == 0.01
    damped_II = hessian_II + 0.01 * hessian_II.diagonal().mean() * torch.eye(24)
    assert torch.equal(upper_II, upper_II.triu())
    torch.testing.assert_close(upper_II.T @ upper_II @ damped_II, torch.eye(24), atol=1e-3, rtol=0)


def test_padding_does_not_enter_the_hessian() -> None:
    inputs_BSI = correlated_inputs(12, 8).view(2, 6, 8)
    unpadded = HessianSum(8)
    unpadded.add(inputs_BSI, None)
    padded_BSI = torch.full((2, 9, 8), 1e4)
    padded_BSI[:, :6] = inputs_BSI
    padded = HessianSum(8)
    padded.add(padded_BSI, torch.arange(9).expand(2, 9) < 6)
    assert padded.num_tokens == unpadded.num_tokens == 12
    assert torch.equal(padded.mean(), unpadded.mean())


def test_hessian_of_bfloat16_inputs_is_a_float32_sum_of_exact_products() -> None:
    inputs_NI = correlated_inputs(4096, 32).bfloat16()
    total = HessianSum(32)
    for chunk_NI in inputs_NI.split(1000):
        total.add(chunk_NI.unsqueeze(0), None)
    exact_II = inputs_NI.double().T @ inputs_NI.double() / len(inputs_NI)
    assert (total.mean() - exact_II).abs().max() < 2e-6 * exact_II.abs().max()


@settings(deadline=None)
@given(st.sampled_from([4, 8]), st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**31))
def test_packed_codes_are_what_compressed_tensors_packs(num_bits: int, rows: int, columns: int, seed: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    generator = torch.Generator().manual_seed(seed)
    high = 2 ** (num_bits - 1)
    codes_OI = torch.randint(-high, high, (rows, columns), generator=generator, dtype=torch.int8)
    packed = pack_codes(codes_OI, num_bits)
    assert torch.equal(packed, pack_to_int32(codes_OI, num_bits))
    assert torch.equal(unpack_codes(packed, num_bits, columns), codes_OI)
    assert torch.equal(unpack_from_int32(packed, num_bits, codes_OI.shape), codes_OI)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_rounded_as_compressed_tensors_rounds_them(dtype: torch.dtype) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    hidden_BSI = correlated_inputs(60, 32).view(3, 20, 32).to(dtype)
    hidden_BSI[1, 4] = 0
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    scale, zero_point = compute_dynamic_scales_and_zp(hidden_BSI, args, torch.nn.Identity())
    expected = fake_quantize(hidden_BSI, scale, zero_point, args)
    assert torch.equal(fake_quantize_tokens(hidden_BSI, ActivationArgs(8)), expected)
