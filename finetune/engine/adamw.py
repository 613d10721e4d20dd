"""AdamW over float32 masters, a bounded slice at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from finetune.engine.loss_scale import LossScale
from finetune.engine.protocol import AdamWSettings, StepResult

SLICE_ELEMENTS = 1 << 22
"""Elements stepped by one call: a gradient that is kept in bfloat16 becomes float32 for 16 MiB at a time."""

NORM_ELEMENTS = 1 << 12


@dataclass
class _Slice:
    """A flat part of one parameter and of its moments; ``start`` is its place in the parameter."""

    parameter: int
    start: int
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class AdamW:
    """Decoupled weight decay (Loshchilov & Hutter 2019), by torch's fused kernel, on this process's masters.

    ``masters`` are float32 tensors of any shape, contiguous, stepped in place. Matrices decay; vectors don't.
    """

    def __init__(self, masters: Sequence[Tensor], *, is_matrix: Sequence[bool], settings: AdamWSettings) -> None:
        self.settings = settings
        self.masters = list(masters)
        self.exp_avgs = [torch.zeros_like(master) for master in masters]
        self.exp_avg_sqs = [torch.zeros_like(master) for master in masters]
        self.step_count = torch.zeros((), dtype=torch.float32)
        self._groups: list[tuple[float, list[_Slice]]] = []
        for decays in (True, False):
            chosen = [index for index, matrix in enumerate(is_matrix) if matrix is decays and masters[index].numel()]
            self._add_groups(masters, chosen, settings.weight_decay if decays else 0.0)

    def _add_groups(self, masters: Sequence[Tensor], chosen: Sequence[int], weight_decay: float) -> None:
        """Small parameters share a call, large ones are cut: both stay near SLICE_ELEMENTS."""
        group: list[_Slice] = []
        size = 0
        for index in chosen:
            flats = [tensor.view(-1) for tensor in (masters[index], self.exp_avgs[index], self.exp_avg_sqs[index])]
            for start in range(0, flats[0].numel(), SLICE_ELEMENTS):
                part = _Slice(index, start, *(flat[start : start + SLICE_ELEMENTS] for flat in flats))
                if group and size + part.master.numel() > SLICE_ELEMENTS:
                    self._groups.append((weight_decay, group))
                    group, size = [], 0
                group.append(part)
                size += part.master.numel()
        if group:
            self._groups.append((weight_decay, group))

    def step(
        self,
        grads: Sequence[Tensor | None],
        *,
        learning_rate: float,
        clip_coefficient: float,
        after: Callable[[int, slice, Tensor], None] | None = None,
    ) -> None:
        """Step every master by its gradient times ``clip_coefficient``; a master without a gradient stays as it is.

        ``grads`` hold one tensor a master, of its shape and any float dtype; float32 ones are overwritten.
        ``after(index, part, master_N)`` is called for each stepped part while it is still in the cache.
        """
        counts = {device: self.step_count.to(device) for device in {part.device for part in self.exp_avgs}}
        flats = [None if grad is None else grad.reshape(-1) for grad in grads]
        grad_scale = None
        for weight_decay, group in self._groups:
            present = [part for part in group if flats[part.parameter] is not None]
            if not present:
                continue
            parts_N = [self._grad_part(flats, part) for part in present]
            device = parts_N[0].device
            if clip_coefficient != 1.0 and (grad_scale is None or grad_scale.device != device):
                grad_scale = torch.tensor(1 / clip_coefficient, dtype=torch.float32, device=device)
            adamw(
                [part.master for part in present],
                parts_N,
                [part.exp_avg for part in present],
                [part.exp_avg_sq for part in present],
                [],
                # The kernel counts the step itself, in each of these.
                [counts[device].clone() for _ in present],
                fused=True,
                grad_scale=grad_scale,
                amsgrad=False,
                beta1=self.settings.betas[0],
                beta2=self.settings.betas[1],
                lr=learning_rate,
                weight_decay=weight_decay,
                eps=self.settings.epsilon,
                maximize=False,
            )
            if after is not None:
                for part in present:
                    after(part.parameter, slice(part.start, part.start + part.master.numel()), part.master)
        self.step_count += 1

    @staticmethod
    def _grad_part(flats: Sequence[Tensor | None], part: _Slice) -> Tensor:
        flat = flats[part.parameter]
        assert flat is not None
        return flat[part.start : part.start + part.master.numel()].float()


def squared_norm(tensors: Sequence[Tensor | None]) -> float:
    """Sum of squares over all tensors: in float32 over 4,096 elements at a time, in float64 between those.

    A single float32 sum over a 28M-element embedding is off by 1e-5.
    """
    norms = []
    for tensor in tensors:
        if tensor is None:
            continue
        flat = tensor.reshape(-1)
        whole = flat.numel() - flat.numel() % NORM_ELEMENTS
        # By the slice, as a tensor of another dtype is read as float32 whole.
        parts = [flat[start : min(start + SLICE_ELEMENTS, whole)] for start in range(0, whole, SLICE_ELEMENTS)]
        for part in (*(part.view(-1, NORM_ELEMENTS) for part in parts), flat[None, whole:]):
            if part.numel():
                norms.append(torch.linalg.vector_norm(part, dim=1, dtype=torch.float32))
    return float(torch.cat(norms).double().square().sum()) if norms else 0.0


def clip_coefficient(grad_norm: float, max_norm: float) -> float:
    """What the gradient is multiplied by so that its norm is at most ``max_norm``.

    Rounded down to 12 bits: the norm depends in its last bits on how many ranks summed it, and in bfloat16 one flipped
    bit of a weight grows to a loss that differs by 1e-3 within four steps of a 135M model.
    """
    if grad_norm <= max_norm:
        return 1.0
    mantissa, exponent = math.frexp(max_norm / grad_norm)
    return math.ldexp(math.floor(mantissa * 4096) / 4096, exponent)


def step_result(
    loss: float, squared: float, *, max_norm: float, loss_scale: LossScale | None
) -> tuple[StepResult, float]:
    """(what the step reports, what the gradient is multiplied by), from the sum of squares of the gradient over all
    ranks, which with ``loss_scale`` is of the scaled gradient."""
    factor = loss_scale.factor if loss_scale is not None else 1.0
    grad_norm = squared**0.5 / factor
    is_skipped = False
    if loss_scale is not None and math.isfinite(loss):
        is_skipped = loss_scale.update(overflowed=not math.isfinite(grad_norm))
    coefficient = clip_coefficient(grad_norm, max_norm) / factor if math.isfinite(grad_norm) else 0.0
    return StepResult(loss=loss, grad_norm=grad_norm, is_skipped=is_skipped), coefficient
