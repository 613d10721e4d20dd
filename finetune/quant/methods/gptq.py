"""GPTQ (Frantar et al., 2022, arXiv:2210.17323) from weights that make up for earlier rounding, then a little tuning.

Columns are rounded one by one, and later ones make up for the error. Weights that make up for what was rounded before
are ``finetune.quant.drift``, the tuning of scales and norms is ``finetune.quant.tuning``.

Columns go in the order of their input's energy (act-order); scales are fixed before the first column is rounded
(static groups), so the order leaves no trace in the file. Scales come from a clip search weighted by the Hessian's
diagonal. Afterwards each code is chosen again, given all others: cyclic coordinate descent on the same error, as in
CDQuant (Nair and Suggala, 2024, arXiv:2406.17542).
"""

from __future__ import annotations

import torch
from torch import Tensor

from finetune.quant.methods import METHODS, QuantizedWeight, QuantMethod
from finetune.quant.scales import nearest_codes_, searched_scales
from finetune.quant.scheme import WeightArgs
from finetune.quant.zero_points import searched_scales_and_zero_points, shifted

COLUMN_BLOCK, ROW_BLOCK = 32, 1000
"""Columns rounded before their error is passed on to all later ones in one matrix product, and rows done at once: a
step inside a block stays below SERIAL_ELEMENTS."""
DESCENT_PASSES = 2
"""Of coordinate descent over all columns; each costs what GPTQ itself does. On a 135M model at int4 in groups of 64,
calibrated on 32 x 512 tokens, two took the perplexity from 20.15 to 19.90 (18.0 unquantized)."""
CLIP_RATIOS = [1.15 - 0.025 * step for step in range(27)]
"""1.15 down to 0.5 of the unclipped scale; above 1 helps where the scale's sign is turned (8 / 7 = 1.143)."""


def quantize_gptq(
    weight_OI: Tensor,
    hessian_II: Tensor | None,
    *,
    weights: WeightArgs,
    scale_dtype: torch.dtype,
    damp: float,
    act_order: bool,
) -> QuantizedWeight:
    """Codes that keep the layer's outputs on the calibration inputs: least tr(E H Eᵀ), greedily.

    ``weight_OI`` and ``hessian_II`` (mean of x xᵀ over the calibration tokens) are float32. Layers that read the same
    input may be stacked along O and done at once: rows don't see each other.
    """
    assert hessian_II is not None
    assert torch.isfinite(hessian_II).all(), "the caller refuses inputs that aren't finite"
    energy_I = hessian_II.diagonal()
    importance_I = importance(hessian_II)
    zero_point_OG = None
    if weights.symmetric:
        scale_OG, clip = searched_scales(weight_OI, importance_I, weights, scale_dtype, CLIP_RATIOS)
    else:
        search = searched_scales_and_zero_points
        scale_OG, zero_point_OG, clip = search(weight_OI, importance_I, weights, scale_dtype, CLIP_RATIOS)
        weight_OI = shifted(weight_OI, scale_OG, zero_point_OG)
    order_I = (
        torch.argsort(energy_I, descending=True, stable=True)
        if act_order
        else torch.arange(len(energy_I), device=energy_I.device)
    )
    ordered_II = hessian_II[order_I][:, order_I]
    upper_II, damp_used = inverse_cholesky(ordered_II, damp=damp)
    column_scale_OI = scale_OG.float().repeat_interleave(weight_OI.shape[1] // scale_OG.shape[1], dim=1)
    damped_II = ordered_II.clone()
    damped_II.diagonal().add_(damp_used * energy_I.mean())
    codes_OI = torch.empty_like(weight_OI, dtype=torch.int8)
    for start in range(0, len(weight_OI), ROW_BLOCK):
        rows = slice(start, start + ROW_BLOCK)
        weight_IO = weight_OI[rows].T[order_I].contiguous()
        scale_IO = column_scale_OI[rows].T[order_I].contiguous()
        codes_IO = _round_columns(weight_IO, scale_IO, upper_II, weights)
        for _ in range(DESCENT_PASSES if energy_I.any() else 0):
            _descend(weight_IO, codes_IO, scale_IO, damped_II, weights)
        codes_OI[rows, order_I] = codes_IO.T.to(torch.int8)
    return QuantizedWeight(codes=codes_OI, scale=scale_OG, zero_point=zero_point_OG, damp=damp_used, clip=clip)


def importance(hessian_II: Tensor) -> Tensor:
    """importance_I of a weight's error: its input's energy."""
    energy_I = hessian_II.diagonal()
    # An input that is always zero says nothing about its weights: let a sliver of the mean keep them in the search.
    return energy_I + 1e-4 * energy_I.mean()


def inverse_cholesky(hessian_II: Tensor, *, damp: float) -> tuple[Tensor, float]:
    """Upper Cholesky factor of the inverse of the damped Hessian, and the damping it took.

    ``damp`` times the mean of the diagonal is added; where float32 still can't factor the matrix (an input that is a
    multiple of another, or fewer tokens than inputs) ten times as much is, up to 100 times the mean.
    """
    mean = hessian_II.diagonal().mean()
    identity_II = torch.eye(len(hessian_II), device=hessian_II.device)
    if mean == 0:
        return identity_II, damp
    while damp <= 100:
        damped_II = hessian_II.clone()
        damped_II.diagonal().add_(damp * mean)
        # With J the reversal of order and J H J = L Lᵀ, U = J L⁻¹ J is upper triangular and Uᵀ U = H⁻¹.
        lower_II, failed = torch.linalg.cholesky_ex(damped_II.flip(0, 1))
        if not failed:
            upper_II = torch.linalg.solve_triangular(lower_II, identity_II, upper=False).flip(0, 1)
            if torch.isfinite(upper_II).all():
                return upper_II, damp
        damp *= 10
    raise AssertionError("a positive semi-definite matrix with 100 times its mean added has a Cholesky factor")


def _round_columns(weight_IO: Tensor, scale_IO: Tensor, upper_II: Tensor, weights: WeightArgs) -> Tensor:
    """codes_IO, whole numbers in float32; inputs lie along the rows, so that one input's weights are contiguous."""
    rest_IO = weight_IO.clone()
    codes_IO = torch.empty_like(rest_IO)
    num_inputs = len(rest_IO)
    for start in range(0, num_inputs, COLUMN_BLOCK):
        end = min(start + COLUMN_BLOCK, num_inputs)
        error_BO = torch.empty_like(rest_IO[start:end])
        for index in range(start, end):
            weight_O, scale_O = rest_IO[index], scale_IO[index]
            code_O = nearest_codes_(weight_O / scale_O, weights)
            codes_IO[index] = code_O
            error_O = (weight_O - code_O * scale_O) / upper_II[index, index]
            error_BO[index - start] = error_O
            rest_IO[index + 1 : end].addr_(upper_II[index, index + 1 : end], error_O, alpha=-1)
        rest_IO[end:].addmm_(upper_II[start:end, end:].T, error_BO, alpha=-1)
    return codes_IO


def _descend(weight_IO: Tensor, codes_IO: Tensor, scale_IO: Tensor, hessian_II: Tensor, weights: WeightArgs) -> None:
    """Set each column of ``codes_IO`` in turn to its best codes while all others stay: the error never grows.

    ``slope_IO`` is H (W - Q), the error's downhill slope, kept up to date column by column inside a block and by one
    matrix product a block outside it. ``hessian_II`` is the damped one.
    """
    slope_IO = hessian_II @ (weight_IO - codes_IO * scale_IO)
    per_code_IO = 1 / (hessian_II.diagonal()[:, None] * scale_IO)
    num_inputs = len(weight_IO)
    for start in range(0, num_inputs, COLUMN_BLOCK):
        end = min(start + COLUMN_BLOCK, num_inputs)
        change_BO = torch.empty_like(slope_IO[start:end])
        for index in range(start, end):
            before_O, change_O = codes_IO[index], change_BO[index - start]
            code_O = nearest_codes_(torch.addcmul(before_O, slope_IO[index], per_code_IO[index]), weights)
            torch.sub(code_O, before_O, out=change_O)
            change_O.mul_(scale_IO[index])
            before_O.copy_(code_O)
            slope_IO[start:end].addr_(hessian_II[start:end, index], change_O, alpha=-1)
        slope_IO[:start].addmm_(hessian_II[:start, start:end], change_BO, alpha=-1)
        slope_IO[end:].addmm_(hessian_II[end:, start:end], change_BO, alpha=-1)


METHODS.register("gptq")(QuantMethod(needs_calibration=True, quantize=quantize_gptq, makes_up_for_drift=True))
