"""Cross-entropy of a causal language model without its logits ever being whole.

The logits of B x S positions over V tokens are the largest tensor of a training step (2,048 x 49,152 in float32:
403 MB) and the backward needs them again. Here only supervised positions are computed, a block at a time, and each
block's gradient is taken at once: what stays is a gradient the size of the hidden states and one the size of the head.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.errors import RecipeError
from finetune.model import documents
from finetune.model.activations import offloaded_activations
from finetune.model.attention import attention_mask
from finetune.model.matmul import matmul

BLOCK_ELEMENTS = 1 << 26
"""Logits that exist at once, in the compute dtype: 128 MiB in bfloat16. A block's three matrix products run whole."""
ROW_MULTIPLE = 64
"""A block has a multiple of this many rows. oneDNN compiles a kernel for each new shape, and keeps it: the number of
targets is another one at every step."""
SOFTMAX_ELEMENTS = 1 << 20
"""Logits that are float32 at once, 4 MiB: they stay in the cache between the passes of the softmax."""


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to ``hidden @ head``: multiply by ``scale``, then bend to within ``softcap`` by tanh."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> LogitTransform:
        """Read Granite's ``logits_scaling``, Cohere's ``logit_scale`` and Gemma's ``final_logit_softcapping``."""
        text = config.get_text_config()
        scale = float(getattr(text, "logit_scale", None) or 1.0)
        divisor = float(getattr(text, "logits_scaling", None) or 1.0)
        return cls(scale=scale / divisor, softcap=getattr(text, "final_logit_softcapping", None))

    def apply(self, raw_NV: Tensor) -> Tensor:
        """Logits (N, V) in float32 of the head's raw output. Doesn't change its argument."""
        logits_NV = raw_NV.float()
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.softcap is not None:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        return logits_NV

    def backward_(self, grad_NV: Tensor, logits_NV: Tensor) -> Tensor:
        """Turn the gradient of the logits into that of the raw output, in place."""
        if self.softcap is not None:
            grad_NV.mul_(1 - (logits_NV / self.softcap).square())
        return grad_NV.mul_(self.scale) if self.scale != 1.0 else grad_NV


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_BSH: Tensor,
        head_weight_VH: Tensor,
        targets_BS: Tensor,
        denominator: float,
        transform: LogitTransform,
        block_elements: int,
    ) -> Tensor:
        hidden_TH = hidden_BSH.reshape(-1, hidden_BSH.shape[-1])
        positions_N = (targets_BS.reshape(-1) >= 0).nonzero().squeeze(1)
        targets_N = targets_BS.reshape(-1)[positions_N]
        needs_hidden, needs_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        loss = torch.zeros((), dtype=torch.float32, device=hidden_BSH.device)
        grad_TH = torch.zeros_like(hidden_TH) if needs_hidden else None
        grad_VH: Tensor | None = None
        num_rows = max(1, block_elements // head_weight_VH.shape[0])
        for start in range(0, len(positions_N), num_rows):
            rows_N = positions_N[start : start + num_rows]
            num_filled = len(rows_N)
            block_NH = _filled_up(hidden_TH[rows_N], min(ROW_MULTIPLE, num_rows))
            block_NV = matmul(block_NH, head_weight_VH.T)
            block_NV[num_filled:] = 0
            loss += _softmax_gradient_(
                block_NV[:num_filled],
                targets_N[start : start + num_rows],
                denominator,
                transform,
                needs_hidden or needs_head,
            )
            if grad_TH is not None:
                grad_TH[rows_N] = matmul(block_NV, head_weight_VH)[:num_filled]
            if needs_head:
                part_VH = matmul(block_NV.T, block_NH)
                if grad_VH is None:
                    # Blocks add up in float32: bfloat16 would lose, block after block, what the next one brings.
                    grad_VH = part_VH if len(positions_N) <= num_rows else part_VH.float()
                else:
                    grad_VH += part_VH
        if needs_head and grad_VH is None:
            grad_VH = torch.zeros_like(head_weight_VH)
        ctx.grad_hidden = None if grad_TH is None else grad_TH.view_as(hidden_BSH)
        ctx.grad_head = None if grad_VH is None else grad_VH.to(head_weight_VH.dtype)
        return loss / denominator

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grads = []
        for name in ("grad_hidden", "grad_head"):
            grad = getattr(ctx, name)
            setattr(ctx, name, None)
            grads.append(None if grad is None else grad.mul_(grad_loss))
        return grads[0], grads[1], None, None, None, None


def _filled_up(block_NH: Tensor, multiple: int) -> Tensor:
    """Zero rows behind, up to a multiple."""
    missing = -len(block_NH) % multiple
    return nn.functional.pad(block_NH, (0, 0, 0, missing)) if missing else block_NH


def _softmax_gradient_(
    raw_NV: Tensor, targets_N: Tensor, denominator: float, transform: LogitTransform, needs_grad: bool
) -> Tensor:
    """Sum of -log p(target); ``raw_NV``, the head's output, becomes the gradient of that sum over ``denominator``."""
    loss = torch.zeros((), dtype=torch.float32, device=raw_NV.device)
    num_rows = max(1, SOFTMAX_ELEMENTS // raw_NV.shape[1]) if raw_NV.device.type == "cpu" else len(raw_NV)
    for start in range(0, len(raw_NV), num_rows):
        part_NV, target_N1 = raw_NV[start : start + num_rows], targets_N[start : start + num_rows, None]
        logits_NV = transform.apply(part_NV)
        log_probs_NV = torch.log_softmax(logits_NV, dim=-1)
        loss -= log_probs_NV.gather(1, target_N1).sum()
        if needs_grad:
            grad_NV = log_probs_NV.exp_()
            grad_NV.scatter_add_(1, target_N1, grad_NV.new_full(target_N1.shape, -1.0))
            part_NV.copy_(transform.backward_(grad_NV, logits_NV).mul_(1 / denominator))
    return loss


def chunked_cross_entropy(
    hidden_BSH: Tensor,
    head_weight_VH: Tensor,
    targets_BS: Tensor,
    *,
    denominator: float,
    transform: LogitTransform = LogitTransform(),
    block_elements: int = BLOCK_ELEMENTS,
) -> Tensor:
    """Sum of -log p(target) over the positions whose target isn't negative, divided by ``denominator``; float32 scalar.

    ``hidden_BSH`` and ``head_weight_VH`` share one dtype, in which the matrix products run; the softmax is float32.
    At most ``block_elements`` logits exist at once (one row at least). Both gradients are computed in the forward, so
    the backward can run once. Without any target the loss is 0 and so are the gradients.
    """
    loss: Tensor = _ChunkedCrossEntropy.apply(
        hidden_BSH, head_weight_VH, targets_BS, denominator, transform, block_elements
    )
    return loss


class CausalLMLoss(nn.Module):
    """A Hugging Face causal language model whose forward is its loss.

    The head's weight is used inside this forward, where a sharding engine has it whole. Parameter names are the model's
    own behind ``model.``. ``offload_activations``: what the backward needs of the blocks waits in the host's memory.
    Raises RecipeError for a model whose head isn't a plain matrix.
    """

    def __init__(self, model: PreTrainedModel, *, offload_activations: bool = False) -> None:
        super().__init__()
        self.model = model
        self.offload_activations = offload_activations
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise RecipeError(
                f"the head of {type(model).__name__} isn't a matrix without bias, as the chunked loss needs it",
                where="model.path",
                fix="use another model",
            )
        self.transform: LogitTransform = LogitTransform.of(model.config)
        self.implementation: str = str(model.config._attn_implementation)

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        *,
        denominator: float = 1.0,
        compare_logits: bool = False,
    ) -> Tensor:
        """``chunked_cross_entropy`` of int64 (B, S) tensors; ``document_ids`` isolate packed documents, -1 is padding.

        With ``compare_logits`` the largest difference between these logits and the model's own, over their spread.
        """
        head_weight_VH = self.model.get_output_embeddings().weight
        inputs: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if self.implementation == documents.NAME:
            inputs["document_layout"] = documents.DocumentLayout(document_ids)
        else:
            mask = attention_mask(document_ids, dtype=head_weight_VH.dtype, implementation=self.implementation)
            inputs["attention_mask"] = mask
            if mask is None:
                # One document a row: running positions, so that padding's restart isn't taken for a document.
                inputs["position_ids"] = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        kept = offloaded_activations(input_ids.device) if self.offload_activations else nullcontext()
        with kept:
            hidden_BSH = self.model.base_model(**inputs).last_hidden_state
        if compare_logits:
            own_BSV = self.model(**inputs).logits.float()
            ours_BSV = self.transform.apply(hidden_BSH @ head_weight_VH.T)
            return (ours_BSV - own_BSV).abs().max() / own_BSV.std()
        return chunked_cross_entropy(
            hidden_BSH, head_weight_VH, targets, denominator=denominator, transform=self.transform
        )
