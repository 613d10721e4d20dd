"""Numbers of a few bits laid without gaps into 32-bit words, as GPTQ and compressed-tensors store codes.

Number k takes num_bits bits of the row from bit k * num_bits on, counted from the lowest bit of the first word; with 3,
5, 6 or 7 bits some numbers lie across two words.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _cycle(num_bits: int) -> tuple[int, int]:
    """The fewest numbers that fill whole words, and the words they fill: 8 and 1 for 4 bits, 32 and 3 for 3 bits."""
    common = math.gcd(num_bits, 32)
    return 32 // common, num_bits // common


def num_words(count: int, num_bits: int) -> int:
    return -(-count * num_bits // 32)


def pack_words(values_RN: Tensor, num_bits: int) -> Tensor:
    """Whole numbers 0 .. 2**num_bits - 1 → int32 (R, num_words(N)); unused bits of the last word are 0."""
    count = values_RN.shape[1]
    numbers, words = _cycle(num_bits)
    values_RN = torch.nn.functional.pad(values_RN.to(torch.int32), (0, -count % numbers))
    words_RW = values_RN.new_zeros(len(values_RN), values_RN.shape[1] // numbers * words)
    for position in range(numbers):
        word, bit = divmod(position * num_bits, 32)
        words_RW[:, word::words] |= values_RN[:, position::numbers] << bit
        if bit + num_bits > 32:
            words_RW[:, word + 1 :: words] |= values_RN[:, position::numbers] >> (32 - bit)
    return words_RW[:, : num_words(count, num_bits)].contiguous()


def unpack_words(words_RW: Tensor, num_bits: int, count: int) -> Tensor:
    """The inverse of ``pack_words``: int32 (R, count)."""
    numbers, words = _cycle(num_bits)
    words_RW = torch.nn.functional.pad(words_RW, (0, -words_RW.shape[1] % words))
    values_RN = words_RW.new_empty(len(words_RW), words_RW.shape[1] // words * numbers)
    for position in range(numbers):
        word, bit = divmod(position * num_bits, 32)
        low_bits = min(num_bits, 32 - bit)
        # The shift brings copies of the sign down; the mask drops them.
        part_RN = (words_RW[:, word::words] >> bit) & (2**low_bits - 1)
        if low_bits < num_bits:
            part_RN |= (words_RW[:, word + 1 :: words] & (2 ** (num_bits - low_bits) - 1)) << low_bits
        values_RN[:, position::numbers] = part_RN
    return values_RN[:, :count].contiguous()
