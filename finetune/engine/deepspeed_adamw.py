"""The optimizer that DeepSpeed is given, and the way to what it holds: each rank's masters and moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from finetune.engine.adamw import clip_coefficient
from finetune.engine.protocol import AdamWSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardAdamW(torch.optim.Optimizer):
    """AdamW by torch's fused kernel over the flat float32 partitions that DeepSpeed puts into its groups.

    DeepSpeed calls ``step`` once a group and step, after it unscaled the gradients. This one clips with our coefficient
    by the norm that ``grad_norm()`` tells, and counts no steps by itself: ``step_count`` is raised by the engine.
    Held (``is_held``) it changes nothing. DeepSpeedCPUAdam would need a compiler, and is a kernel
    with its own rounding; this one steps exactly as our other engines do.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, settings: AdamWSettings, grad_norm: Callable[[], float]
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.settings = settings
        self.step_count = torch.zeros((), dtype=torch.float32)
        self.max_norm = 1.0
        self.is_held = False
        self._grad_norm = grad_norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for master_N in group["params"]:
                self._step_partition(master_N, learning_rate=group["lr"], weight_decay=group["weight_decay"])

    def make_moments(self) -> None:
        for group in self.param_groups:
            for master_N in group["params"]:
                for key in MOMENTS:
                    self.state[master_N].setdefault(key, torch.zeros_like(master_N))

    def _step_partition(self, master_N: Tensor, *, learning_rate: float, weight_decay: float) -> None:
        state = self.state[master_N]
        if self.is_held or master_N.grad is None or master_N.numel() == 0:
            return
        coefficient = clip_coefficient(self._grad_norm(), self.max_norm)
        adamw(
            [master_N],
            [master_N.grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            # The kernel counts the step itself, in this.
            [self.step_count.to(master_N.device, copy=True)],
            fused=True,
            grad_scale=torch.tensor(1 / coefficient, device=master_N.device) if coefficient != 1.0 else None,
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self.settings.epsilon,
            maximize=False,
        )


class Partitions:
    """Masters and moments of one parameter at a time, whole, in float32, wherever DeepSpeed's ``zero`` keeps them.

    DeepSpeed's public interface does the work: fragments of one flat tensor in stages 1 and 2, an equal part of each
    parameter, padded at the end, in stage 3. All methods are collective.
    """

    def __init__(self, zero: Any, optimizer: ShardAdamW, *, stage: int) -> None:
        self._zero = zero
        self._stage = stage
        for _ in self._swapped_in():
            optimizer.make_moments()
        if stage < 3:
            zero._lazy_init_hp_params_optimizer_state()

    def _swapped_in(self) -> Iterator[int]:
        """Each sub-group of stage 3, its master among the optimizer's, read from nvme and written back there."""
        if self._stage < 3:
            yield 0
            return
        zero = self._zero
        for index, master_N in enumerate(zero.fp32_partitioned_groups_flat):
            is_swapped = zero._swappable_optimizer_subgroup(index)
            if is_swapped:
                zero._optimizer_states_and_gradient_swap_in(index)
            group = zero.optimizer.param_groups[zero.sub_group_to_group_id[index]]
            group["params"] = [master_N]
            yield index
            group["params"] = []
            if is_swapped:
                zero._optimizer_states_and_gradient_swap_out(index)

    def read(self, parameter: Tensor, moment: str | None = None) -> Tensor:
        """The master, or the moment of that name, of a trained parameter, whole."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        whole: Tensor | None
        if moment is None:
            whole = safe_get_full_fp32_param(parameter)
        else:
            whole = safe_get_full_optimizer_state(parameter, moment)
        assert whole is not None, "a frozen parameter has no master in DeepSpeed"
        return whole

    def write(self, parameter: Tensor, whole: Tensor, moment: str | None = None) -> None:
        """Set the master, or the moment of that name; the compute weight follows with ``refresh``."""
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        if self._stage < 3:
            if moment is None:
                safe_set_full_fp32_param(parameter, whole)
            else:
                safe_set_full_optimizer_state(parameter, whole, moment)
            return
        # The setters of whole tensors reach beyond the end where the parameter doesn't divide by the ranks (0.19.8).
        part_N = self._own_part(parameter, whole)
        if moment is None:
            safe_set_local_fp32_param(parameter, part_N)
        else:
            safe_set_local_optimizer_state(parameter, part_N, moment)

    def _own_part(self, parameter: Any, whole: Tensor) -> Tensor:
        size = parameter.partition_numel()
        part_N = torch.zeros(size, dtype=torch.float32, device=whole.device)
        start = size * self._zero._get_param_partition_rank(parameter)
        own_N = whole.reshape(-1)[start : start + size]
        part_N[: own_N.numel()] = own_N
        return part_N

    def refresh(self) -> None:
        """Cast the compute weights from the masters."""
        zero = self._zero
        if self._stage < 3:
            zero.update_lp_params()
            return
        zero._partition_all_parameters()
        for index in self._swapped_in():
            zero._reassign_or_swap_out_partitioned_parameters(index)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
