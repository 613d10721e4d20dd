"""The bytes of llama.cpp's block types Q4_0, Q8_0 and Q4_K (ggml-quants.c describes them).

    Q4_0   32 weights: d float16, 16 bytes of codes + 8          weight = d * code, code -8..7
    Q8_0   32 weights: d float16, 32 codes int8                  weight = d * code
    Q4_K   256 weights: d, dmin float16, 12 bytes of 6-bit scales and minimums, 128 bytes of codes, see ``quant.q4_k``

A nibble's low half belongs to the first half of a block (Q4_0: of 32 weights, Q4_K: of every 64). Shapes: O out, I in
features, N blocks of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finetune.quant.methods import QuantizedWeight
from finetune.quant.q4_k import GROUPS, SUPERBLOCK
from finetune.quant.scheme import QuantScheme

BLOCK_SIZE = 32


def type_name(scheme: QuantScheme) -> str | None:
    """The block type that holds ``scheme`` exactly; None where none does."""
    weights = scheme.weights
    if scheme.activations is not None:
        return None
    if weights.type == "q4_k":
        return "Q4_K"
    if weights.type != "int" or not weights.symmetric or weights.group_size != BLOCK_SIZE:
        return None
    return {4: "Q4_0", 8: "Q8_0"}.get(weights.num_bits)


def to_blocks(weight: QuantizedWeight, name: str) -> Tensor:
    """uint8 (O, bytes of a row)."""
    if name == "Q4_K":
        return _to_q4_k(weight)
    d_ON2 = _bytes_of(weight.scale)
    codes_ONK = weight.codes.unflatten(1, (-1, BLOCK_SIZE))
    if name == "Q8_0":
        return torch.cat([d_ON2, codes_ONK.view(torch.uint8)], dim=-1).flatten(1)
    nibbles_ONK = (codes_ONK + 8).to(torch.uint8)
    low, high = nibbles_ONK.split(BLOCK_SIZE // 2, dim=-1)
    return torch.cat([d_ON2, low | high << 4], dim=-1).flatten(1)


def from_blocks(blocks_OB: Tensor, name: str) -> QuantizedWeight:
    """The inverse of ``to_blocks``."""
    if name == "Q4_K":
        return _from_q4_k(blocks_OB)
    num_bytes = BLOCK_SIZE + 2 if name == "Q8_0" else BLOCK_SIZE // 2 + 2
    blocks_ONB = blocks_OB.unflatten(1, (-1, num_bytes))
    d_ON, stored = _halves(blocks_ONB[..., :2]), blocks_ONB[..., 2:].contiguous()
    if name == "Q8_0":
        return QuantizedWeight(stored.view(torch.int8).flatten(1), d_ON)
    nibbles_ONK = torch.cat([stored & 15, stored >> 4], dim=-1)
    return QuantizedWeight(nibbles_ONK.to(torch.int8).sub_(8).flatten(1), d_ON)


def _to_q4_k(weight: QuantizedWeight) -> Tensor:
    d_ON, dmin_ON = weight.scale[..., 0], weight.scale[..., 1]
    scales, minimums = weight.scale[..., 2:].to(torch.uint8).split(GROUPS, dim=-1)
    half = GROUPS // 2
    packed_ONB = torch.cat(
        [
            scales[..., :half] | scales[..., half:] >> 4 << 6,
            minimums[..., :half] | minimums[..., half:] >> 4 << 6,
            scales[..., half:] & 15 | (minimums[..., half:] & 15) << 4,
        ],
        dim=-1,
    )
    pairs = weight.codes.to(torch.uint8).unflatten(1, (-1, GROUPS // 2, 2, SUPERBLOCK // GROUPS))
    codes_ONB = (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(2)
    return torch.cat([_bytes_of(d_ON), _bytes_of(dmin_ON), packed_ONB, codes_ONB], dim=-1).flatten(1)


def _from_q4_k(blocks_OB: Tensor) -> QuantizedWeight:
    blocks_ONB = blocks_OB.unflatten(1, (-1, 144))
    d_ON1, dmin_ON1 = (_halves(part).float().unsqueeze(-1) for part in (blocks_ONB[..., :2], blocks_ONB[..., 2:4]))
    first, second, third = blocks_ONB[..., 4:16].split(GROUPS // 2, dim=-1)
    scales_ONG = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1).float()
    minimums_ONG = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1).float()
    stored = blocks_ONB[..., 16:].unflatten(-1, (GROUPS // 2, -1))
    codes_OI = torch.stack([stored & 15, stored >> 4], dim=-2).to(torch.int8).flatten(1)
    return QuantizedWeight(codes_OI, torch.cat([d_ON1, dmin_ON1, scales_ONG, minimums_ONG], dim=-1), type="q4_k")


def _bytes_of(values_ON: Tensor) -> Tensor:
    """uint8 (O, N, 2): float16 values as their two bytes."""
    return values_ON.to(torch.float16).unsqueeze(-1).contiguous().view(torch.uint8)


def _halves(bytes_ON2: Tensor) -> Tensor:
    return bytes_ON2.contiguous().view(torch.float16).squeeze(-1)
