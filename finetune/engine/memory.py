"""Predict, before anything is loaded, how much memory a rank of a training stage takes and how much disk a stage.

What is added up (N parameters, D ranks, c bytes of the compute type: 2 for bf16):

- State, after ZeRO (Rajbhandari et al. 2020, section 3.1): float32 masters 4N and AdamW's two moments 8N, plus what is
  computed in: a copy cN, or with stage 3 the blocks that are gathered at the moment; gradients. Stages 1 to 3 divide
  masters, moments and the gradients that wait for the step by D.
- Activations, after Korthikanti et al. 2022, section 4, counted anew for a Llama block as transformers runs it: what
  its backward reads again. With H hidden, Q all query heads, K all key (or value) heads, I the MLP, a heads, in bytes a
  token:
      both norms     8H in float32, 8 for the scales, 4cH normed and weighted
      attention      2cQ for query and output, 2cK for key and value, 4a for the softmax's sums; under a mask key and
                     value are repeated to 2cQ, and the mask is kept once a layer, c for each key position;
                     eager keeps the whole softmax too: 4a for each key position, and ca in bf16
      MLP            4cI
  With gradient checkpointing a layer keeps its input alone, cH, and one layer at a time is whole.
- The loss is taken in chunks (see ``finetune.train.loss``): at most ``logits_chunk_elements`` logits at once, a float32
  gradient of the head, and a gradient of the last hidden states.

Activations are largest as the backward starts, gradients as it ends. A device's allocator gives the room of the one to
the other: the peak is the larger of the two moments. The host's (glibc) hardly does: their sum, and HEAP_SLACK of the
activations. The process itself takes BASE_BYTES. Mixture-of-experts blocks count the experts that a token reaches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedConfig, PreTrainedModel

from finetune.engine.build import decoder_blocks
from finetune.engine.choice import choose_engine
from finetune.engine.settings import ZeroSettings
from finetune.model.load import meta_model

BASE_BYTES = 420 * 2**20
"""Resident memory of a rank, libraries imported and a step of a tiny model done: 382 MiB by the script in
tests/test_memory_plan.py, the rest for the process group."""
CUDA_CONTEXT_BYTES = 600 * 2**20
"""Device memory of a CUDA context with its kernels and libraries' workspaces. An allowance, not measured here."""
HEAP_SLACK = 0.3
"""Room between the kept activations that freed ones leave in the host's heap, as a part of them. Steps of models of 25M
and 135M parameters on 256 to 2,048 tokens, by the script in tests/test_memory_plan.py, took 0.15 to 0.5."""
LOGITS_CHUNK_ELEMENTS = 1 << 24

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Place = Literal["device", "host"]
Moment = Literal["always", "forward", "backward"]


@dataclass(frozen=True)
class MemoryItem:
    """One part of a rank's memory. ``moment``: held all the time, as the backward starts, or as it ends."""

    name: str
    num_bytes: int
    place: Place
    moment: Moment
    note: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """A rank's memory by part. On the cpu everything is in the host's memory, shared by all ranks of the machine."""

    engine: str
    engine_reason: str
    num_parameters: int
    items: tuple[MemoryItem, ...]

    def peak_bytes(self, place: Place) -> int:
        def held(moment: Moment) -> int:
            return sum(item.num_bytes for item in self.items if item.place == place and item.moment == moment)

        moments = held("forward"), held("backward")
        return held("always") + (max(moments) if place == "device" else sum(moments))

    @property
    def device_bytes(self) -> int:
        return self.peak_bytes("device")

    @property
    def host_bytes(self) -> int:
        return self.peak_bytes("host")


@dataclass(frozen=True)
class DiskPlan:
    """A training stage's disk at its fullest: the kept checkpoints, the one being written, and the model."""

    checkpoint_bytes: int
    num_checkpoints: int
    model_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.checkpoint_bytes * self.num_checkpoints + self.model_bytes


@dataclass(frozen=True)
class ModelSize:
    """Counts of a model's parameters, each tied one once. ``outside``: in no block (embedding, head, last norm)."""

    total: int
    outside: int
    largest_block: int
    largest_parameter: int
    buffer_bytes: int
    """Of the buffers that its files hold."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelSize:
        blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in decoder_blocks(model)]
        sizes = [parameter.numel() for parameter in model.parameters()]
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        buffers = (value for name, value in model.state_dict(keep_vars=True).items() if name not in parameters)
        return cls(
            total=sum(sizes),
            outside=sum(sizes) - sum(blocks),
            largest_block=max(blocks),
            largest_parameter=max(sizes),
            buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in buffers),
        )


def predict_memory(
    config: PreTrainedConfig,
    *,
    zero: ZeroSettings,
    world_size: int,
    micro_batch_size: int,
    max_seq_length: int,
    gradient_accumulation_steps: int = 1,
    mixed_precision: Literal["bf16", "fp16", "fp32"] = "bf16",
    checkpointed_every: int | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    attn_implementation: str = "sdpa",
    packing: bool = True,
    logits_chunk_elements: int = LOGITS_CHUNK_ELEMENTS,
) -> MemoryPlan:
    """The memory of one rank that trains the model of ``config`` on ``world_size`` ranks. Nothing is loaded.

    ``packing``: rows hold several documents, so attention runs under a mask. Raises RecipeError for a model that can't
    be sharded by block.
    """
    # Only sizes matter here, and eager is what every model has.
    size = ModelSize.of(meta_model(config, attn_implementation="eager"))
    compute_bytes = 4 if mixed_precision == "fp32" else 2
    engine, reason = choose_engine(zero, world_size=world_size, device=device)
    offloads = zero.offload.parameters == "cpu" and device == "cuda"
    if engine == "replicated":
        state = _replicated_state(
            size, compute_bytes, accumulates=gradient_accumulation_steps > 1, world_size=world_size
        )
    else:
        state = _sharded_state(
            size, compute_bytes, stage=zero.stage, world_size=world_size, accumulates=gradient_accumulation_steps > 1
        )
    num_tokens = micro_batch_size * max_seq_length
    text = config.get_text_config()
    work = [
        *_activations(
            text,
            compute_bytes=compute_bytes,
            num_tokens=num_tokens,
            seq_length=max_seq_length,
            attn_implementation=attn_implementation,
            masked=packing,
            checkpointing=checkpointed_every is not None,
        ),
        *_loss(text, compute_bytes=compute_bytes, num_tokens=num_tokens, chunk_elements=logits_chunk_elements),
    ]
    near: Place = "device" if device == "cuda" else "host"
    items = [MemoryItem("process", BASE_BYTES, "host", "always", "interpreter and libraries")]
    if device == "cuda":
        items.append(MemoryItem("CUDA context", CUDA_CONTEXT_BYTES, "device", "always", "an allowance"))
    else:
        activations = sum(part.num_bytes for part in work if part.name == _ACTIVATIONS)
        work.append(
            _Part("heap", int(HEAP_SLACK * activations), "forward", "freed between the activations, not reused")
        )
    for part in [*state, *work]:
        place: Place = "host" if offloads and part.name in _OFFLOADED else near
        items.append(MemoryItem(part.name, part.num_bytes, place, part.moment, part.note))
    return MemoryPlan(engine, reason, size.total, tuple(item for item in items if item.num_bytes))


@dataclass(frozen=True)
class _Part:
    name: str
    num_bytes: int
    moment: Moment
    note: str


_MASTERS, _OPTIMIZER, _GRADIENTS, _ACTIVATIONS = "masters", "optimizer", "gradients", "activations"
_OFFLOADED = {_MASTERS, _OPTIMIZER, _GRADIENTS}


def _replicated_state(size: ModelSize, c: int, *, accumulates: bool, world_size: int) -> Iterable[_Part]:
    in_float32 = accumulates or world_size > 1 or c == 4
    yield _Part(_MASTERS, 4 * size.total, "always", "float32, 4 bytes a parameter")
    yield _Part(_OPTIMIZER, 8 * size.total, "always", "AdamW's two float32 moments, 8 bytes a parameter")
    if c < 4:
        yield _Part("compute copy", c * size.total, "always", f"bfloat16, {c} bytes a parameter")
    kept = 4 if in_float32 else c
    why = "added in float32" if in_float32 else "one micro-batch on one process: nothing to add, kept in bfloat16"
    yield _Part(_GRADIENTS, kept * size.total, "backward", f"{kept} bytes a parameter; {why}")
    yield _Part("gradient in flight", 2 * c * size.largest_parameter, "backward", "of the largest parameter")


def _sharded_state(size: ModelSize, c: int, *, stage: int, world_size: int, accumulates: bool) -> Iterable[_Part]:
    shard = -(-size.total // world_size)
    share = f"1/{world_size} of"
    unit = max(size.outside, size.largest_block)
    yield _Part(_MASTERS, 4 * shard, "always", f"{share} float32")
    yield _Part(_OPTIMIZER, 8 * shard, "always", f"{share} AdamW's two float32 moments")
    if stage == 3:
        gathered, note = size.outside + 2 * size.largest_block, "what is outside the blocks, this block and the next"
    else:
        gathered, note = size.total, f"stage {stage} keeps all parameters between forward and backward"
    yield _Part("gathered", c * gathered, "always", note)
    yield _Part("communication", c * unit, "forward", "the gathered bytes of a block before they are unpacked")
    yield _Part(_GRADIENTS, 4 * shard, "backward", f"{share} float32")
    yield _Part("reduction", (4 + c) * unit, "backward", "a block's whole gradient, and as float32 to be reduced")
    if stage == 1 and accumulates:
        yield _Part("accumulation", 4 * size.total, "backward", "stage 1 adds whole gradients, in float32")


def block_activation_bytes(
    config: PreTrainedConfig, *, compute_bytes: int, seq_length: int, attn_implementation: str, masked: bool
) -> int:
    """Bytes that the backward of one Llama block reads again, for each token of rows of ``seq_length``."""
    c = compute_bytes
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    query = heads * head_size
    key = (getattr(config, "num_key_value_heads", None) or heads) * head_size
    norms = 8 * hidden + 8 + 4 * c * hidden
    if attn_implementation == "eager":
        attention = 4 * c * query + heads * seq_length * (4 + (c if c < 4 else 0))
    elif masked:
        attention = 4 * c * query + 4 * heads + c * seq_length
    else:
        attention = 2 * c * query + 2 * c * key + 4 * heads
    return norms + attention + 4 * c * _mlp_width(config)


def _mlp_width(config: PreTrainedConfig) -> int:
    """The MLP's width as one token sees it: of a mixture, the experts that it reaches and the shared ones."""
    per_token = getattr(config, "num_experts_per_tok", None)
    dense: int = config.intermediate_size
    if not per_token:
        return dense
    expert = getattr(config, "moe_intermediate_size", None) or dense
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return int(per_token * expert + shared)


def _activations(
    config: PreTrainedConfig,
    *,
    compute_bytes: int,
    num_tokens: int,
    seq_length: int,
    attn_implementation: str,
    masked: bool,
    checkpointing: bool,
) -> Iterable[_Part]:
    a_token = block_activation_bytes(
        config,
        compute_bytes=compute_bytes,
        seq_length=seq_length,
        attn_implementation=attn_implementation,
        masked=masked,
    )
    num_layers, hidden = config.num_hidden_layers, config.hidden_size
    if checkpointing:
        yield _Part(
            _ACTIVATIONS,
            num_tokens * (num_layers * compute_bytes * hidden + a_token),
            "forward",
            f"{num_layers} layers' inputs and one layer whole",
        )
    else:
        note = f"{num_layers} layers x {num_tokens:,} tokens x {a_token:,} bytes"
        yield _Part(_ACTIVATIONS, num_tokens * num_layers * a_token, "forward", note)
    # The last norm's, its result and the gradients of both in the compute type.
    ends = 4 * hidden + 4 * compute_bytes * hidden
    yield _Part("last hidden states", num_tokens * ends, "forward", "and their gradient")
    if masked or attn_implementation == "eager":
        mask = num_tokens * seq_length * (1 if attn_implementation == "sdpa" else compute_bytes)
        yield _Part("attention mask", mask, "forward", "one for all layers")


def _loss(config: PreTrainedConfig, *, compute_bytes: int, num_tokens: int, chunk_elements: int) -> Iterable[_Part]:
    vocab, head = config.vocab_size, config.vocab_size * config.hidden_size
    chunk = min(max(1, chunk_elements // vocab), num_tokens) * vocab
    # float32 logits, their log-softmax (which becomes the gradient), and that in the compute type.
    a_logit = 8 + (compute_bytes if compute_bytes < 4 else 0)
    yield _Part("logits", chunk * a_logit, "forward", f"{chunk:,} at once, {a_logit} bytes each")
    yield _Part("head gradient", (4 + compute_bytes) * head, "forward", "added in float32, and a chunk's part of it")


def predict_disk(
    config: PreTrainedConfig,
    *,
    keep_checkpoints: int,
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
) -> DiskPlan:
    """Disk of one training stage over all ranks: a checkpoint holds masters and both moments, 12 bytes a parameter.

    One checkpoint more than is kept stands there while the next is written.
    """
    size = ModelSize.of(meta_model(config, attn_implementation="eager"))
    return DiskPlan(
        checkpoint_bytes=12 * size.total + size.buffer_bytes,
        num_checkpoints=keep_checkpoints + 1,
        model_bytes=DTYPE_BYTES[dtype] * size.total + size.buffer_bytes,
    )


def format_plan(plan: MemoryPlan) -> str:
    """Lines for a person: each part, where it is, and the peak of each place."""
    lines = [f"memory of a rank: {plan.num_parameters / 1e6:,.1f}M parameters, {plan.engine} ({plan.engine_reason})"]
    moments = {"always": "", "forward": "until the backward", "backward": "during the backward"}
    for item in plan.items:
        notes = "; ".join(note for note in (moments[item.moment], item.note) if note)
        lines.append(f"  {item.name:<20} {_size(item.num_bytes):>11}  {item.place:<6}  {notes}")
    for place in ("device", "host"):
        if any(item.place == place for item in plan.items):
            lines.append(f"  {'peak':<20} {_size(plan.peak_bytes(place)):>11}  {place:<6}")
    return "\n".join(lines)


def format_disk(plan: DiskPlan) -> str:
    return (
        f"disk of the stage: {_size(plan.total_bytes)} = {plan.num_checkpoints} checkpoints x "
        f"{_size(plan.checkpoint_bytes)} + model {_size(plan.model_bytes)}"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
