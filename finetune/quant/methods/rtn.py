"""Round to nearest: needs no data.

The scale of a group is its extreme over the lowest code; with a zero point, its range over that of the codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finetune.quant.block_types import BLOCK_TYPES
from finetune.quant.methods import METHODS, QuantizedWeight, QuantMethod
from finetune.quant.scales import extreme_scales, round_to_codes
from finetune.quant.scheme import WeightArgs
from finetune.quant.zero_points import extreme_scales_and_zero_points, shifted


def quantize_rtn(
    weight_OI: Tensor,
    hessian_II: Tensor | None,
    *,
    weights: WeightArgs,
    scale_dtype: torch.dtype,
    damp: float,
    act_order: bool,
) -> QuantizedWeight:
    """Codes nearest to float32 ``weight_OI``; the other arguments belong to methods that use data."""
    if weights.type != "int":
        return BLOCK_TYPES[weights.type].quantize(weight_OI)
    if weights.symmetric:
        scale_OG = extreme_scales(weight_OI, weights, scale_dtype)
        return QuantizedWeight(codes=round_to_codes(weight_OI, scale_OG, weights), scale=scale_OG)
    scale_OG, zero_point_OG = extreme_scales_and_zero_points(weight_OI, weights, scale_dtype)
    codes_OI = round_to_codes(shifted(weight_OI, scale_OG, zero_point_OG), scale_OG, weights)
    return QuantizedWeight(codes=codes_OI, scale=scale_OG, zero_point=zero_point_OG)


METHODS.register("rtn")(QuantMethod(needs_calibration=False, quantize=quantize_rtn))
