"""Whether a training stage fits into what its ranks have, and which changes of the recipe would make it fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedConfig

from finetune.engine.deepspeed_config import refusal
from finetune.engine.memory import MemoryPlan, Workload, predict_memory
from finetune.engine.memory_parts import ModelSize
from finetune.engine.settings import OffloadSettings, ZeroSettings

MARGIN = 0.1
"""The part of a limit that stays free in what is said to fit: predictions are right to about a tenth."""
MOST_CHANGES = 5
MOST_RANKS = 4096
# What a change costs in speed, as a part of a step. Rough, and only their order and sums matter: stage 2 reduces after
# each micro-batch, stage 3 gathers twice in each, full checkpointing repeats the forward, offload waits for the host.
STAGE_COST = (0.0, 0.02, 0.05, 0.15)
HALVED_BATCH_COST = 0.1
CHECKPOINT_COST = {None: 0.0, 2: 0.17, 1: 0.33}
ACTIVATION_OFFLOAD_COST = 1.5
"""Where no block is checkpointed. A token's activations of a 70B model's block, 430 KB, cross twice in 34 us at
25 GB/s; computing the block takes a GPU of 400 Tflop/s 13 us."""
WORTH_RANKS = 0.1
"""The part of a step that must be gained before more ranks are spoken of."""
OFFLOAD_COST = {("none", "none"): 0.0, ("cpu", "none"): 0.3, ("cpu", "cpu"): 0.6}
OTHER_OFFLOAD_COST = 1.0


@dataclass(frozen=True)
class Limits:
    """Bytes that one rank may use; None: not known."""

    device_bytes: int | None = None
    host_bytes: int | None = None

    def excess(self, plan: MemoryPlan) -> float:
        """The largest peak as a part of what may be used; above 1 it doesn't fit. 0 where no limit is known."""
        pairs = ((plan.device_bytes, self.device_bytes), (plan.host_bytes, self.host_bytes))
        return max((peak / ((1 - MARGIN) * limit) for peak, limit in pairs if limit is not None), default=0.0)

    def fits(self, plan: MemoryPlan) -> bool | None:
        """None: a place that is used has no known limit, and the others suffice."""
        if self.excess(plan) > 1:
            return False
        unknown = (self.device_bytes is None and plan.device_bytes) or self.host_bytes is None
        return None if unknown else True


@dataclass(frozen=True)
class Change:
    """Settings of the recipe that differ, by their names there (and world_size), and what a rank then takes."""

    settings: dict[str, Any]
    cost: float
    plan: MemoryPlan


@dataclass(frozen=True)
class Advice:
    """``changes`` make it fit, the cheapest in speed first; where none does, ``closest`` is what comes nearest."""

    changes: tuple[Change, ...]
    closest: Change | None


def advise(config: PreTrainedConfig, workload: Workload, limits: Limits, *, size: ModelSize) -> Advice:
    """Changes under which ``workload`` fits ``limits``; the step's rows over all ranks stay the same number.

    On as many ranks, alone or combined, none that contains another; and on the fewest ranks where it fits at a lower
    cost in speed than on these.
    """
    here = list(_candidates(config, workload, workload, size))
    changes = _simplest(change for change in here if limits.excess(change.plan) <= 1)
    closest = min(here, key=lambda change: limits.excess(change.plan), default=None)
    for wider in _more_ranks(workload):
        there = [_change(config, workload, wider, size), *_candidates(config, workload, wider, size)]
        fitting = _simplest(change for change in there if limits.excess(change.plan) <= 1)
        if fitting and (not changes or fitting[0].cost < changes[0].cost - WORTH_RANKS):
            # More machines are no loss of speed, but not everyone has them: last.
            changes = [*changes[: MOST_CHANGES - 1], fitting[0]]
            break
        closest = min((closest, *there) if closest else there, key=lambda change: limits.excess(change.plan))
    return Advice(tuple(changes[:MOST_CHANGES]), None if changes else closest)


def _simplest(changes: Iterable[Change]) -> list[Change]:
    """The cheapest of each set of settings, without those that change more than a cheaper one does."""
    kept: list[Change] = []
    for change in sorted(changes, key=lambda change: change.cost):
        if not any(set(other.settings) <= set(change.settings) for other in kept):
            kept.append(change)
    return kept


def _candidates(config: PreTrainedConfig, was: Workload, base: Workload, size: ModelSize) -> Iterator[Change]:
    """Every combination of changes to ``base`` that an engine can do."""
    for zero in _zero_choices(base):
        for every in _checkpoint_choices(base.checkpointed_every):
            for offloads in (False, True) if base.device == "cuda" else (base.activation_offload,):
                if base.activation_offload and not offloads:
                    continue
                for rows, accumulation in _batch_choices(base):
                    changed = dataclasses.replace(
                        base,
                        zero=zero,
                        checkpointed_every=every,
                        activation_offload=offloads,
                        micro_batch_size=rows,
                        gradient_accumulation_steps=accumulation,
                    )
                    if changed != was:
                        yield _change(config, was, changed, size)


def _zero_choices(workload: Workload) -> Iterator[ZeroSettings]:
    """Higher stages and other offloads, where an engine does them exactly."""
    zero = workload.zero
    offloads = [zero.offload]
    if workload.device == "cuda":
        offloads += [OffloadSettings(optimizer=o, parameters=p) for o, p in OFFLOAD_COST]  # type: ignore[arg-type]
    for stage in range(zero.stage, 4):
        for number, offload in enumerate(offloads):
            if number and offload == zero.offload:
                continue
            try:
                chosen = ZeroSettings(stage=stage, engine=zero.engine, offload=offload)
            except ValidationError:
                continue
            if zero.engine == "deepspeed" and refusal(chosen, precision=workload.mixed_precision):
                continue
            yield chosen


def _checkpoint_choices(every: int | None) -> list[int | None]:
    stronger: list[int | None] = [choice for choice in (2, 1) if every is None or choice < every]
    return [every, *stronger]


def _batch_choices(workload: Workload) -> Iterator[tuple[int, int]]:
    rows, accumulation = workload.micro_batch_size, workload.gradient_accumulation_steps
    yield rows, accumulation
    for smaller in range(rows - 1, 0, -1):
        if rows % smaller == 0:
            yield smaller, accumulation * rows // smaller


def _more_ranks(workload: Workload) -> list[Workload]:
    """Twice the ranks again and again, each with its share of the step's rows, which stay as many."""
    wider = []
    world_size = workload.world_size * 2
    in_step = workload.micro_batch_size * workload.gradient_accumulation_steps * workload.world_size
    while world_size <= MOST_RANKS and in_step % world_size == 0:
        rows = in_step // world_size
        micro = max(part for part in range(1, min(rows, workload.micro_batch_size) + 1) if rows % part == 0)
        wider.append(
            dataclasses.replace(
                workload, world_size=world_size, micro_batch_size=micro, gradient_accumulation_steps=rows // micro
            )
        )
        world_size *= 2
    return wider


def _change(config: PreTrainedConfig, was: Workload, now: Workload, size: ModelSize) -> Change:
    settings: dict[str, Any] = {}
    pairs = {
        "zero.stage": (was.zero.stage, now.zero.stage),
        "zero.offload.optimizer": (was.zero.offload.optimizer, now.zero.offload.optimizer),
        "zero.offload.parameters": (was.zero.offload.parameters, now.zero.offload.parameters),
        "zero.offload.ratio": (was.zero.offload.ratio, now.zero.offload.ratio),
        "gradient_checkpointing": (was.checkpointed_every, now.checkpointed_every),
        "activation_offload": (was.activation_offload, now.activation_offload),
        "micro_batch_size": (was.micro_batch_size, now.micro_batch_size),
        "gradient_accumulation_steps": (was.gradient_accumulation_steps, now.gradient_accumulation_steps),
        "world_size": (was.world_size, now.world_size),
    }
    for name, (before, after) in pairs.items():
        if before != after:
            settings[name] = "full" if name == "gradient_checkpointing" and after == 1 else after
    cost = (
        STAGE_COST[now.zero.stage]
        - STAGE_COST[was.zero.stage]
        + _offload_cost(now)
        - _offload_cost(was)
        + _checkpoint_cost(now)
        - _checkpoint_cost(was)
        + _activation_cost(now)
        - _activation_cost(was)
        + HALVED_BATCH_COST * (was.micro_batch_size / now.micro_batch_size - 1)
    )
    return Change(settings, cost, predict_memory(config, now, size=size))


def _offload_cost(workload: Workload) -> float:
    offload = workload.zero.offload
    return OFFLOAD_COST.get((offload.optimizer, offload.parameters), OTHER_OFFLOAD_COST)


def _activation_cost(workload: Workload) -> float:
    """Of the blocks that aren't checkpointed."""
    every = workload.checkpointed_every
    return ACTIVATION_OFFLOAD_COST * (1 - 1 / every if every else 1.0) if workload.activation_offload else 0.0


def _checkpoint_cost(workload: Workload) -> float:
    every = workload.checkpointed_every
    return CHECKPOINT_COST[1] / every if every else 0.0
