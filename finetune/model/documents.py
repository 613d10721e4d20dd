"""Attention within each document of packed rows, without ever forming what lies between documents.

With a mask, attention costs the square of a row's length however short its documents are, and torch's kernels for the
cpu gain nothing from a mask or from causality. Here the documents of a batch are taken out of their rows, grouped by
length, and each group is attended by plain matrix products, which run on the cpu's matrix units in bfloat16. Forward
and backward of a layer on one core, 4 rows of 512 with 17 documents, 9 heads of 64: 32 ms against sdpa's 73;
8 rows of 256 with 32 documents, 4 heads: 11 ms against 24. (python bench/attention.py)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from finetune.model.matmul import bmm

NAME = "finetune_documents"
"""What ``config._attn_implementation`` holds for a model that attends by ``document_attention_forward``."""
MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "smollm3"})
"""Models that hand their attention function what ``forward`` is given beside its own arguments."""
LENGTH_MULTIPLE = 64
"""Documents whose lengths round up to the same multiple share their matrix products."""


def can_attend_by_document(config: PreTrainedConfig, *, device: str, max_seq_length: int) -> bool:
    """Whether a model may use ``NAME``: on the cpu, without attention dropout, up to 1,024 tokens.

    Above that the scores of one layer outgrow the cache, and flash attention's kernel is the better one.
    """
    dropout = getattr(config.get_text_config(), "attention_dropout", 0.0)
    return device == "cpu" and config.model_type in MODEL_TYPES and not dropout and max_seq_length <= 1024


class DocumentLayout:
    """Where the documents of a batch (B, S) lie; padding belongs to none."""

    def __init__(self, document_ids_BS: Tensor) -> None:
        num_rows, num_positions = document_ids_BS.shape
        self.num_tokens = num_rows * num_positions
        spans: dict[int, list[tuple[int, int]]] = {}
        for row, ids in enumerate(document_ids_BS.tolist()):
            start = 0
            for position in range(1, num_positions + 1):
                if position == num_positions or ids[position] != ids[start]:
                    if ids[start] >= 0:
                        length = position - start
                        padded = -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
                        spans.setdefault(padded, []).append((row * num_positions + start, length))
                    start = position
        self.groups = [_Group(padded, found) for padded, found in sorted(spans.items())]


def rounded_count(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, …: two sizes an octave.

    oneDNN compiles a kernel for each new shape (milliseconds) and keeps it (half a megabyte): batches whose counts
    of documents are all different would compile at every step.
    """
    power = 1
    while power < count:
        power *= 2
    return 3 * power // 4 if 3 * power // 4 >= count and power >= 4 else power


class _Group:
    """N documents of at most L tokens, as (N * K, G * L, D): heads that share a key/value head stand side by side."""

    def __init__(self, length: int, spans: list[tuple[int, int]]) -> None:
        self.length = length
        # Empty documents fill the group up: they take part in the products and are put nowhere.
        self._spans = spans + [(0, 0)] * (rounded_count(len(spans)) - len(spans))
        self._rows: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._future: dict[torch.dtype, Tensor] = {}

    def take(self, tokens_THD: Tensor, num_kv_heads: int) -> Tensor:
        """What the documents hold, zeros behind each."""
        num_heads, head_dim = tokens_THD.shape[1:]
        rows, _, empty = self._places(num_heads)
        taken = tokens_THD.reshape(-1, head_dim).index_select(0, rows).index_fill_(0, empty, 0)
        return taken.view(len(self._spans) * num_kv_heads, -1, head_dim)

    def put(self, grouped: Tensor, num_kv_heads: int, tokens_THD: Tensor) -> None:
        """The inverse of ``take``, into the contiguous ``tokens_THD``."""
        num_heads, head_dim = tokens_THD.shape[1:]
        rows, filled, _ = self._places(num_heads)
        flat = grouped.view(-1, head_dim)
        tokens_THD.view(-1, head_dim).index_copy_(0, rows[filled], flat[filled])

    def probabilities(self, query: Tensor, key: Tensor) -> Tensor:
        """(N * K, G * L, L): softmax over each document's past; ``query`` is scaled already."""
        scores = bmm(query, key.transpose(1, 2))
        if scores.dtype not in self._future:
            hidden = torch.full((self.length, self.length), float("-inf"), dtype=scores.dtype)
            self._future[scores.dtype] = hidden.triu(1)
        scores.view(-1, self.length, self.length).add_(self._future[scores.dtype])
        return torch.softmax(scores, dim=-1)

    def _places(self, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """For each (document, head, slot) its row in (T * H); which of these are filled, and which are not."""
        if num_heads not in self._rows:
            starts_N = torch.tensor([start for start, _ in self._spans])
            lengths_N = torch.tensor([length for _, length in self._spans])
            slots_L = torch.arange(self.length)
            # A slot behind its document's end reads token 0, to be overwritten.
            is_filled_NL = slots_L < lengths_N[:, None]
            tokens_NL = torch.where(is_filled_NL, starts_N[:, None] + slots_L, 0)
            rows = tokens_NL[:, None] * num_heads + torch.arange(num_heads)[:, None]
            is_filled = is_filled_NL[:, None].expand(-1, num_heads, -1).flatten()
            self._rows[num_heads] = (
                rows.flatten(),
                is_filled.nonzero().squeeze(1),
                (~is_filled).nonzero().squeeze(1),
            )
        return self._rows[num_heads]


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, layout: DocumentLayout, scaling: float
    ) -> Tensor:
        num_kv_heads = key_BKSD.shape[1]
        query, key, value = (_by_token(tensor) for tensor in (query_BHSD, key_BKSD, value_BKSD))
        out = torch.zeros_like(query)
        for group in layout.groups:
            probabilities = group.probabilities(
                group.take(query, num_kv_heads).mul_(scaling), group.take(key, num_kv_heads)
            )
            group.put(bmm(probabilities, group.take(value, num_kv_heads)), num_kv_heads, out)
        # The probabilities are computed again in the backward: kept, they would be the largest of the activations.
        ctx.save_for_backward(query_BHSD, key_BKSD, value_BKSD)
        ctx.layout, ctx.scaling = layout, scaling
        return _by_head(out, query_BHSD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BHSD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query_BHSD, key_BKSD, value_BKSD = ctx.saved_tensors
        num_kv_heads = key_BKSD.shape[1]
        query, key, value, grad = (_by_token(t) for t in (query_BHSD, key_BKSD, value_BKSD, grad_BHSD))
        grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        for group in ctx.layout.groups:
            q, k, v, g = (group.take(tensor, num_kv_heads) for tensor in (query, key, value, grad))
            q.mul_(ctx.scaling)
            p = group.probabilities(q, k)
            group.put(bmm(p.transpose(1, 2), g), num_kv_heads, grad_value)
            grad_p = bmm(g, v.transpose(1, 2))
            grad_scores = torch.ops.aten._softmax_backward_data(grad_p, p, -1, p.dtype)
            group.put(bmm(grad_scores, k).mul_(ctx.scaling), num_kv_heads, grad_query)
            group.put(bmm(grad_scores.transpose(1, 2), q), num_kv_heads, grad_key)
        return (
            _by_head(grad_query, query_BHSD),
            _by_head(grad_key, key_BKSD),
            _by_head(grad_value, value_BKSD),
            None,
            None,
        )


def _by_token(tensor_BHSD: Tensor) -> Tensor:
    """(B * S, H, D)"""
    return tensor_BHSD.transpose(1, 2).reshape(-1, tensor_BHSD.shape[1], tensor_BHSD.shape[3])


def _by_head(tensor_THD: Tensor, like_BHSD: Tensor) -> Tensor:
    """(B, H, S, D), a view"""
    batch, num_heads, num_positions, _ = like_BHSD.shape
    return tensor_THD.view(batch, num_positions, num_heads, -1).transpose(1, 2)


def document_attention(
    query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, *, layout: DocumentLayout, scaling: float
) -> Tensor:
    """Causal attention (B, H, S, D) within each document of ``layout``; padding gets zeros. H is a multiple of K."""
    out: Tensor = _DocumentAttention.apply(query_BHSD, key_BKSD, value_BKSD, layout, scaling)
    return out


def document_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    document_layout: DocumentLayout,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``document_attention`` in the form in which transformers calls attention; returns (B, S, H, D)."""
    assert attention_mask is None and not dropout and module.is_causal  # noqa: PT018
    out = document_attention(query, key, value, layout=document_layout, scaling=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, document_attention_forward)
