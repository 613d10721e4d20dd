"""Every process holds the whole state (ZeRO stage 0), or there is only one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from finetune.engine.adamw import AdamW, clip_coefficient, squared_norm
from finetune.engine.buckets import GradientBuckets
from finetune.engine.protocol import AdamWSettings, MicroBatch, StepResult
from finetune.engine.weights import load_tensors


class ReplicatedEngine:
    """float32 masters, a compute copy in ``compute_dtype``, and AdamW, all whole on ``device``.

    ``module`` comes with its parameters on the meta device, named as the safetensors in ``folder`` behind ``model.``.
    The copy is cast from the masters once a step, as they are stepped. A micro-batch's gradients are added in float32
    and freed one by one while its backward runs; when one process has one micro-batch there is nothing to add, and they
    stay in ``compute_dtype`` until the optimizer reads them: half the memory for the same numbers. Several processes
    add theirs up in float32 in a few all-reduces that start while the backward runs.
    """

    name = "replicated"

    def __init__(
        self, module: nn.Module, folder: Path, *, device: torch.device, compute_dtype: torch.dtype, adamw: AdamWSettings
    ) -> None:
        self.module = module
        self.device = device
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.masters = {
            name: torch.empty(p.shape, dtype=torch.float32, device=device) for name, p in module.named_parameters()
        }
        load_tensors(folder, {name.removeprefix("model."): master for name, master in self.masters.items()})
        _materialise(module, self.masters, compute_dtype=compute_dtype, device=device)
        self._names = list(self.masters)
        self._parameters = list(module.parameters())
        self._has_copy = compute_dtype != torch.float32
        self._optimizer = AdamW(
            list(self.masters.values()), is_matrix=[p.ndim >= 2 for p in self._parameters], settings=adamw
        )
        self._buckets = GradientBuckets([p.shape for p in self._parameters], device) if self._world_size > 1 else None
        self._grads: list[Tensor | None] = [None] * len(self._parameters)
        self._adds_in_float32 = True
        self._is_last = True
        self._loss = torch.zeros((), device=device)
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(lambda p, index=index: self._take_grad(index, p))

    def forward_backward(self, micro_batches: Sequence[MicroBatch], *, denominator: float) -> None:
        self.module.train()
        self._adds_in_float32 = len(micro_batches) > 1
        for number, micro_batch in enumerate(micro_batches):
            self._is_last = number == len(micro_batches) - 1
            loss = self.module(**self._to_device(micro_batch), denominator=denominator)
            loss.backward()
            self._loss += loss.detach()
        if self._buckets is not None:
            self._buckets.finish()
            self._grads = self._buckets.grads

    def _take_grad(self, index: int, parameter: Tensor) -> None:
        """Runs in the backward as soon as ``parameter.grad`` of this micro-batch is complete."""
        grad = parameter.grad
        assert grad is not None
        parameter.grad = None
        if self._buckets is not None:
            self._buckets.add(index, grad, is_final=self._is_last)
            return
        total = self._grads[index]
        if total is not None:
            total.add_(grad)
        else:
            self._grads[index] = grad.float() if self._adds_in_float32 else grad

    def clip_and_step(self, *, max_norm: float, learning_rate: float) -> StepResult:
        if self._world_size > 1:
            dist.all_reduce(self._loss)
        result = StepResult(loss=float(self._loss), grad_norm=squared_norm(self._grads) ** 0.5)
        if result.is_finite:
            self._optimizer.step(
                self._grads,
                learning_rate=learning_rate,
                clip_coefficient=clip_coefficient(result.grad_norm, max_norm),
                after=self._cast if self._has_copy else None,
            )
        self._grads = [None] * len(self._parameters)
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
            self._names, self._optimizer.exp_avgs, self._optimizer.exp_avg_sqs, strict=True
        ):
            plain = name.removeprefix("model.")
            state[f"optimizer.exp_avg.{plain}"] = exp_avg
            state[f"optimizer.exp_avg_sq.{plain}"] = exp_avg_sq
        state["optimizer.step"] = self._optimizer.step_count
        state.update(persistent_buffers(self.module))
        return state

    def state_loaded(self) -> None:
        if self._has_copy:
            for name, parameter in zip(self._names, self._parameters, strict=True):
                parameter.data.copy_(self.masters[name])


def _materialise(
    module: nn.Module, masters: dict[str, Tensor], *, compute_dtype: torch.dtype, device: torch.device
) -> None:
    """Replace each meta parameter, under all its names, by its compute copy (float32: the master itself)."""
    replacements = {
        parameter: nn.Parameter(masters[name].to(compute_dtype), requires_grad=parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = replacements[parameter]
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """{``buffer.<name>``: buffer} of the buffers that a model's files hold; others follow from the configuration."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {
        f"buffer.{name.removeprefix('model.')}": tensor
        for name, tensor in module.state_dict().items()
        if name not in parameters
    }
