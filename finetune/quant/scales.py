"""Scales, codes and back: the arithmetic of every method. Shapes: O out, I in features, G groups, K = I / G."""

from __future__ import annotations

import torch
from torch import Tensor

from finetune.quant.block_types import BLOCK_TYPES
from finetune.quant.methods import QuantizedWeight
from finetune.quant.scheme import WeightArgs

SERIAL_ELEMENTS = 2**15 - 1
"""torch works on so few numbers with one thread. Loops of thousands of small steps stay below it: threads that meet
after every step made a block take 50 s instead of 3 on two cores that others used as well."""
COARSE = 2
"""Steps between the ratios that are tried first. All of 27 ratios take 1.7 times as long for 0.06% less of the weighted
error; 4 steps save another third, for 0.3% more of it (and 4% more KL on a 135M model at int4 in groups of 64)."""
_ROUNDER = 1.5 * 2**23
"""Where float32 holds whole numbers only: to add and subtract it rounds (half to even). torch.round would do the same,
but starts threads from 2,048 numbers on: 2 ms a call on busy cores instead of 0.01."""


def grouped(weight_OI: Tensor, weights: WeightArgs) -> Tensor:
    """(O, I) → (O, G, K)."""
    return weight_OI.unflatten(1, (weights.num_groups(weight_OI.shape[1]), -1))


def dequantize(codes_OI: Tensor, scale_OG: Tensor, zero_point_OG: Tensor | None = None) -> Tensor:
    """The weight in the scale's dtype, by the operations (and so the rounding) of compressed-tensors."""
    codes_OGK = codes_OI.unflatten(1, (scale_OG.shape[1], -1)).to(scale_OG.dtype)
    if zero_point_OG is not None:
        codes_OGK = codes_OGK - zero_point_OG.unsqueeze(-1).to(scale_OG.dtype)
    return (codes_OGK * scale_OG.unsqueeze(-1)).flatten(1)


def weight_values(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """weight_OI in ``dtype``, as a plain load in ``dtype`` computes it from the stored form."""
    if weight.type != "int":
        return BLOCK_TYPES[weight.type].values(weight, dtype)
    if weight.zero_point is not None:  # loaders dequantize these before they cast, so they round to the scale's dtype
        return dequantize(weight.codes, weight.scale, weight.zero_point).to(dtype)
    return dequantize(weight.codes, weight.scale.to(dtype))


def nearest_codes_(scaled: Tensor, weights: WeightArgs) -> Tensor:
    """Round float32 weights, already divided by their scales, to codes (whole numbers in float32), in place."""
    return scaled.clamp_(weights.code_min, weights.code_max).add_(_ROUNDER).sub_(_ROUNDER)


def round_to_codes(weight_OI: Tensor, scale_OG: Tensor, weights: WeightArgs) -> Tensor:
    """int8 codes nearest to float32 ``weight_OI`` under fixed scales."""
    scaled_OGK = grouped(weight_OI, weights) / scale_OG.float().unsqueeze(-1)
    return nearest_codes_(scaled_OGK, weights).to(torch.int8).flatten(1)


def extreme_scales(weight_OI: Tensor, weights: WeightArgs, scale_dtype: torch.dtype) -> Tensor:
    """scale_OG: the extreme of each group divided by the lowest code, so that the full range of codes is in use.

    A scale is negative where the extreme is positive: int4 has a code -8 but no +8, and the largest weight takes it.
    A group of zeros gets the scale 1.
    """
    weight_OGK = grouped(weight_OI, weights)
    high_OG, low_OG = weight_OGK.amax(-1), weight_OGK.amin(-1)
    extreme_OG = torch.where(high_OG > -low_OG, high_OG, low_OG)
    return stored_scales(extreme_OG / weights.code_min, scale_dtype)


def searched_scales(
    weight_OI: Tensor, importance_I: Tensor, weights: WeightArgs, scale_dtype: torch.dtype, ratios: list[float]
) -> tuple[Tensor, dict[str, float]]:
    """scale_OG of least rounding error, each weight's squared error weighted by its input's ``importance_I`` (>= 0).

    Tried for each group: both signs of the scale times one in COARSE of ``ratios`` (which go down evenly) of its
    unclipped size, then the ratios around the best. Scales are rounded to ``scale_dtype`` before their error is
    measured, so the winner is the best of what was tried that can be stored.
    """
    importance_GK = importance_I.float().unflatten(0, (weights.num_groups(weight_OI.shape[1]), -1))
    importance_GK = importance_GK / importance_GK.mean(-1, keepdim=True).clamp_min(1e-30)
    ratio_R = torch.tensor(ratios, device=weight_OI.device)
    num_rows = SERIAL_ELEMENTS // weight_OI.shape[1] if weight_OI.device.type == "cpu" else len(weight_OI)
    parts = [
        _searched(grouped(rows_OI, weights), importance_GK, ratio_R, weights, scale_dtype)
        for rows_OI in weight_OI.split(max(1, num_rows))
    ]
    scale_OG = torch.cat(parts)
    ratio_OG = (scale_OG / extreme_scales(weight_OI, weights, torch.float32)).abs()
    clip = {"mean_ratio": ratio_OG.mean().item(), "clipped_fraction": (ratio_OG < 0.995).float().mean().item()}
    return scale_OG.to(scale_dtype), clip


def _searched(
    weight_OGK: Tensor, importance_GK: Tensor, ratio_R: Tensor, weights: WeightArgs, scale_dtype: torch.dtype
) -> Tensor:
    full_OG = extreme_scales(weight_OGK.flatten(1), weights, torch.float32)
    best_error_OG = torch.full_like(full_OG, torch.inf)
    best_scale_OG = torch.empty_like(full_OG)
    best_index_OG = torch.zeros_like(full_OG, dtype=torch.int64)

    def attempt(signed_OG: Tensor, index_OG: Tensor) -> None:
        nonlocal best_error_OG, best_scale_OG, best_index_OG
        scale_OG = stored_scales(signed_OG * ratio_R[index_OG], scale_dtype).float()
        scale_OG1 = scale_OG.unsqueeze(-1)
        error_OGK = nearest_codes_(weight_OGK / scale_OG1, weights)
        error_OGK.mul_(scale_OG1).sub_(weight_OGK).square_().mul_(importance_GK)
        error_OG = error_OGK.sum(-1)
        better_OG = error_OG < best_error_OG
        best_error_OG = torch.where(better_OG, error_OG, best_error_OG)
        best_scale_OG = torch.where(better_OG, scale_OG, best_scale_OG)
        best_index_OG = torch.where(better_OG, index_OG, best_index_OG)

    for signed_OG in (full_OG, -full_OG):
        for index in range(0, len(ratio_R), COARSE):
            attempt(signed_OG, torch.full_like(best_index_OG, index))
    signed_OG = torch.where(best_scale_OG * full_OG < 0, -full_OG, full_OG)
    step = COARSE // 2
    while step:
        middle_OG = best_index_OG
        for index_OG in (middle_OG - step, middle_OG + step):
            attempt(signed_OG, index_OG.clamp(0, len(ratio_R) - 1))
        step //= 2
    return best_scale_OG


def stored_scales(scale_OG: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Rounded to the stored dtype; 1 where that would be 0 (a group of zeros, or of weights too small for it)."""
    stored_OG = scale_OG.to(scale_dtype)
    return torch.where(stored_OG == 0, torch.ones_like(stored_OG), stored_OG)


def relative_error(weight_OI: Tensor, quantized_OI: Tensor, hessian_II: Tensor | None) -> float:
    """Mean squared error of the layer's output over its mean square: tr(E H Eᵀ) / tr(W H Wᵀ); H = identity if None."""
    error_OI = weight_OI - quantized_OI.float()

    def energy(matrix_OI: Tensor) -> float:
        through_OI = matrix_OI if hessian_II is None else matrix_OI @ hessian_II
        return (through_OI * matrix_OI).sum().item()

    whole = energy(weight_OI)
    return energy(error_OI) / whole if whole > 0 else 0.0
