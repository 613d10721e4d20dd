"""Sharded state through DeepSpeed (an extra): ZeRO stages 0 to 3 and every offload that it does exactly."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import types
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from finetune.engine.adamw import squared_norm
from finetune.engine.choice import require_installed
from finetune.engine.deepspeed_adamw import KEYS, MASTER, Partitions, ShardAdamW
from finetune.engine.deepspeed_config import LOSS_SCALE_WINDOW, deepspeed_config, refusal
from finetune.engine.parameters import load_buffers, move_buffers, persistent_buffers
from finetune.engine.protocol import AdamWSettings, MicroBatch, StepResult
from finetune.engine.settings import ZeroSettings
from finetune.engine.weights import load_tensors
from finetune.errors import MissingDependencyError, RecipeError

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class DeepSpeedEngine:
    """DeepSpeed partitions, communicates and offloads; ``ShardAdamW`` steps what it partitioned.

    ``module`` comes with its parameters on the meta device, named as the safetensors in ``folder`` behind ``model.``.
    Stages 1 and 2 hold the weights whole in ``compute_dtype``, stage 3 a part of each; masters and moments are parts of
    flat float32 tensors. DeepSpeed's averages over ranks and micro-batches are undone, so that gradients are sums.
    Stage 0 has no partitions: the parameters are the masters.

    Loading holds one parameter whole at a time in stage 3, above the partitions; in the other stages the whole model in
    ``compute_dtype``, twice while DeepSpeed moves it into its flat tensors.
    """

    name = "deepspeed"

    def __init__(
        self,
        module: nn.Module,
        folder: Path,
        *,
        zero: ZeroSettings,
        device: torch.device,
        compute_dtype: torch.dtype,
        adamw: AdamWSettings,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        if why := refusal(zero, precision=PRECISIONS[compute_dtype]):
            raise RecipeError(f"DeepSpeed can't do this exactly: {why}", where="zero", fix="set zero.engine: auto")
        self.module = module
        self.device = device
        self._stage = zero.stage
        self._world_size = dist.get_world_size()
        self._mesh = init_device_mesh("cpu", (self._world_size,))
        self._loss = torch.zeros((), device=device)
        self._last_state: dict[str, Tensor] | None = None
        self._own_norm = 0.0
        with _imported(device.type) as deepspeed:
            config = deepspeed_config(
                zero,
                precision=PRECISIONS[compute_dtype],
                gradient_accumulation_steps=gradient_accumulation_steps,
                world_size=self._world_size,
                device=device.type,
            )
            deepspeed.init_distributed(dist_init_required=False, verbose=False)
            if zero.offload.optimizer == "nvme":
                _load_async_io()
            self._materialise(deepspeed, folder, config, compute_dtype)
            self._names: dict[Tensor, str] = {
                parameter: name.removeprefix("model.") for name, parameter in module.named_parameters()
            }
            self._optimizer = ShardAdamW(_groups(module, adamw), settings=adamw, grad_norm=self._grad_norm)
            with _accepted_for_ratio():
                self._engine: Any = deepspeed.initialize(
                    model=module, optimizer=self._optimizer, config=config, dist_init_required=False
                )[0]
        self._partitions: Partitions | None = None
        self._frozen: dict[str, Tensor] = {}
        if self._engine.optimizer is self._optimizer:
            self._optimizer.make_moments()
        else:
            self._zero: Any = self._engine.optimizer
            if hasattr(self._zero, "backup_optimizer"):
                # Of `offload.ratio`: what stays on the device is stepped by the same optimizer.
                self._zero.backup_optimizer = self._optimizer
            self._partitions = Partitions(self._zero, self._optimizer, stage=zero.stage)
            self._load_masters(folder, is_cast=compute_dtype != torch.float32)
        self._is_scaled = compute_dtype == torch.float16
        if self._is_scaled:
            # At the smallest scale an overflow is reported as a gradient that isn't finite, as everywhere.
            self._zero.loss_scaler.raise_error_at_min_scale = False

    def _materialise(self, deepspeed: Any, folder: Path, config: dict[str, Any], compute_dtype: torch.dtype) -> None:
        """Read the parameters one by one in ``compute_dtype``; stage 3 gives each up but for this rank's part."""
        move_buffers(self.module, self.device)
        owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for owner in self.module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    owners.setdefault(parameter, []).append((owner, name))
        for name, meta in list(self.module.named_parameters()):
            value = torch.empty(meta.shape, dtype=compute_dtype, device=self.device)
            load_tensors(folder, {name.removeprefix("model."): value})
            parameter = nn.Parameter(value, requires_grad=meta.requires_grad)
            if self._stage == 3:
                deepspeed.zero.Init(module=nn.ParameterList([parameter]), config_dict_or_path=config)
            for owner, key in owners[meta]:
                owner._parameters[key] = parameter
        load_buffers(self.module, folder)
        if self._stage == 3:
            _keep_no_weights(self.module)
            for child in self.module.children():
                if isinstance(child, PreTrainedModel):
                    # The loss uses the head's weight outside the head, so it is to be whole there.
                    head = cast(nn.Linear, child.get_output_embeddings())
                    deepspeed.zero.register_external_parameter(self.module, head.weight)

    def _load_masters(self, folder: Path, *, is_cast: bool) -> None:
        """DeepSpeed made the masters from the compute weights; where these are shorter, read the files' own values."""
        assert self._partitions is not None
        for parameter, name in self._names.items():
            if not parameter.requires_grad:
                self._frozen[name] = self._own_rows(torch.empty(_shape(parameter), dtype=torch.float32, device="meta"))
                load_tensors(folder, {name: self._frozen[name]})

        def stored(parameter: Tensor, key: str) -> Tensor:
            whole = torch.empty(_shape(parameter), dtype=torch.float32, device=self.device)
            load_tensors(folder, {self._names[parameter]: whole})
            return whole

        if is_cast:
            self._partitions.write(stored, keys=(MASTER,))

    def forward_backward(self, micro_batches: Sequence[MicroBatch], *, denominator: float) -> None:
        self._last_state = None
        self._engine.train()
        # The loss forms its gradients in the forward: in float16 they must be scaled there, or the small ones vanish.
        factor = float(self._zero.loss_scale) if self._is_scaled else 1.0
        for number, micro_batch in enumerate(micro_batches):
            self._engine.set_gradient_accumulation_boundary(number == len(micro_batches) - 1)
            loss = self._engine(**self._to_device(micro_batch), denominator=denominator / factor) / factor
            # DeepSpeed multiplies by the scale, which takes the second `factor` away, and divides by the number of
            # ranks as it reduces. Micro-batches it would average here.
            self._engine.backward(loss * self._world_size, scale_wrt_gas=False)
            self._loss += loss.detach()

    def clip_and_step(self, *, max_norm: float, learning_rate: float) -> StepResult:
        dist.all_reduce(self._loss)
        loss = float(self._loss)
        self._loss = torch.zeros((), device=self.device)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.max_norm = max_norm
        self._optimizer.is_held = not StepResult(loss=loss, grad_norm=0.0).is_finite
        scale = self._zero.loss_scale if self._is_scaled else 1.0
        if self._partitions is None:
            self._own_norm = squared_norm([parameter.grad for parameter in self._names]) ** 0.5
            self._optimizer.is_held |= not StepResult(loss=loss, grad_norm=self._own_norm).is_finite
        self._engine.step()
        result = StepResult(
            loss=loss,
            grad_norm=self._grad_norm(),
            is_skipped=self._is_scaled and not self._optimizer.is_held and self._zero.loss_scale < scale,
        )
        if result.is_finite:
            self._optimizer.step_count += 1
        elif self._partitions is not None:
            self._partitions.drop_gradients()
        self._optimizer.is_held = False
        return result

    def _grad_norm(self) -> float:
        return self._own_norm if self._partitions is None else float(self._zero._global_grad_norm)

    def forward(self, micro_batch: MicroBatch, **arguments: object) -> Tensor:
        self._engine.eval()
        with torch.no_grad():
            result: Tensor = self._engine(**self._to_device(micro_batch), **arguments)
        return result

    def _to_device(self, micro_batch: MicroBatch) -> MicroBatch:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in micro_batch.items()}

    def state(self) -> dict[str, Tensor]:
        """As the protocol has it, but for stage 0 masters and moments are copies: this rank's rows, on the host."""
        state: dict[str, Tensor] = {f"model.{name}": rows for name, rows in self._frozen.items()}
        if self._partitions is not None:
            for parameter, key, whole in self._partitions.read():
                state[_state_name(self._names[parameter], key)] = self._own_rows(whole)
        else:
            for parameter, name in self._names.items():
                state[f"model.{name}"] = parameter.detach()
                for moment, value in self._optimizer.state[parameter].items() if parameter.requires_grad else ():
                    state[_state_name(name, moment)] = value
        state["optimizer.step"] = self._optimizer.step_count
        if self._is_scaled:
            state["optimizer.loss_scale"] = torch.tensor(float(self._zero.loss_scale))
            state["optimizer.good_steps"] = torch.tensor(float(_good_steps(self._zero.loss_scaler)))
        state.update(persistent_buffers(self.module))
        self._last_state = state
        return state

    def state_loaded(self) -> None:
        assert self._last_state is not None, "state() comes first, and no step between"
        state, self._last_state = self._last_state, None
        if self._partitions is None:
            return
        self._partitions.write(
            lambda parameter, key: _whole(state[_state_name(self._names[parameter], key)]).to(self.device), keys=KEYS
        )
        for parameter, name in self._names.items():
            if not parameter.requires_grad:
                self._set_frozen(parameter, _whole(state[f"model.{name}"]))
        if self._is_scaled:
            scaler = self._zero.loss_scaler
            scaler.cur_scale = float(state["optimizer.loss_scale"])
            scaler.cur_iter, scaler.last_overflow_iter = 0, -1 - int(state["optimizer.good_steps"])

    def _own_rows(self, whole: Tensor) -> Tensor:
        """A copy of this rank's rows on the host, dealt out as torch's FSDP2 does; a scalar is whole everywhere."""
        if whole.ndim == 0:
            rows, local = whole, torch.empty((), dtype=whole.dtype, device="cpu")
        else:
            shape, offset = compute_local_shape_and_global_offset(whole.shape, self._mesh, [Shard(0)])
            rows, local = whole[offset[0] : offset[0] + shape[0]], torch.empty(shape, dtype=whole.dtype, device="cpu")
        if whole.device.type != "meta":
            local.copy_(rows)
        if whole.ndim == 0:
            return local
        return DTensor.from_local(
            local, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def _set_frozen(self, parameter: Tensor, master: Tensor) -> None:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self._stage == 3), torch.no_grad():
            parameter.copy_(master)


@contextlib.contextmanager
def _imported(device: str) -> Iterator[Any]:
    """DeepSpeed, loaded for ``device``; within it prints nothing to stdout, and after it only errors."""
    require_installed("deepspeed")
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # A process alone has no launcher that sets it.
    os.environ.setdefault("LOCAL_RANK", "0")
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed

        logger = logging.getLogger("DeepSpeed")
        logger.setLevel(logging.ERROR)
        if device == "cpu":
            # A reduction through shared memory, for inference: it would be compiled for half a minute.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        yield deepspeed


@contextlib.contextmanager
def _accepted_for_ratio() -> Iterator[None]:
    """Let our optimizer pass where ``offload.ratio`` asks for the very type DeepSpeedCPUAdam.

    DeepSpeed asks for it because it steps the device's part by torch's AdamW, with the first group's settings.
    """
    from deepspeed.runtime.zero import stage3

    asked = stage3.DeepSpeedCPUAdam
    stage3.DeepSpeedCPUAdam = ShardAdamW
    try:
        yield
    finally:
        stage3.DeepSpeedCPUAdam = asked


def _load_async_io() -> None:
    """Compile, or find compiled, what DeepSpeed reads and writes nvme with. The first rank of each machine goes first:
    ranks that wait for an interrupted compilation's lock would wait forever, here they time out."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    if builder is None or not builder.is_compatible():
        raise MissingDependencyError(
            "DeepSpeed's async_io, which offloads to nvme, needs libaio and its headers",
            where="zero.offload",
            fix="apt-get install libaio-dev, or dnf install libaio-devel",
        )
    is_first = os.environ["LOCAL_RANK"] == "0"
    for is_turn in (is_first, not is_first):
        if is_turn:
            builder.load(verbose=False)
        dist.barrier()


def _groups(module: nn.Module, settings: AdamWSettings) -> list[dict[str, Any]]:
    """Matrices decay; vectors don't."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if len(_shape(parameter)) >= 2]
    vectors = [parameter for parameter in trained if len(_shape(parameter)) < 2]
    groups = ((matrices, settings.weight_decay), (vectors, 0.0))
    return [{"params": chosen, "weight_decay": decay} for chosen, decay in groups if chosen]


def _shape(parameter: Any) -> torch.Size:
    """The shape of the whole parameter, which stage 3 has emptied."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _keep_no_weights(module: nn.Module) -> None:
    """Let linear layers save their weight for the backward as the parameter itself.

    torch's own saves a transposed view, which would keep each gathered weight until the backward has used it.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    def forward(layer: nn.Linear, input: Tensor) -> Tensor:
        output: Tensor = zero3_linear_wrap(input, layer.weight, layer.bias)
        return output

    for layer in module.modules():
        if type(layer) is nn.Linear and (layer.weight.dtype, layer.weight.device.type) != (torch.bfloat16, "cpu"):
            layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]


def _good_steps(scaler: Any) -> int:
    """Steps since the scale last changed, up to the window: at its end the scale is about to be doubled."""
    steps = scaler.cur_iter - scaler.last_overflow_iter - 1
    return (steps - 1) % LOSS_SCALE_WINDOW + 1 if steps > 0 else 0


def _state_name(name: str, key: str) -> str:
    return f"model.{name}" if key == MASTER else f"optimizer.{key}.{name}"


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
