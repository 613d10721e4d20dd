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

from finetune.engine.adamw import AdamW, squared_norm, step_result
from finetune.engine.host import HostAdamW
from finetune.engine.loss_scale import LossScale
from finetune.engine.parameters import load_buffers, persistent_buffers, replace_parameters
from finetune.engine.protocol import AdamWSettings, MicroBatch, StepResult
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

    ``offload_parameters`` (stage 3) keeps shards, gradients and optimizer on the host and steps there.
    ``offload_optimizer`` alone keeps float32 masters and optimizer on the host, sharded alike, and the shards in
    ``compute_dtype`` on ``device``: half as large in bf16, to which a reduced gradient is rounded before it leaves.
    """

    name = "fsdp2"

    def __init__(
        self,
        module: nn.Module,
        folder: Path,
        *,
        blocks: Sequence[nn.Module],
        stage: int,
        offload_parameters: bool = False,
        offload_optimizer: bool = False,
        device: torch.device,
        compute_dtype: torch.dtype,
        adamw: AdamWSettings,
    ) -> None:
        assert stage in (1, 2, 3), stage
        assert stage == 3 or not offload_parameters, "settings refuse it below stage 3"
        assert not (offload_parameters and offload_optimizer), "the optimizer goes with the parameters"
        self.module = module
        self.device = device
        self._stage = stage
        if offload_optimizer:
            replace_parameters(module, lambda _, parameter: torch.empty_like(parameter, dtype=compute_dtype))
        self._shard(blocks, offload=offload_parameters, compute_dtype=compute_dtype)
        self._materialise(offload=offload_parameters)
        named = {name: cast(DTensor, parameter) for name, parameter in module.named_parameters()}
        self._trained = [name for name, parameter in named.items() if parameter.requires_grad]
        self._parameters = [named[name] for name in self._trained]
        self._host_mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.masters = {
            name: self._like(parameter, torch.empty(parameter.to_local().shape, dtype=torch.float32))
            if offload_optimizer
            else parameter.detach()
            for name, parameter in named.items()
        }
        with torch.no_grad():
            load_tensors(folder, {name.removeprefix("model."): master for name, master in self.masters.items()})
            load_buffers(module, folder)
        masters = [cast(DTensor, self.masters[name]).to_local() for name in self._trained]
        is_matrix = [parameter.ndim >= 2 for parameter in self._parameters]
        self._host: HostAdamW | None = None
        if offload_optimizer:
            self._host = HostAdamW(
                [parameter.to_local().detach() for parameter in self._parameters],
                masters,
                is_matrix=is_matrix,
                settings=adamw,
                device=device,
                staging_dtype=compute_dtype,
            )
            for index, parameter in enumerate(self._parameters):
                parameter.register_post_accumulate_grad_hook(lambda p, index=index: self._take_grad(index, p))
        self._optimizer = self._host.optimizer if self._host else AdamW(masters, is_matrix=is_matrix, settings=adamw)
        self._loss_scale = LossScale() if compute_dtype == torch.float16 else None
        self._loss = torch.zeros((), device=device)
        self.state_loaded()

    def _shard(self, blocks: Sequence[nn.Module], *, offload: bool, compute_dtype: torch.dtype) -> None:
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        # On a host without an accelerator there is nothing to pin memory for.
        offload_policy: OffloadPolicy = (
            CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if offload else OffloadPolicy()
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
        factor = self._loss_scale.factor if self._loss_scale else 1.0
        for number, micro_batch in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            self._root.set_is_last_backward(is_last)
            self._root.set_requires_gradient_sync(self._stage >= 2 or is_last)
            self._root.set_reshard_after_backward(self._stage == 3 or is_last)
            loss = self.module(**self._to_device(micro_batch), denominator=denominator / factor)
            loss.backward()
            self._loss += loss.detach() / factor
            if self._host is not None:
                self._host.add_up(is_only=self._stage == 1 or len(micro_batches) == 1)

    def _take_grad(self, index: int, parameter: Tensor) -> None:
        """FSDP2 calls it in the backward, on the stream that has reduced ``parameter.grad``."""
        grad = cast(DTensor, parameter.grad).to_local()
        parameter.grad = None
        assert self._host is not None
        self._host.take(index, grad)

    def clip_and_step(self, *, max_norm: float, learning_rate: float) -> StepResult:
        grads = self._host.grads if self._host else [_local_grad(parameter) for parameter in self._parameters]
        sums = torch.tensor([float(self._loss), squared_norm(grads)], dtype=torch.float64)
        if self.device.type != "cpu":
            sums = sums.to(self.device)
        dist.all_reduce(sums)
        loss, squared = sums.tolist()
        result, coefficient = step_result(loss, squared, max_norm=max_norm, loss_scale=self._loss_scale)
        if result.is_finite and self._host is not None:
            self._host.step(learning_rate=learning_rate, clip_coefficient=coefficient)
        elif result.is_finite:
            self._optimizer.step(grads, learning_rate=learning_rate, clip_coefficient=coefficient)
        for parameter in self._parameters:
            parameter.grad = None
        if self._host is not None:
            self._host.clear()
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
        state: dict[str, Tensor] = dict(self.masters)
        for name, exp_avg, exp_avg_sq in zip(
            self._trained, self._optimizer.exp_avgs, self._optimizer.exp_avg_sqs, strict=True
        ):
            plain, master = name.removeprefix("model."), cast(DTensor, self.masters[name])
            state[f"optimizer.exp_avg.{plain}"] = self._like(master, exp_avg)
            state[f"optimizer.exp_avg_sq.{plain}"] = self._like(master, exp_avg_sq)
        state["optimizer.step"] = self._optimizer.step_count
        state.update(self._loss_scale.state() if self._loss_scale else {})
        state.update(persistent_buffers(self.module))
        return state

    def state_loaded(self) -> None:
        """Write the weights anew that were cast from masters on the host; else the masters are what is gathered."""
        if self._host is not None:
            for name, parameter in self.module.named_parameters():
                cast(DTensor, parameter).to_local().detach().copy_(cast(DTensor, self.masters[name]).to_local())

    def _like(self, parameter: DTensor, local: Tensor) -> DTensor:
        """``local`` as a DTensor sharded as ``parameter`` is, sharing its memory, wherever it is."""
        # With the mesh of another device from_local would copy ``local`` there.
        same = local.device.type == parameter.device_mesh.device_type
        return DTensor.from_local(
            local,
            parameter.device_mesh if same else self._host_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def _local_grad(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else cast(DTensor, parameter.grad).to_local()
