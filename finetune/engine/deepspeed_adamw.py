"""The optimizer that DeepSpeed is given, and the way to what it holds: each rank's masters and moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from finetune.engine.adamw import clip_coefficient
from finetune.engine.protocol import AdamWSettings

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
KEYS = (MASTER, *MOMENTS)


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
        # DeepSpeed's code for `offload.ratio` reads all five.
        defaults = {"betas": settings.betas, "eps": settings.epsilon, "amsgrad": False}
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, **defaults})
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
    """Masters and moments of the trained parameters, whole, in float32, wherever DeepSpeed's ``zero`` keeps them.

    It keeps fragments of flat tensors in stages 1 and 2, an equal part of each parameter, padded at the end, in
    stage 3. One parameter's tensor is whole at a time; what is on nvme is read once for all its parameters. All methods
    are collective.
    """

    def __init__(self, zero: Any, optimizer: ShardAdamW, *, stage: int) -> None:
        self._zero = zero
        self._optimizer = optimizer
        self._stage = stage
        if stage < 3:
            optimizer.make_moments()
            zero._lazy_init_hp_params_optimizer_state()
            self._parameters = [parameter for group in _bit16_groups(zero) for parameter in group]
        else:
            for index in self._swapped_in():
                zero.optimizer.param_groups[0]["params"] = [zero.fp32_partitioned_groups_flat[index]]
                optimizer.make_moments()
                zero.optimizer.param_groups[0]["params"] = []

    def read(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """(parameter, MASTER or the moment's name, that tensor whole), one by one."""
        if self._stage < 3:
            for parameter in self._parameters:
                for key in KEYS:
                    yield parameter, key, parameter.get_full_hp_param(None if key == MASTER else key)
            return
        for parameter, key, part_N in self._parts(KEYS):
            on_device_N = part_N.to(parameter.device)
            yield parameter, key, self._zero._fp32_state_allgather(parameter, on_device_N)

    def write(self, whole: Callable[[Tensor, str], Tensor], keys: tuple[str, ...]) -> None:
        """Set ``keys`` of every parameter to ``whole(parameter, key)``, and the compute weights by the masters."""
        zero = self._zero
        if self._stage < 3:
            for parameter in self._parameters:
                for key in keys:
                    parameter.set_full_hp_param(whole(parameter, key), None if key == MASTER else key)
            zero.update_lp_params()
            return
        zero._partition_all_parameters()
        for parameter, key, part_N in self._parts(keys, are_written=True):
            # DeepSpeed's setter of whole tensors reaches beyond the end where they don't divide by the ranks (0.19.8).
            start = part_N.numel() * zero._get_param_partition_rank(parameter)
            own_N = whole(parameter, key).reshape(-1)[start : start + part_N.numel()]
            part_N[: own_N.numel()].copy_(own_N)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def _parts(self, keys: tuple[str, ...], *, are_written: bool = False) -> Iterator[tuple[Any, str, Tensor]]:
        """Stage 3: (parameter, key, this rank's flat part of it)."""
        zero = self._zero
        for index in self._swapped_in():
            master_N = zero.fp32_partitioned_groups_flat[index]
            for parameter in zero.fp16_groups[index]:
                _, offset, size = zero.grad_position[zero.get_param_id(parameter)]
                for key in keys:
                    flat_N = master_N.detach() if key == MASTER else self._optimizer.state[master_N][key]
                    yield parameter, key, flat_N.narrow(0, offset, size)
            if are_written:
                zero._reassign_or_swap_out_partitioned_parameters(index)

    def _swapped_in(self) -> Iterator[int]:
        """Each sub-group of stage 3 while it is in memory: what is on nvme is read, and written back afterwards."""
        zero = self._zero
        for index in range(len(zero.fp16_groups)):
            is_swapped = zero._swappable_optimizer_subgroup(index)
            if is_swapped:
                zero._optimizer_states_and_gradient_swap_in(index)
            yield index
            if is_swapped:
                zero._optimizer_states_and_gradient_swap_out(index)

    def drop_gradients(self) -> None:
        """After a step that DeepSpeed gave up: with the optimizer on the host and a shorter compute type, stages 1 and
        2 would keep the gradient that isn't finite and add the next ones to it (0.19.8)."""
        if self._stage < 3:
            gradients = getattr(self._zero, "averaged_gradients", {})
            for group in gradients:
                gradients[group] = None


def _bit16_groups(zero: Any) -> Any:
    """Stages 1 and 2: the parameters as DeepSpeed grouped them. With bfloat16 stage 1 has an optimizer of its own."""
    return zero.bf16_groups if hasattr(zero, "bf16_groups") else zero.bit16_groups
