"""Time one layer's attention over packed rows: by document against sdpa with a mask, forward and backward.

python bench/attention.py
"""

from __future__ import annotations

import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from finetune.model.attention import attention_mask
from finetune.model.documents import DocumentLayout, document_attention

CASES = {
    "4 rows of 512, 17 documents, 9 heads of 64": (
        9,
        3,
        512,
        [[300, 200], [60, 90, 100, 70, 120, 60], [80, 60, 70, 90, 60, 80, 60], [250, 240]],
    ),
    "8 rows of 256, 32 documents, 4 heads of 64": (4, 2, 256, [[50, 70, 60, 64]] * 8),
}


def main() -> None:
    torch.set_num_threads(1)
    for name, (num_heads, num_kv_heads, length, rows) in CASES.items():
        ids = torch.full((len(rows), length), -1, dtype=torch.int32)
        for row, lengths in enumerate(rows):
            numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            ids[row, : len(numbers)] = numbers.int()
        query, key, value = (
            torch.randn(len(rows), length, heads, 64, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        mask = attention_mask(ids, dtype=torch.bfloat16, implementation="sdpa")
        layout = DocumentLayout(ids)
        shared = num_heads // num_kv_heads

        def masked(q=query, k=key, v=value, mask=mask, shared=shared):  # type: ignore[no-untyped-def]
            # As transformers calls it: with a mask, key and value heads are repeated.
            repeated = (k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1))
            return scaled_dot_product_attention(q, *repeated, attn_mask=mask)

        def by_document(q=query, k=key, v=value, layout=layout):  # type: ignore[no-untyped-def]
            return document_attention(q, k, v, layout=layout, scaling=0.125)

        for way, attend in (("masked sdpa", masked), ("by document", by_document)):
            best = float("inf")
            for _ in range(8):
                start = time.perf_counter()
                attend().float().square().sum().backward()
                best = min(best, time.perf_counter() - start)
            print(f"{name}: {way} {best * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
