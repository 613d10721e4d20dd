"""Scales with zero points, for asymmetric weights. Shapes: O out, I in features, G groups, K = I / G.

A group's codes cover [-z * scale, (L - z) * scale] with L = 2**num_bits - 1 and z = zero_point - code_min. z is 1 at
least, since the common form of the GPTQ format stores z - 1: a group without a negative weight loses one code of L.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finetune.quant.scales import (
    SERIAL_ELEMENTS,
    dequantize,
    extreme_scales,
    grouped,
    nearest_codes_,
    round_to_codes,
    stored_scales,
)
from finetune.quant.scheme import WeightArgs

ZERO_STEPS = (0, -1, 1)
"""Zero points tried beside the one that keeps a group's ends in proportion, in codes."""


def shifted(weight_OI: Tensor, scale_OG: Tensor, zero_point_OG: Tensor | None) -> Tensor:
    """weight + zero_point * scale, in float32: it has the codes of ``weight_OI``, without a zero point.

    Differences stay what they were, so any method for symmetric weights (GPTQ's updates, coordinate descent) works on
    it as it is: weight - (code - zero_point) * scale = shifted - code * scale.
    """
    if zero_point_OG is None:
        return weight_OI
    weight_OGK = weight_OI.unflatten(1, (scale_OG.shape[1], -1))
    return (weight_OGK + (zero_point_OG.float() * scale_OG.float()).unsqueeze(-1)).flatten(1)


def extreme_scales_and_zero_points(
    weight_OI: Tensor, weights: WeightArgs, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(scale_OG, zero_point_OG int8): both ends of each group, and 0, within its codes. A group of zeros gets scale 1.

    Nothing is cut off but by the rounding of scale and zero point, half a step at most.
    """
    scale_OG, zero_OG = _unclipped(grouped(weight_OI, weights), weights)
    return stored_scales(scale_OG, scale_dtype), (zero_OG + weights.code_min).to(torch.int8)


def rounded_to_nearest(weight_OI: Tensor, weights: WeightArgs) -> Tensor:
    """weight_OI as rounding to nearest under unclipped float32 scales leaves it, in float32."""
    if weights.symmetric:
        scale_OG, zero_point_OG = extreme_scales(weight_OI, weights, torch.float32), None
    else:
        scale_OG, zero_point_OG = extreme_scales_and_zero_points(weight_OI, weights, torch.float32)
    codes_OI = round_to_codes(shifted(weight_OI, scale_OG, zero_point_OG), scale_OG, weights)
    return dequantize(codes_OI, scale_OG, zero_point_OG)


def searched_scales_and_zero_points(
    weight_OI: Tensor, importance_I: Tensor, weights: WeightArgs, scale_dtype: torch.dtype, ratios: list[float]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(scale_OG, zero_point_OG int8, clip) of least rounding error, weighted as in ``scales.searched_scales``.

    Tried for each group: ``ratios`` of its unclipped scale, times ZERO_STEPS.
    """
    importance_GK = importance_I.float().unflatten(0, (weights.num_groups(weight_OI.shape[1]), -1))
    importance_GK = importance_GK / importance_GK.mean(-1, keepdim=True).clamp_min(1e-30)
    num_codes = weights.code_max - weights.code_min
    scales, zeros, found_ratios = [], [], []
    num_rows = SERIAL_ELEMENTS // weight_OI.shape[1] if weight_OI.device.type == "cpu" else len(weight_OI)
    for rows_OI in weight_OI.split(max(1, num_rows)):
        weight_OGK = grouped(rows_OI, weights)
        full_OG, middle_OG = _unclipped(weight_OGK, weights)
        best_error_OG = torch.full_like(full_OG, torch.inf)
        best_scale_OG, best_zero_OG = torch.ones_like(full_OG), torch.ones_like(full_OG)
        for ratio in ratios:
            scale_OG = stored_scales(full_OG * ratio, scale_dtype).float()
            scale_OG1 = scale_OG.unsqueeze(-1)
            for step in ZERO_STEPS:
                zero_OG = (middle_OG + step).clamp_(1, num_codes)
                zero_OG1 = (zero_OG + weights.code_min).unsqueeze(-1)
                error_OGK = nearest_codes_((weight_OGK / scale_OG1).add_(zero_OG1), weights)
                error_OGK.sub_(zero_OG1).mul_(scale_OG1).sub_(weight_OGK).square_().mul_(importance_GK)
                error_OG = error_OGK.sum(-1)
                better_OG = error_OG < best_error_OG
                best_error_OG = torch.where(better_OG, error_OG, best_error_OG)
                best_scale_OG = torch.where(better_OG, scale_OG, best_scale_OG)
                best_zero_OG = torch.where(better_OG, zero_OG, best_zero_OG)
        scales.append(best_scale_OG)
        zeros.append(best_zero_OG)
        found_ratios.append(best_scale_OG / stored_scales(full_OG, torch.float32))
    ratio_OG = torch.cat(found_ratios)
    clip = {"mean_ratio": ratio_OG.mean().item(), "clipped_fraction": (ratio_OG < 0.995).float().mean().item()}
    return torch.cat(scales).to(scale_dtype), (torch.cat(zeros) + weights.code_min).to(torch.int8), clip


def _unclipped(weight_OGK: Tensor, weights: WeightArgs) -> tuple[Tensor, Tensor]:
    """float32 (scale_OG, z_OG), z a whole number of 1 .. L."""
    high_OG, low_OG = weight_OGK.amax(-1).clamp_min(0), weight_OGK.amin(-1).clamp_max(0)
    num_codes = weights.code_max - weights.code_min
    scale_OG = torch.maximum((high_OG - low_OG) / num_codes, high_OG / (num_codes - 1))
    zero_OG = (-low_OG / torch.where(scale_OG == 0, 1.0, scale_OG)).round_().clamp_(1, num_codes)
    return scale_OG, zero_OG
