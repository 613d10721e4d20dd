"""AWQ (Lin et al., 2023, arXiv:2306.00978): scale up the weights of inputs that matter, then round to nearest.

Factors are searched for each shared input and folded into what makes it (``finetune.quant.smoothing``); scales are
clipped where that lowers the error, weighted by the inputs' energy. Costs a forward a block beside calibration's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finetune.quant.methods import METHODS, QuantizedWeight, QuantMethod
from finetune.quant.methods.gptq import CLIP_RATIOS, importance
from finetune.quant.scales import round_to_codes, searched_scales
from finetune.quant.scheme import WeightArgs
from finetune.quant.zero_points import searched_scales_and_zero_points, shifted


def quantize_awq(
    weight_OI: Tensor,
    hessian_II: Tensor | None,
    *,
    weights: WeightArgs,
    scale_dtype: torch.dtype,
    damp: float,
    act_order: bool,
) -> QuantizedWeight:
    """Codes nearest to float32 ``weight_OI`` under clipped scales; of ``hessian_II`` the diagonal counts."""
    assert hessian_II is not None
    importance_I = importance(hessian_II)
    zero_point_OG = None
    if weights.symmetric:
        scale_OG, clip = searched_scales(weight_OI, importance_I, weights, scale_dtype, CLIP_RATIOS)
    else:
        search = searched_scales_and_zero_points
        scale_OG, zero_point_OG, clip = search(weight_OI, importance_I, weights, scale_dtype, CLIP_RATIOS)
    codes_OI = round_to_codes(shifted(weight_OI, scale_OG, zero_point_OG), scale_OG, weights)
    return QuantizedWeight(codes=codes_OI, scale=scale_OG, zero_point=zero_point_OG, clip=clip)


METHODS.register("awq")(QuantMethod(needs_calibration=True, quantize=quantize_awq, scales_inputs=True))
