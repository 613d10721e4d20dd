"""Sharded state (ZeRO stages 1 to 3) through torch's FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from finetune.engine.adamw import AdamW, clip_coefficient, squared_norm
from finetune.engine.protocol import AdamWSettings, MicroBatch, StepResult
from finetune.engine.replicated import persistent_buffers
from finetune.engine.weights import load_tensors


class Fsdp2Engine:
    """float32 masters and AdamW state sharded by rows over all ranks; compute in ``compute_dtype``; gradients reduced
    and kept in float32.

    ``module`` comes with its parameters on the meta device, named as the safetensors in ``folder`` behind ``model.``;
    each rank reads its own rows. ``blocks`` are gathered and freed one at a time; what lies outside them (embedding,
    head, last norm) is gathered once for the whole forward and backward. The stages differ in what stays whole:

    - 3: each block's parameters are freed after its forward and again after its backward;
    - 2: parameters stay until the step's last backward; gradients are reduced and sharded after each micro-batch;
    - 1: gradients stay too, added in float32, and are reduced once, with the last micro-batch.

    ``offload`` (stage 3) keeps shards, gradients and optimizer on the host and steps there.
    """

    name = "fsdp2"

    def __init__(
        self,
        module: nn.Module,
        folder: Path,
        *,
        blocks: Sequence[nn.Module],
        stage: int,
        offload: bool,
        device: torch.device,
        compute_dtype: torch.dtype,
        adamw: AdamWSettings,
    ) -> None:
        assert stage in (1, 2, 3), stage
        assert stage == 3 or not offload, "settings refuse offload below stage 3"
        self.module = module
        self.device = device
        self._stage = stage
        self._shard(blocks, offload=offload, compute_dtype=compute_dtype)
        self._materialise(offload=offload)
        named = {name: cast(DTensor, parameter) for name, parameter in module.named_parameters()}
        self._names = list(named)
        self._parameters = list(named.values())
        with torch.no_grad():
            load_tensors(folder, {name.removeprefix("model."): parameter for name, parameter in named.items()})
        self._optimizer = AdamW(
            [parameter.to_local().detach() for parameter in self._parameters],
            is_matrix=[parameter.ndim >= 2 for parameter in self._parameters],
            settings=adamw,
        )
        self._loss = torch.zeros((), device=device)

    def _shard(self, blocks: Sequence[nn.Module], *, offload: bool, compute_dtype: torch.dtype) -> None:
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        # On a host without an accelerator the shards are on the cpu anyway, and there is no pinned memory to copy from.
        offload_policy: OffloadPolicy = (
            CPUOffloadPolicy(pin_memory=True) if offload and self.device.type != "cpu" else OffloadPolicy()
        )
        mixed_precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        for block in blocks:
            fully_shard(
                block,
                mesh=mesh,
                mp_policy=mixed_precision,
                offload_policy=offload_policy,
                reshard_after_forward=self._stage == 3,
            )
        fully_shard(
            self.module,
            mesh=mesh,
            mp_policy=mixed_precision,
            offload_policy=offload_policy,
            reshard_after_forward=False,
        )
        self._root = cast(FSDPModule, self.module)
        self._units = [unit for unit in self.module.modules() if isinstance(unit, FSDPModule)]
        for unit in self._units:
            # The loss is divided by the step's global number of targets: the gradient is a sum over ranks, no mean.
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)

    def _materialise(self, *, offload: bool) -> None:
        """Give the shards memory; put back the buffers, which ``to_empty`` would leave unset."""
        buffers = {
            (owner, name): buffer
            for owner in self.module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        }
        self.module.to_empty(device="cpu" if offload else self.device)
        for (owner, name), buffer in buffers.items():
            owner._buffers[name] = buffer.to(self.device)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], *, denominator: float) -> None:
        self.module.train()
        for number, micro_batch in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            self._root.set_is_last_backward(is_last)
            self._root.set_requires_gradient_sync(self._stage >= 2 or is_last)
            self._root.set_reshard_after_backward(self._stage == 3 or is_last)
            loss = self.module(**self._to_device(micro_batch), denominator=denominator)
            loss.backward()
            self._loss += loss.detach()

    def clip_and_step(self, *, max_norm: float, learning_rate: float) -> StepResult:
        grads = [
            None if parameter.grad is None else cast(DTensor, parameter.grad).to_local()
            for parameter in self._parameters
        ]
        sums = torch.tensor([float(self._loss), squared_norm(grads)], dtype=torch.float64)
        if self.device.type != "cpu":
            sums = sums.to(self.device)
        dist.all_reduce(sums)
        loss, squared = sums.tolist()
        result = StepResult(loss=loss, grad_norm=squared**0.5)
        if result.is_finite:
            self._optimizer.step(
                grads, learning_rate=learning_rate, clip_coefficient=clip_coefficient(result.grad_norm, max_norm)
            )
        for parameter in self._parameters:
            parameter.grad = None
        self._loss = torch.zeros((), device=self.device)
        return result

    def forward(self, micro_batch: MicroBatch, **arguments: object) -> Tensor:
        self.module.eval()
        with torch.no_grad():
            result: Tensor = self.module(**self._to_device(micro_batch), **arguments)
        for unit in self._units:
            unit.reshard()
        return result

    def _to_device(self, micro_batch: MicroBatch) -> MicroBatch:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in micro_batch.items()}

    def state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for name, parameter, exp_avg, exp_avg_sq in zip(
            self._names, self._parameters, self._optimizer.exp_avgs, self._optimizer.exp_avg_sqs, strict=True
        ):
            plain = name.removeprefix("model.")
            state[f"model.{plain}"] = parameter.detach()
            state[f"optimizer.exp_avg.{plain}"] = _like(parameter, exp_avg)
            state[f"optimizer.exp_avg_sq.{plain}"] = _like(parameter, exp_avg_sq)
        state["optimizer.step"] = self._optimizer.step_count
        state.update(persistent_buffers(self.module))
        return state

    def state_loaded(self) -> None:
        """Nothing is derived from the masters: the compute copy is gathered from them in each forward."""


def _like(parameter: DTensor, local: Tensor) -> DTensor:
    """``local`` as a DTensor sharded as ``parameter`` is; they share no memory, the result and ``local`` do."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
