"""Choose the engine that a recipe's ``zero:`` section asks for, and build it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from finetune.engine.choice import choose_engine, require_installed
from finetune.engine.fsdp2 import Fsdp2Engine
from finetune.engine.host_memory import give_back_large_memory
from finetune.engine.protocol import AdamWSettings, Engine
from finetune.engine.replicated import ReplicatedEngine
from finetune.engine.settings import ZeroSettings
from finetune.errors import RecipeError


def build_engine(
    module: nn.Module,
    model: PreTrainedModel,
    folder: Path,
    *,
    zero: ZeroSettings,
    device: str,
    compute_dtype: torch.dtype,
    adamw: AdamWSettings,
    gradient_accumulation_steps: int = 1,
) -> tuple[Engine, str]:
    """(engine, why this one). ``module`` wraps ``model``, whose parameters are on the meta device; ``folder`` has them.

    Raises CheckpointError when the folder's weights aren't the model's, MissingDependencyError for an engine that isn't
    installed.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    name, reason = choose_engine(zero, world_size=world_size, device=device)
    require_installed(name)
    torch_device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    offload = zero.offload
    if name == "replicated":
        return ReplicatedEngine(
            module,
            folder,
            device=torch_device,
            compute_dtype=compute_dtype,
            adamw=adamw,
            offload_optimizer=offload.optimizer == "cpu" and offload.parameters == "none",
        ), reason
    if name == "deepspeed":
        from finetune.engine.deepspeed import DeepSpeedEngine

        engine: Engine = DeepSpeedEngine(
            module,
            folder,
            zero=zero,
            device=torch_device,
            compute_dtype=compute_dtype,
            adamw=adamw,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )
        return engine, reason
    if device == "cpu":
        give_back_large_memory()
    engine = Fsdp2Engine(
        module,
        folder,
        blocks=decoder_blocks(model),
        stage=zero.stage,
        offload_parameters=offload.parameters == "cpu",
        offload_optimizer=offload.optimizer == "cpu" and offload.parameters == "none",
        device=torch_device,
        compute_dtype=compute_dtype,
        adamw=adamw,
    )
    return engine, reason


def decoder_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The model's repeated blocks, as its class names them. Raises RecipeError when it names none that are there."""
    kinds = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in kinds]
    if not blocks:
        raise RecipeError(
            f"{type(model).__name__} doesn't say which of its modules are its blocks, so it can't be sharded by block",
            where="zero.stage",
            fix="set zero.stage: 0",
        )
    return blocks


def needs_process_group(zero: ZeroSettings, device: str) -> bool:
    """Whether a process alone needs a group of its own: FSDP2 and DeepSpeed run in one."""
    return choose_engine(zero, world_size=1, device=device)[0] in ("fsdp2", "deepspeed")
