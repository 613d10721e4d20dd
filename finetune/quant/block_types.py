"""Weights that are more than whole numbers times a scale: what their codes mean, and how they are found.

nf4, fp4    bitsandbytes: weight = table[code] * scale; scale (O, G) float32 is the largest weight of a block of 64
llm_int8    bitsandbytes: weight = code * scale / 127; scale (O, 1) float32 is the largest weight of a row
q4_k        llama.cpp: weight = code * (d * s) - dmin * m, see ``finetune.quant.q4_k``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from finetune.quant import bitsandbytes_types, q4_k
from finetune.quant.methods import QuantizedWeight


@dataclass(frozen=True)
class BlockType:
    quantize: Callable[[Tensor], QuantizedWeight]
    """``quantize(weight_OI)`` of float32 weights: nearest codes under scales of the type's own rule."""
    values: Callable[[QuantizedWeight, torch.dtype], Tensor]
    """``values(weight, dtype)``: weight_OI as a load in ``dtype`` computes it."""


BLOCK_TYPES = {
    "nf4": BlockType(bitsandbytes_types.quantize_nf4, bitsandbytes_types.table_values),
    "fp4": BlockType(bitsandbytes_types.quantize_fp4, bitsandbytes_types.table_values),
    "llm_int8": BlockType(bitsandbytes_types.quantize_llm_int8, bitsandbytes_types.llm_int8_values),
    "q4_k": BlockType(q4_k.quantize_q4_k, q4_k.q4_k_values),
}
