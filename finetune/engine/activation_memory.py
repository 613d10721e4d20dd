"""What one micro-batch takes: activations that wait for the backward, work space, and the loss.

After Korthikanti et al. 2022, section 4, counted anew for a Llama block as transformers and ``finetune.model`` run it:
what its backward reads again. With H hidden, Q all query heads, K all key (or value) heads, I the MLP, a heads, c bytes
of the compute type, in bytes a token:

    both norms     8H in float32, 8 for the scales, 4cH normed and weighted
    attention      2cQ for query and output, 2cK for key and value; sdpa 4a more for the softmax's sums, and under a
                   mask key and value are repeated to 2cQ, and the mask is kept once a layer, c for each key position;
                   eager keeps the whole softmax too: 4a for each key position, and ca in bf16
    MLP            4cI

A checkpointed block keeps its input alone, cH, and one at a time is whole. Mixture-of-experts blocks count the experts
that a token reaches. The loss is taken in blocks (``finetune.train.loss``): at most ``loss_block_elements`` logits at
once; where the targets need several, the head's gradient is added up in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedConfig

from finetune.engine.memory_parts import COMPUTE, FORWARD, MemoryItem, Moment, Place
from finetune.model.documents import can_attend_by_document

LOSS_BLOCK_ELEMENTS = 1 << 26
SOFTMAX_BYTES = 12 << 20
"""On the cpu the softmax of a loss block runs over 2**20 logits at a time, in three float32 copies."""

Attention = Literal["documents", "masked", "causal", "eager"]


@dataclass(frozen=True)
class Batch:
    """What a rank computes at once, and in what way. ``compute_bytes``: 2 for bf16 and fp16, 4 for fp32."""

    micro_batch_size: int
    max_seq_length: int
    compute_bytes: int
    attention: Attention
    checkpointed_every: int | None
    offloads_activations: bool
    loss_block_elements: int

    @property
    def num_tokens(self) -> int:
        return self.micro_batch_size * self.max_seq_length


def attention_kind(
    config: PreTrainedConfig, *, device: str, max_seq_length: int, attn_implementation: str, packing: bool
) -> Attention:
    """How the training loop lets the model of ``config`` attend."""
    if attn_implementation == "eager":
        return "eager"
    if attn_implementation == "sdpa" and can_attend_by_document(config, device=device, max_seq_length=max_seq_length):
        return "documents"
    return "masked" if packing and attn_implementation == "sdpa" else "causal"


def block_activation_bytes(
    config: PreTrainedConfig, *, compute_bytes: int, seq_length: int, attention: Attention
) -> int:
    """Bytes that the backward of one Llama block reads again, for each token of rows of ``seq_length``."""
    c = compute_bytes
    hidden, heads = config.hidden_size, config.num_attention_heads
    query, key = _head_widths(config)
    if attention == "eager":
        attended = 4 * c * query + heads * seq_length * (4 + (c if c < 4 else 0))
    elif attention == "masked":
        attended = 4 * c * query + 4 * heads + c * seq_length
    elif attention == "causal":
        attended = 2 * c * query + 2 * c * key + 4 * heads
    else:
        attended = 2 * c * query + 2 * c * key
    return 8 * hidden + 8 + 4 * c * hidden + attended + 4 * c * _mlp_width(config)


def _head_widths(config: PreTrainedConfig) -> tuple[int, int]:
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads * head_size, (getattr(config, "num_key_value_heads", None) or heads) * head_size


def _mlp_width(config: PreTrainedConfig) -> int:
    """The MLP's width as one token sees it: of a mixture, the experts that it reaches and the shared ones."""
    per_token = getattr(config, "num_experts_per_tok", None)
    dense = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None)
    # GPT-2's kind calls it n_inner, and leaves it out where it is four times the model's width.
    dense = int(dense or getattr(config, "n_inner", None) or 4 * config.hidden_size)
    if not per_token:
        return dense
    expert = getattr(config, "moe_intermediate_size", None) or dense
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return int(per_token * expert + shared)


def activation_items(config: PreTrainedConfig, batch: Batch, *, near: Place, tied: bool) -> Iterable[MemoryItem]:
    """The parts of ``batch`` on a rank that computes in the memory ``near``."""
    c, tokens = batch.compute_bytes, batch.num_tokens
    a_token = block_activation_bytes(
        config, compute_bytes=c, seq_length=batch.max_seq_length, attention=batch.attention
    )
    hidden, num_layers = config.hidden_size, config.num_hidden_layers
    every = batch.checkpointed_every
    num_checkpointed = num_layers // every if every else 0
    num_whole = num_layers - num_checkpointed
    moved = batch.offloads_activations and near == "device"
    if num_whole:
        note = f"{num_whole} layers x {tokens:,} tokens x {a_token:,} bytes"
        yield MemoryItem("activations", num_whole * tokens * a_token, "host" if moved else near, FORWARD, note)
    if num_checkpointed:
        note = f"of {num_checkpointed} layers, whose activations are computed again"
        yield MemoryItem("layer inputs", num_checkpointed * tokens * c * hidden, near, FORWARD, note)
    if num_checkpointed or moved:
        yield MemoryItem("one layer whole", tokens * a_token, near, FORWARD, "the one that runs")
    # The gradients of the MLP's three wide tensors and of a norm in float32, or attention's matrices of one layer.
    space = tokens * max(3 * c * _mlp_width(config) + 8 * hidden, _attention_space(config, batch))
    yield MemoryItem("work space", space, near, frozenset({"backward starts"}), "of one layer's backward")
    ends = 4 * hidden + 4 * c * hidden
    yield MemoryItem("last hidden states", tokens * ends, near, FORWARD, "and their gradient")
    if batch.attention in ("masked", "eager"):
        mask = tokens * batch.max_seq_length * (1 if batch.attention == "masked" else c)
        yield MemoryItem("attention mask", mask, near, FORWARD, "one for all layers")
    yield from _loss_items(config, batch, near=near, tied=tied)


def _attention_space(config: PreTrainedConfig, batch: Batch) -> int:
    """Bytes a token of attention's own matrices: three of each head and key, where plain products compute it."""
    if batch.attention == "documents":
        return int(3 * batch.compute_bytes * config.num_attention_heads * batch.max_seq_length)
    return 0


def _loss_items(config: PreTrainedConfig, batch: Batch, *, near: Place, tied: bool) -> Iterable[MemoryItem]:
    c, tokens, vocab = batch.compute_bytes, batch.num_tokens, config.vocab_size
    rows = min(tokens, max(1, batch.loss_block_elements // vocab))
    at_loss: frozenset[Moment] = frozenset({"loss"})
    note = f"{rows:,} rows of {vocab:,} at once"
    yield MemoryItem("logits", rows * vocab * c, near, at_loss, note)
    softmax = SOFTMAX_BYTES if near == "host" else 3 * 4 * rows * vocab
    yield MemoryItem("softmax", softmax, near, at_loss, "in float32")
    head = vocab * config.hidden_size
    yield MemoryItem("head gradient", c * head, near, COMPUTE if tied else FORWARD, "taken with the loss")
    if rows < tokens:
        yield MemoryItem("head gradient's sum", 4 * head, near, at_loss, "float32, over the blocks of rows")
