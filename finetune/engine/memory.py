"""Predict, before anything is loaded, how much memory a rank of a training stage takes and how much disk a stage.

The parts are counted where they are known: the state of each engine in ``state_memory``, activations and loss in
``activation_memory``. A step is largest at one of four moments (``memory_parts.MOMENTS``). A device's allocator gives
the room of what is freed to what comes next, so its peak is the largest moment. The host's (glibc) does so less well:
see HEAP_SLACK. ``python bench/memory.py`` measures all of it on the cpu; CUDA's own share is an allowance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedConfig

from finetune.engine.activation_memory import LOSS_BLOCK_ELEMENTS, Batch, activation_items, attention_kind
from finetune.engine.choice import choose_engine
from finetune.engine.memory_parts import ALWAYS, MOMENTS, MemoryItem, ModelSize, Moment, Place
from finetune.engine.settings import ZeroSettings
from finetune.engine.state_memory import Sharding, state_items
from finetune.errors import RecipeError
from finetune.model.load import meta_model

BASE_BYTES = 420 << 20
"""Resident memory of a rank, libraries imported and a step of a tiny model done: 401 to 413 MiB by bench/memory.py."""
KERNEL_BYTES = 40 << 20
"""oneDNN's compiled kernels and small objects; they grow over the first steps, then stay: 20 to 40 MiB with every
tensor in pages of its own (MALLOC_MMAP_THRESHOLD_=262144), 14 steps of a 70M model."""
CUDA_CONTEXT_BYTES = 600 << 20
"""Device memory of a CUDA context with its kernels and libraries' workspaces. An allowance, not measured here."""
HEAP_SLACK = 0.45
"""Room that what was freed leaves unused in the host's heap, as a part of what a step allocates and frees at its
largest moment: 0.3 to 0.8 by bench/memory.py on models of 27M and 70M parameters."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Workload:
    """All that decides a rank's memory beside the model. ``packing``: rows hold several documents."""

    zero: ZeroSettings
    world_size: int
    micro_batch_size: int
    max_seq_length: int
    gradient_accumulation_steps: int = 1
    mixed_precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    checkpointed_every: int | None = None
    activation_offload: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    attn_implementation: str = "sdpa"
    packing: bool = True
    loss_block_elements: int = LOSS_BLOCK_ELEMENTS

    @property
    def compute_bytes(self) -> int:
        return 4 if self.mixed_precision == "fp32" else 2


@dataclass(frozen=True)
class MemoryPlan:
    """A rank's memory by part. On the cpu everything is in the host's memory, shared by all ranks of the machine."""

    engine: str
    engine_reason: str
    num_parameters: int
    items: tuple[MemoryItem, ...]

    def held_bytes(self, place: Place, moment: Moment) -> int:
        return sum(item.num_bytes for item in self.items if item.place == place and moment in item.moments)

    def peak(self, place: Place) -> tuple[int, Moment]:
        """(bytes, moment) of the largest."""
        return max(((self.held_bytes(place, moment), moment) for moment in MOMENTS), key=lambda held: held[0])

    @property
    def device_bytes(self) -> int:
        return self.peak("device")[0]

    @property
    def host_bytes(self) -> int:
        return self.peak("host")[0]

    @property
    def nvme_bytes(self) -> int:
        return self.peak("nvme")[0]

    @property
    def growth_bytes(self) -> int:
        """What the host's memory grows by over a process whose libraries are loaded."""
        return self.host_bytes - sum(item.num_bytes for item in self.items if item.name == "process")


@dataclass(frozen=True)
class DiskPlan:
    """A training stage's disk at its fullest: the kept checkpoints, the one being written, and the model."""

    checkpoint_bytes: int
    num_checkpoints: int
    model_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.checkpoint_bytes * self.num_checkpoints + self.model_bytes


def model_size(config: PreTrainedConfig) -> ModelSize:
    """Counted on the meta device. Raises RecipeError for a model that can't be sharded by block."""
    # Only sizes matter here, and eager is what every model has.
    return ModelSize.of(meta_model(config, attn_implementation="eager"))


def predict_memory(config: PreTrainedConfig, workload: Workload, *, size: ModelSize | None = None) -> MemoryPlan:
    """The memory of one rank that trains the model of ``config``. Nothing is loaded.

    ``size``: the model's counts, where they are known already. Raises RecipeError as ``model_size`` does, and for a
    model without attention.
    """
    size = size or model_size(config)
    text = config.get_text_config()
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not isinstance(getattr(text, name, None), int):
            raise RecipeError(
                f"what a {text.model_type} keeps for its backward isn't known here: its configuration has no `{name}`",
                where="model.path",
                fix="plan another model; `run` may train this one all the same",
            )
    near: Place = "device" if workload.device == "cuda" else "host"
    engine, reason = choose_engine(workload.zero, world_size=workload.world_size, device=workload.device)
    sharding = Sharding(
        zero=workload.zero,
        world_size=workload.world_size,
        near=near,
        compute_bytes=workload.compute_bytes,
        accumulates=workload.gradient_accumulation_steps > 1,
    )
    batch = Batch(
        micro_batch_size=workload.micro_batch_size,
        max_seq_length=workload.max_seq_length,
        compute_bytes=workload.compute_bytes,
        attention=attention_kind(
            config,
            device=workload.device,
            max_seq_length=workload.max_seq_length,
            attn_implementation=workload.attn_implementation,
            packing=workload.packing,
        ),
        checkpointed_every=workload.checkpointed_every,
        offloads_activations=workload.activation_offload,
        loss_block_elements=workload.loss_block_elements,
    )
    items = [MemoryItem("process", BASE_BYTES, "host", ALWAYS, "interpreter and libraries")]
    if near == "device":
        items.append(MemoryItem("CUDA context", CUDA_CONTEXT_BYTES, "device", ALWAYS, "an allowance"))
    else:
        items.append(MemoryItem("kernels", KERNEL_BYTES, "host", ALWAYS, "that oneDNN compiles, and small objects"))
    items += state_items(engine, size, sharding)
    items += activation_items(text, batch, near=near, tied=size.is_tied)
    items = [item for item in items if item.num_bytes]
    if near == "host":
        items.append(_heap(items))
    return MemoryPlan(engine, reason, size.total, tuple(items))


def _heap(items: list[MemoryItem]) -> MemoryItem:
    passing = [item for item in items if item.place == "host" and item.moments != ALWAYS]
    largest = max(sum(item.num_bytes for item in passing if moment in item.moments) for moment in MOMENTS)
    return MemoryItem("heap", int(HEAP_SLACK * largest), "host", ALWAYS, "room that what was freed leaves unused")


def predict_disk(
    config: PreTrainedConfig,
    *,
    keep_checkpoints: int,
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
    size: ModelSize | None = None,
) -> DiskPlan:
    """Disk of one training stage over all ranks: a checkpoint holds masters and both moments, 12 bytes a parameter.

    One checkpoint more than is kept stands there while the next is written.
    """
    size = size or model_size(config)
    return DiskPlan(
        checkpoint_bytes=12 * size.total + size.buffer_bytes,
        num_checkpoints=keep_checkpoints + 1,
        model_bytes=DTYPE_BYTES[dtype] * size.total + size.buffer_bytes,
    )
