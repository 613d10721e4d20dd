"""Every process holds the whole state (ZeRO stage 0), or there is only one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from finetune.engine.adamw import AdamW, squared_norm, step_result
from finetune.engine.buckets import GradientBuckets
from finetune.engine.host import HostAdamW
from finetune.engine.loss_scale import LossScale
from finetune.engine.parameters import load_buffers, move_buffers, persistent_buffers, replace_parameters
from finetune.engine.protocol import AdamWSettings, MicroBatch, StepResult
from finetune.engine.weights import load_tensors


class ReplicatedEngine:
    """float32 masters, a compute copy in ``compute_dtype``, and AdamW, all whole on ``device``.

    ``module`` comes with its parameters on the meta device, named as the safetensors in ``folder`` behind ``model.``.
    The copy is cast from the masters once a step, as they are stepped. A micro-batch's gradients are added in float32
    and freed one by one while its backward runs; when one process has one micro-batch there is nothing to add, and they
    stay in ``compute_dtype`` until the optimizer reads them: half the memory for the same numbers. Several processes
    add theirs up in float32 in a few all-reduces that start while the backward runs.

    ``offload_optimizer`` keeps masters and moments on the host and steps there; ``device`` holds the compute copy.
    """

    name = "replicated"

    def __init__(
        self,
        module: nn.Module,
        folder: Path,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        adamw: AdamWSettings,
        offload_optimizer: bool = False,
    ) -> None:
        self.module = module
        self.device = device
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        masters_on = torch.device("cpu") if offload_optimizer else device
        self.masters = {
            name: torch.empty(p.shape, dtype=torch.float32, device=masters_on) for name, p in module.named_parameters()
        }
        load_tensors(folder, {name.removeprefix("model."): master for name, master in self.masters.items()})
        # In float32 the master itself is computed with, unless it stays on the host.
        replace_parameters(module, lambda name, _: self.masters[name].to(device, compute_dtype, copy=offload_optimizer))
        move_buffers(module, device)
        load_buffers(module, folder)
        named = dict(module.named_parameters())
        self._trained = [name for name, parameter in named.items() if parameter.requires_grad]
        self._parameters = [named[name] for name in self._trained]
        masters, is_matrix = [self.masters[name] for name in self._trained], [p.ndim >= 2 for p in self._parameters]
        self._has_copy = compute_dtype != torch.float32 or offload_optimizer
        self._buckets = GradientBuckets([p.shape for p in self._parameters], device) if self._world_size > 1 else None
        self._host: HostAdamW | None = None
        if offload_optimizer:
            self._host = HostAdamW(
                self._parameters,
                masters,
                is_matrix=is_matrix,
                settings=adamw,
                device=device,
                staging_dtype=torch.float32 if self._buckets is not None else compute_dtype,
            )
        self._optimizer = self._host.optimizer if self._host else AdamW(masters, is_matrix=is_matrix, settings=adamw)
        self._loss_scale = LossScale() if compute_dtype == torch.float16 else None
        self._grads: list[Tensor | None] = [None] * len(self._parameters)
        self._adds_in_float32 = True
        self._is_last = True
        self._loss = torch.zeros((), device=device)
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(lambda p, index=index: self._take_grad(index, p))

    def forward_backward(self, micro_batches: Sequence[MicroBatch], *, denominator: float) -> None:
        self.module.train()
        factor = self._loss_scale.factor if self._loss_scale else 1.0
        is_only = len(micro_batches) == 1
        self._adds_in_float32 = not is_only
        for number, micro_batch in enumerate(micro_batches):
            self._is_last = number == len(micro_batches) - 1
            loss = self.module(**self._to_device(micro_batch), denominator=denominator / factor)
            loss.backward()
            self._loss += loss.detach() / factor
            if self._host is not None and self._buckets is None:
                self._host.add_up(is_only=is_only)
        if self._buckets is not None:
            self._buckets.finish()
            self._grads = self._buckets.grads
            if self._host is not None:
                for index, grad in enumerate(self._grads):
                    if grad is not None:
                        self._host.take(index, grad)
                self._host.add_up(is_only=True)
        if self._host is not None:
            self._grads = self._host.grads

    def _take_grad(self, index: int, parameter: Tensor) -> None:
        """Runs in the backward as soon as ``parameter.grad`` of this micro-batch is complete."""
        grad = parameter.grad
        assert grad is not None
        parameter.grad = None
        if self._buckets is not None:
            self._buckets.add(index, grad, is_final=self._is_last)
            return
        if self._host is not None:
            self._host.take(index, grad)
            return
        total = self._grads[index]
        if total is not None:
            total.add_(grad)
        else:
            self._grads[index] = grad.float() if self._adds_in_float32 else grad

    def clip_and_step(self, *, max_norm: float, learning_rate: float) -> StepResult:
        if self._world_size > 1:
            dist.all_reduce(self._loss)
        result, coefficient = step_result(
            float(self._loss), squared_norm(self._grads), max_norm=max_norm, loss_scale=self._loss_scale
        )
        if result.is_finite and self._host is not None:
            self._host.step(learning_rate=learning_rate, clip_coefficient=coefficient)
        elif result.is_finite:
            self._optimizer.step(
                self._grads,
                learning_rate=learning_rate,
                clip_coefficient=coefficient,
                after=self._cast if self._has_copy else None,
            )
        self._grads = [None] * len(self._parameters)
        if self._host is not None:
            self._host.clear()
        if self._buckets is not None:
            self._buckets.clear()
        self._loss = torch.zeros((), device=self.device)
        return result

    def _cast(self, index: int, part: slice, master_N: Tensor) -> None:
        self._parameters[index].data.view(-1)[part].copy_(master_N)

    def forward(self, micro_batch: MicroBatch, **arguments: object) -> Tensor:
        self.module.eval()
        with torch.no_grad():
            result: Tensor = self.module(**self._to_device(micro_batch), **arguments)
            return result

    def _to_device(self, micro_batch: MicroBatch) -> MicroBatch:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in micro_batch.items()}

    def state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = dict(self.masters)
        for name, exp_avg, exp_avg_sq in zip(
            self._trained, self._optimizer.exp_avgs, self._optimizer.exp_avg_sqs, strict=True
        ):
            plain = name.removeprefix("model.")
            state[f"optimizer.exp_avg.{plain}"] = exp_avg
            state[f"optimizer.exp_avg_sq.{plain}"] = exp_avg_sq
        state["optimizer.step"] = self._optimizer.step_count
        state.update(self._loss_scale.state() if self._loss_scale else {})
        state.update(persistent_buffers(self.module))
        return state

    def state_loaded(self) -> None:
        if self._has_copy:
            for name, parameter in self.module.named_parameters():
                parameter.data.copy_(self.masters[name])
