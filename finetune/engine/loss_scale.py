"""Dynamic loss scaling for float16, whose gradients would otherwise fall below its smallest number."""

from __future__ import annotations

import torch

INITIAL_SCALE = 2.0**16
GROWTH_STEPS = 2000


class LossScale:
    """The factor on the loss: halved when a gradient overflows, doubled after GROWTH_STEPS steps without one.

    Micikevicius et al. 2018, "Mixed Precision Training", section 3.2; the two numbers are those of torch's GradScaler.
    The factor stays a power of two, so that it costs no precision, and never falls below 1: a gradient that overflows
    there is no matter of scale.
    """

    def __init__(self) -> None:
        self.scale = torch.tensor(INITIAL_SCALE, dtype=torch.float32)
        self.good_steps = torch.zeros((), dtype=torch.float32)

    @property
    def factor(self) -> float:
        return float(self.scale)

    def update(self, *, overflowed: bool) -> bool:
        """Note one step; returns whether an overflow may be put down to the factor, which is then lower."""
        if overflowed:
            self.good_steps.zero_()
            if self.factor <= 1.0:
                return False
            self.scale.mul_(0.5)
            return True
        self.good_steps += 1
        if float(self.good_steps) >= GROWTH_STEPS:
            self.scale.mul_(2.0)
            self.good_steps.zero_()
        return False

    def state(self) -> dict[str, torch.Tensor]:
        return {"optimizer.loss_scale": self.scale, "optimizer.good_steps": self.good_steps}
