"""bitsandbytes' own number formats, by its own functions, so that what is stored equals what it would store itself.

nf4 and fp4: Dettmers et al., 2023 (arXiv:2305.14314). LLM.int8: Dettmers et al., 2022 (arXiv:2208.07339).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from finetune.model.bitsandbytes import bitsandbytes_package
from finetune.quant.methods import QuantizedWeight

BLOCK_SIZE = 64
"""Weights that share a scale in the 4-bit types: bitsandbytes' default, and transformers' only choice."""


def quantize_nf4(weight_OI: Tensor) -> QuantizedWeight:
    return _quantize_4bit(weight_OI, "nf4")


def quantize_fp4(weight_OI: Tensor) -> QuantizedWeight:
    return _quantize_4bit(weight_OI, "fp4")


def _quantize_4bit(weight_OI: Tensor, kind: Literal["nf4", "fp4"]) -> QuantizedWeight:
    functional = bitsandbytes_package().functional
    packed, state = functional.quantize_4bit(weight_OI.contiguous(), blocksize=BLOCK_SIZE, quant_type=kind)
    scale_OG = state.absmax.view(len(weight_OI), -1)
    return QuantizedWeight(unpack_nibbles(packed, weight_OI.shape), scale_OG, type=kind)


def pack_nibbles(codes_OI: Tensor) -> Tensor:
    """Codes 0..15 → uint8 (O * I / 2, 1), the first of each two in the high bits."""
    flat = codes_OI.to(torch.uint8).flatten()
    return (flat[::2] << 4 | flat[1::2]).unsqueeze(1)


def unpack_nibbles(packed: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of ``pack_nibbles``: int8 (O, I)."""
    return torch.stack([packed >> 4, packed & 15], dim=-1).to(torch.int8).view(shape)


def table_of(kind: str) -> Tensor:
    """float32 (16,): what each code of nf4 or fp4 stands for."""
    table: Tensor = bitsandbytes_package().functional.get_4bit_type(kind, device="cpu")
    return table


def table_values(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    values_OGK = table_of(weight.type).to(weight.codes.device)[weight.codes.long()].view(*weight.scale.shape, -1)
    return (values_OGK * weight.scale.unsqueeze(-1)).to(dtype).flatten(1)


def quantize_llm_int8(weight_OI: Tensor) -> QuantizedWeight:
    # bitsandbytes rounds to float16 first.
    codes_OI, scale_O, _ = bitsandbytes_package().functional.int8_vectorwise_quant(weight_OI.to(torch.float16))
    return QuantizedWeight(codes_OI, scale_O.unsqueeze(1), type="llm_int8")


def llm_int8_values(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    # The last factor is how bitsandbytes writes 1 / 127.
    return (weight.codes * weight.scale * 7.874015718698502e-3).to(dtype)
