"""llama.cpp's Q4_K: 4-bit codes with a scale and a minimum for each 32 weights, themselves stored in 6 bits.

    weight = code * (d * s) - dmin * m        code 0..15; s and m 0..63, one for each of the 8 groups of a superblock of
                                              256 weights, which has its d and dmin in float16

4.5 bits a weight, and no smaller error at that size is known among llama.cpp's types that need no calibration. The
search follows the idea of llama.cpp's own: try several ranges, solve each for the best scale and minimum by weighted
least squares, keep the best. Shapes: O out, I in features, S superblocks of a row, G = 8 groups, K = 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finetune.quant.methods import QuantizedWeight

SUPERBLOCK = 256
GROUPS = 8
_CODE_MAX = 15
_SCALE_MAX = 63
_WIDTHS = [_CODE_MAX + step / 10 for step in range(-10, 11)]
"""By how many codes a group's range is divided in each attempt; more than 15 clips its ends."""
_CHUNK_ELEMENTS = 2**20


def quantize_q4_k(weight_OI: Tensor) -> QuantizedWeight:
    """Codes int8 (O, I) 0..15 and ``scale`` float32 (O, S, 18): d, dmin, the 8 s, the 8 m, each as it is stored.

    In-features must be a multiple of 256.
    """
    rows = max(1, _CHUNK_ELEMENTS // weight_OI.shape[1])
    parts = [_quantize_rows(part_OI) for part_OI in weight_OI.split(rows)]
    return QuantizedWeight(
        codes=torch.cat([codes_OI for codes_OI, _ in parts]),
        scale=torch.cat([scale_OSF for _, scale_OSF in parts]),
        type="q4_k",
    )


def q4_k_values(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    scale_OSG, minimum_OSG = expanded_scales(weight.scale)
    codes_OSGK = weight.codes.float().unflatten(1, (*scale_OSG.shape[1:], -1))
    return (codes_OSGK * scale_OSG.unsqueeze(-1) - minimum_OSG.unsqueeze(-1)).flatten(1).to(dtype)


def expanded_scales(scale_OSF: Tensor) -> tuple[Tensor, Tensor]:
    """float32 (O, S, 8) each: every group's scale d * s and its minimum dmin * m; both products are exact."""
    d_OS1, dmin_OS1, scales_OSG, minimums_OSG = scale_OSF.split([1, 1, GROUPS, GROUPS], dim=-1)
    return d_OS1 * scales_OSG, dmin_OS1 * minimums_OSG


def _quantize_rows(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    weight_OSGK = weight_OI.float().unflatten(1, (-1, GROUPS, SUPERBLOCK // GROUPS))
    scale_OSG, minimum_OSG = _searched(weight_OSGK)
    d_OS1, scales_OSG = _in_six_bits(scale_OSG)
    dmin_OS1, minimums_OSG = _in_six_bits(minimum_OSG)
    scale_OSF = torch.cat([d_OS1, dmin_OS1, scales_OSG, minimums_OSG], dim=-1)
    scale_OSG, minimum_OSG = expanded_scales(scale_OSF)
    codes_OSGK = _codes(weight_OSGK, scale_OSG, minimum_OSG)
    return codes_OSGK.to(torch.int8).flatten(1), scale_OSF


def _codes(weight_OSGK: Tensor, scale_OSG: Tensor, minimum_OSG: Tensor) -> Tensor:
    inverse_OSG = torch.where(scale_OSG > 0, 1 / scale_OSG, 0.0)
    shifted_OSGK = weight_OSGK + minimum_OSG.unsqueeze(-1)
    return (shifted_OSGK * inverse_OSG.unsqueeze(-1)).round_().clamp_(0, _CODE_MAX)


def _searched(weight_OSGK: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and minimum (both >= 0) of each group with the least error, large weights counting more."""
    importance_OSGK = weight_OSGK.square().mean(-1, keepdim=True).sqrt() + weight_OSGK.abs()
    total_OSG = importance_OSGK.sum(-1)
    low_OSG = weight_OSGK.amin(-1).clamp_max(0)
    range_OSG = weight_OSGK.amax(-1) - low_OSG
    sum_x_OSG = (importance_OSGK * weight_OSGK).sum(-1)
    best_scale_OSG, best_minimum_OSG = torch.zeros_like(low_OSG), torch.zeros_like(low_OSG)
    best_error_OSG = torch.full_like(low_OSG, torch.inf)
    for width in _WIDTHS:
        codes_OSGK = _codes(weight_OSGK, range_OSG / width, -low_OSG)
        weighted_OSGK = importance_OSGK * codes_OSGK
        sum_q_OSG = weighted_OSGK.sum(-1)
        sum_qq_OSG = (weighted_OSGK * codes_OSGK).sum(-1)
        sum_qx_OSG = (weighted_OSGK * weight_OSGK).sum(-1)
        determinant_OSG = total_OSG * sum_qq_OSG - sum_q_OSG.square()
        solvable_OSG = determinant_OSG > 0
        scale_OSG = (total_OSG * sum_qx_OSG - sum_q_OSG * sum_x_OSG) / determinant_OSG
        minimum_OSG = (sum_q_OSG * sum_qx_OSG - sum_qq_OSG * sum_x_OSG) / determinant_OSG
        # A minimum is stored without a sign: where the best one is negative, none is best.
        without_OSG = ~solvable_OSG | (minimum_OSG < 0)
        scale_OSG = torch.where(without_OSG, sum_qx_OSG / sum_qq_OSG.clamp_min(1e-30), scale_OSG).clamp_min(0)
        minimum_OSG = torch.where(without_OSG, 0.0, minimum_OSG)
        error_OSGK = codes_OSGK * scale_OSG.unsqueeze(-1) - minimum_OSG.unsqueeze(-1) - weight_OSGK
        error_OSG = (importance_OSGK * error_OSGK.square()).sum(-1)
        better_OSG = error_OSG < best_error_OSG
        best_error_OSG = torch.where(better_OSG, error_OSG, best_error_OSG)
        best_scale_OSG = torch.where(better_OSG, scale_OSG, best_scale_OSG)
        best_minimum_OSG = torch.where(better_OSG, minimum_OSG, best_minimum_OSG)
    return best_scale_OSG, best_minimum_OSG


def _in_six_bits(values_OSG: Tensor) -> tuple[Tensor, Tensor]:
    """(unit (O, S, 1) as float16 stores it, whole numbers 0..63 (O, S, 8)), whose products are near ``values_OSG``."""
    unit_OS1 = (values_OSG.amax(-1, keepdim=True) / _SCALE_MAX).to(torch.float16).float()
    inverse_OS1 = torch.where(unit_OS1 > 0, 1 / unit_OS1, 0.0)
    return unit_OS1, (values_OSG * inverse_OS1).round_().clamp_(0, _SCALE_MAX)
