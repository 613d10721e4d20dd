"""The learning rate of each step: a function of the step alone, so it is the same on any number of ranks and after a
resume."""

from __future__ import annotations

import math


def learning_rate_at(step: int, *, num_steps: int, peak: float, schedule: str, warmup_ratio: float) -> float:
    """Learning rate of optimizer step ``step`` (from 0) of ``num_steps``.

    It rises linearly over the first ``warmup_ratio`` of the steps, whose last one has the peak, then falls towards
    zero, which it would reach one step after the last: no step is spent without learning.
    """
    num_warmup = math.ceil(round(warmup_ratio * num_steps, 6))
    if step < num_warmup:
        return peak * (step + 1) / num_warmup
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule == "linear":
        return peak * (1 - progress)
    assert schedule == "constant", schedule
    return peak
