"""What the training loop asks of an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

MicroBatch = dict[str, Tensor]
"""Keyword arguments of the module's forward."""


@dataclass(frozen=True)
class AdamWSettings:
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same on every rank. When either isn't finite, no weight was changed."""

    loss: float
    """Sum over all ranks' micro-batches of what the module returned."""
    grad_norm: float
    """L2 norm of the summed gradient over all parameters, before clipping."""
    is_skipped: bool = False
    """float16 only: the scaled gradient overflowed, no weight was changed and the loss scale was lowered."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Engine(Protocol):
    """Holds a module's float32 masters and optimizer state, whole or sharded, and steps them.

    The module's forward takes a micro-batch and ``denominator=`` and returns a scalar loss; the gradient is the plain
    sum over micro-batches and ranks, so a loss that is divided by the step's global number of targets needs no further
    scaling. Every method is collective: all ranks call it, with equally many micro-batches.
    """

    name: str
    module: nn.Module

    def forward_backward(self, micro_batches: Sequence[MicroBatch], *, denominator: float) -> None:
        """Take the gradients of this rank's micro-batches of one step, added in float32. Once before each step."""

    def clip_and_step(self, *, max_norm: float, learning_rate: float) -> StepResult:
        """Sum over ranks, scale the gradient down to ``max_norm``, step AdamW, drop the gradient."""

    def forward(self, micro_batch: MicroBatch, **arguments: object) -> Tensor:
        """The module's result on this rank, without a gradient and in evaluation mode."""

    def state(self) -> dict[str, Tensor]:
        """The live state, to be saved, or loaded in place and announced by ``state_loaded``.

        ``model.<name>``: float32 masters; ``optimizer.exp_avg.<name>`` and ``optimizer.exp_avg_sq.<name>``: AdamW's
        moments, of what is trained; ``optimizer.step``: float32, 0-dim; ``optimizer.loss_scale`` and
        ``optimizer.good_steps``: the same, with float16 only; ``buffer.<name>``: persistent buffers. Names are the
        model's own; a tied parameter stands once, under its canonical name. Sharded tensors are DTensors.
        """

    def state_loaded(self) -> None:
        """Take up what was loaded into ``state()``."""
