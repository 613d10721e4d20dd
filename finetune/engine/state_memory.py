"""What each engine holds of a model: parameters, masters, optimizer, gradients, and what passes between ranks.

N parameters, D ranks, c bytes of the compute type. After ZeRO (Rajbhandari et al. 2020, section 3.1): float32 masters
4N and AdamW's two moments 8N, a copy cN to compute with, gradients; stages 1 to 3 divide masters, moments and the
gradients that wait for the step by D. Beside these stand the copies that last for a moment, as the engines make them,
and gloo's, which gathers and reduces through a copy of the whole (torch's ProcessGroupGloo) where nccl works in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from finetune.engine.adamw import SLICE_ELEMENTS
from finetune.engine.buckets import BUCKET_ELEMENTS
from finetune.engine.deepspeed_config import REDUCE_BUCKET_ELEMENTS
from finetune.engine.memory_parts import ALWAYS, BACKWARD, COMPUTE, GRADIENTS, MemoryItem, ModelSize, Moment, Place
from finetune.engine.settings import ZeroSettings

LIVE_ELEMENTS = 1_000_000_000
"""Parameters that DeepSpeed's stage 3 keeps gathered (its ``stage3_max_live_parameters``)."""
AT_START: frozenset[Moment] = frozenset({"backward starts"})
AT_END: frozenset[Moment] = frozenset({"backward ends"})
AT_STEP: frozenset[Moment] = frozenset({"step"})


@dataclass(frozen=True)
class Sharding:
    """What decides an engine's memory. ``near``: where it computes."""

    zero: ZeroSettings
    world_size: int
    near: Place
    compute_bytes: int
    accumulates: bool

    @property
    def offloads_optimizer(self) -> bool:
        """Alone: with the parameters it goes where they go."""
        return self.zero.offload.optimizer == "cpu" and self.zero.offload.parameters == "none"

    @property
    def summed_at(self) -> frozenset[Moment]:
        """When gradients are held that micro-batches are added to: from the first one's backward on, to the step."""
        return ALWAYS if self.accumulates else GRADIENTS

    @property
    def gloo(self) -> int:
        """Copies of a whole that a collective works in."""
        return 1 if self.near == "host" else 0


def state_items(engine: str, size: ModelSize, sharding: Sharding) -> Iterable[MemoryItem]:
    """The parts that ``engine`` holds on one rank."""
    if engine == "replicated":
        return _replicated(size, sharding)
    return _fsdp2(size, sharding) if engine == "fsdp2" else _deepspeed(size, sharding)


def _replicated(size: ModelSize, sharding: Sharding) -> Iterable[MemoryItem]:
    c, n, near = sharding.compute_bytes, size.total, sharding.near
    home: Place = "host" if sharding.offloads_optimizer else near
    alone = sharding.world_size == 1
    yield from _optimizer(n, home, share="")
    if c < 4 or sharding.offloads_optimizer:
        yield MemoryItem("parameters", c * n, near, ALWAYS, f"to compute with, {c} bytes each")
    staged = c if alone else 4
    if sharding.offloads_optimizer:
        yield MemoryItem("staging", staged * n, "host", ALWAYS, "gradients on their way in, weights on their way out")
    if not alone:
        yield MemoryItem("gradients", 4 * n, near, sharding.summed_at, "added up over ranks in float32")
        bucket = 4 * max(BUCKET_ELEMENTS, size.largest_parameter)
        yield MemoryItem("all-reduce", sharding.gloo * bucket, near, AT_END, "of the largest bucket")
    elif sharding.offloads_optimizer:
        if sharding.accumulates:
            yield MemoryItem("gradients", 4 * n, "host", ALWAYS, "added up in float32")
    else:
        kept = 4 if sharding.accumulates else c
        why = "added up in float32" if kept == 4 else "of one micro-batch: nothing to add"
        yield MemoryItem("gradients", kept * n, near, sharding.summed_at, f"{kept} bytes each, {why}")
    yield MemoryItem("gradient in flight", 2 * c * size.largest_parameter, near, AT_END, "of the largest parameter")
    read = c if (alone and not sharding.accumulates) else 4
    yield from _step(home, is_float32=read == 4)


def _fsdp2(size: ModelSize, sharding: Sharding) -> Iterable[MemoryItem]:
    zero, ranks, near = sharding.zero, sharding.world_size, sharding.near
    c, gloo = sharding.compute_bytes, sharding.gloo
    shard = -(-size.total // ranks)
    share = f"1/{ranks} of "
    streams = zero.offload.parameters == "cpu"
    home: Place = "host" if streams or sharding.offloads_optimizer else near
    yield from _optimizer(shard, home, share=share)
    if sharding.offloads_optimizer:
        yield MemoryItem("parameters", c * shard, near, ALWAYS, f"{share}those to gather, {c} bytes each")
        yield MemoryItem("staging", c * shard, "host", ALWAYS, "gradients on their way in, weights on their way out")
        if sharding.accumulates and zero.stage > 1:
            yield MemoryItem("gradients", 4 * shard, "host", ALWAYS, f"{share}added up in float32")
    else:
        # Stage 1 has none of them before the last micro-batch.
        held = GRADIENTS if zero.stage == 1 else sharding.summed_at
        yield MemoryItem("gradients", 4 * shard, home, held, f"{share}float32")
    block, outside = size.largest_block, size.outside
    yield MemoryItem("gathered", c * outside, near, COMPUTE, "what is outside the blocks: embedding, head, last norm")
    if zero.stage == 3:
        # This block whole, the next one as it arrives (flat, and unpacked).
        yield MemoryItem(
            "gathered blocks", c * block * (3 + gloo), near, AT_START, "this one; the next, flat and unpacked"
        )
    else:
        # The last micro-batch's backward frees them one by one; those before it keep them.
        held = COMPUTE if sharding.accumulates else BACKWARD - AT_END | {"loss"}
        yield MemoryItem(
            "gathered blocks", c * (size.total - outside), near, held, "all, until the step's last backward"
        )
    if zero.stage == 1 and sharding.accumulates:
        yield MemoryItem("accumulation", 4 * size.total, near, COMPUTE, "stage 1 adds whole gradients, in float32")
    # A whole gradient is packed in float32, reduced (gloo: through a copy), and leaves this rank's part: in float32,
    # and on its way to the host in the compute type besides.
    whole = 4 + 4 * gloo
    part = -(-(4 + c) // ranks) if sharding.offloads_optimizer else 0
    note = "a block's whole gradient, in float32"
    yield MemoryItem("reduced block", (whole + part) * block, near, AT_START, note)
    note = "the whole gradient of what is outside the blocks"
    yield MemoryItem("reduced outside", (whole + part) * outside, near, AT_END, note)
    yield MemoryItem("gradient in flight", c * size.largest_parameter, near, AT_END, "of the largest parameter")
    yield from _step(home, is_float32=not sharding.offloads_optimizer or sharding.accumulates)


def _deepspeed(size: ModelSize, sharding: Sharding) -> Iterable[MemoryItem]:
    """DeepSpeed's, as its configuration here makes it. Frees less than it could: flat partitions and buckets stay."""
    zero, c, ranks, near = sharding.zero, sharding.compute_bytes, sharding.world_size, sharding.near
    offload = zero.offload
    shard = -(-size.total // ranks)
    share = f"1/{ranks} of "
    if zero.stage == 0:
        yield from _optimizer(size.total, near, share="")
        yield MemoryItem("gradients", 4 * size.total, near, GRADIENTS, "float32")
        return
    homes: dict[str, Place] = {"none": near, "cpu": "host", "nvme": "nvme"}
    home = homes[offload.optimizer]
    moved = int(offload.ratio * shard) if offload.optimizer == "cpu" else shard
    yield from _optimizer(moved, home, share=share)
    if moved < shard:
        note = f"what offload.ratio {offload.ratio} leaves"
        yield MemoryItem("kept optimizer", 12 * (shard - moved), near, ALWAYS, note)
    gradient_home: Place = "host" if offload.optimizer != "none" else near
    yield MemoryItem("gradients", 4 * shard, gradient_home, ALWAYS, f"{share}float32")
    if offload.optimizer == "nvme":
        yield MemoryItem("swap buffers", 4 * 4 * size.largest_parameter, "host", ALWAYS, "pinned, on the way to nvme")
    if zero.stage == 3:
        yield MemoryItem("parameters", c * shard, homes[offload.parameters], ALWAYS, f"{share}those to gather")
        live = min(size.total, LIVE_ELEMENTS)
        yield MemoryItem("gathered", c * live, near, COMPUTE, "DeepSpeed keeps up to a billion whole")
    else:
        yield MemoryItem("parameters", c * size.total, near, ALWAYS, f"whole, {c} bytes each")
        if zero.stage == 1:
            yield MemoryItem("accumulation", c * size.total, near, BACKWARD, "stage 1 keeps whole gradients")
    bucket = 4 * max(min(REDUCE_BUCKET_ELEMENTS, size.total), size.largest_parameter)
    yield MemoryItem("reduction", bucket * (1 + sharding.gloo), near, BACKWARD, "a bucket of gradients in float32")
    yield MemoryItem("gradient in flight", 2 * c * size.largest_parameter, near, AT_END, "of the largest parameter")


def _optimizer(count: int, place: Place, *, share: str) -> Iterable[MemoryItem]:
    yield MemoryItem("masters", 4 * count, place, ALWAYS, f"{share}float32 parameters")
    yield MemoryItem("optimizer", 8 * count, place, ALWAYS, f"{share}AdamW's two float32 moments")


def _step(place: Place, *, is_float32: bool) -> Iterable[MemoryItem]:
    """A slice of a gradient that isn't float32 yet."""
    if not is_float32:
        yield MemoryItem("step", 4 * SLICE_ELEMENTS, place, AT_STEP, "a gradient read as float32")
