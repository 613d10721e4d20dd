"""What ``finetune plan`` shows: the stages, what is done, the memory and disk that each needs, and what would fit."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finetune.engine.choice import INSTALL_DEEPSPEED
from finetune.engine.settings import LaunchSettings
from finetune.errors import RecipeError
from finetune.pipeline import plan_stages
from finetune.recipe import LoadedRecipe, Stage, check_files_exist
from finetune.stages.base import BASE_MODEL
from finetune.train.settings import TrainSettings

GPUS_ASSUMED = 8
"""Ranks on a machine of a cluster that isn't this machine, where the recipe doesn't say ``launch.num_processes``."""


@dataclass(frozen=True)
class Machines:
    """Where the plan's ranks run, and what each may use there; None: not known."""

    device: Literal["cpu", "cuda"]
    world_size: int
    ranks_per_machine: int
    gpu_bytes: int | None
    """Of one GPU."""
    cpu_bytes: int | None
    """Of one machine."""
    assumed: tuple[str, ...] = ()

    @property
    def host_bytes_per_rank(self) -> int | None:
        return None if self.cpu_bytes is None else self.cpu_bytes // self.ranks_per_machine


def plan_machines(
    launch: LaunchSettings, *, world_size: int | None, gpu_bytes: int | None, cpu_bytes: int | None
) -> Machines:
    """Fill in from this machine what neither the recipe nor the flags say; what is taken for granted is listed.

    Raises RecipeError for a GPU's memory beside a recipe that trains on the cpu.
    """
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assumed = []
    device = launch.device or ("cuda" if num_gpus or gpu_bytes else "cpu")
    if device == "cpu" and gpu_bytes is not None:
        raise RecipeError(
            "the recipe trains on the cpu, where a GPU's memory means nothing",
            where="--gpu-memory",
            fix="plan for GPUs with --set launch.device=cuda",
        )
    here = device == "cpu" or num_gpus > 0
    if not here:
        assumed.append("there is no GPU here: planned for cuda elsewhere")
    processes = launch.num_processes or (num_gpus if device == "cuda" and num_gpus else None)
    world_size = world_size or processes or 1
    if processes is None and device == "cuda" and world_size > 1:
        processes = GPUS_ASSUMED
        assumed.append(f"{min(world_size, GPUS_ASSUMED)} ranks a machine: launch.num_processes doesn't say")
    ranks_per_machine = min(world_size, processes or world_size)
    if device == "cuda" and gpu_bytes is None and num_gpus:
        gpu_bytes = min(torch.cuda.get_device_properties(number).total_memory for number in range(num_gpus))
    if cpu_bytes is None and here:
        cpu_bytes = memory_of_this_machine()
    return Machines(device, world_size, ranks_per_machine, gpu_bytes, cpu_bytes, tuple(assumed))


def memory_of_this_machine() -> int:
    """Bytes of memory, or of this process's control group where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def plan_recipe(
    loaded: LoadedRecipe,
    *,
    world_size: int | None = None,
    gpu_bytes: int | None = None,
    cpu_bytes: int | None = None,
) -> dict[str, Any]:
    """The plan as plain values, named in docs/plan.md. Reads the recipe's files and the model's configuration.

    Memory is a prediction a rank for training stages (``finetune.engine.memory``). Raises the same errors as a run
    would before its first stage, but for an engine or a device that isn't there: those are noted.
    """
    check_files_exist(loaded)
    config = model_config(loaded)
    machines = plan_machines(loaded.recipe.launch, world_size=world_size, gpu_bytes=gpu_bytes, cpu_bytes=cpu_bytes)
    stages = []
    for planned in plan_stages(loaded):
        stage = planned.stage
        entry: dict[str, Any] = {
            "name": stage.name,
            "kind": stage.kind,
            "from": stage.input,
            "models": list(dict.fromkeys(stage.extra_inputs)) or ([stage.input] if stage.input else []),
            "path": str(loaded.run_dir / stage.folder_name),
            "state": planned.state,
            "differences": list(planned.differences),
        }
        if stage.implementation.run_rank is not None:
            entry |= training_need(loaded, stage, config, machines)
        stages.append(entry)
    answers = [stage["fits"] for stage in stages if "fits" in stage]
    return {
        "recipe": loaded.recipe.name,
        "run_dir": str(loaded.run_dir),
        "device": machines.device,
        "world_size": machines.world_size,
        "ranks_per_machine": machines.ranks_per_machine,
        "gpu_memory_bytes": machines.gpu_bytes,
        "cpu_memory_bytes": machines.cpu_bytes,
        "assumed": list(machines.assumed),
        "fits": False if False in answers else None if None in answers else True,
        "stages": stages,
    }


def model_config(loaded: LoadedRecipe) -> Any:
    """The configuration of the recipe's model, from its folder or from the ``scratch`` settings."""
    from finetune.model.load import load_config
    from finetune.model.scratch import scratch_config
    from finetune.worker import model_folder

    scratch = loaded.recipe.model.scratch
    if scratch is None:
        return load_config(model_folder(loaded, BASE_MODEL))
    return scratch_config(scratch.config, PlannedTokenizer(scratch.tokenizer.vocab_size))  # type: ignore[arg-type]


@dataclass(frozen=True)
class PlannedTokenizer:
    """What a configuration needs to know of a tokenizer that isn't trained yet."""

    vocab_size: int
    bos_token_id: int = 0
    eos_token_id: int = 0
    pad_token_id: int = 0

    def __len__(self) -> int:
        return self.vocab_size


def training_need(loaded: LoadedRecipe, stage: Stage, config: Any, machines: Machines) -> dict[str, Any]:
    """The predicted memory and disk of a training stage, and what would make it fit."""
    from finetune.engine.deepspeed_config import refusal
    from finetune.engine.memory import MOMENTS, Workload, model_size, predict_disk, predict_memory
    from finetune.engine.memory_advice import Advice, Limits, advise
    from finetune.train.loss import BLOCK_ELEMENTS

    recipe, settings = loaded.recipe, stage.settings
    assert isinstance(settings, TrainSettings)
    workload = Workload(
        zero=recipe.zero,
        world_size=machines.world_size,
        micro_batch_size=settings.micro_batch_size,
        max_seq_length=settings.max_seq_length,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        mixed_precision=settings.mixed_precision,
        checkpointed_every=settings.checkpointed_every,
        activation_offload=settings.activation_offload,
        device=machines.device,
        attn_implementation=recipe.model.attn_implementation,
        packing=settings.packing,
        loss_block_elements=BLOCK_ELEMENTS,
    )
    size = model_size(config)
    num_blocks = getattr(config.get_text_config(), "num_hidden_layers", None)
    if num_blocks is not None and (settings.checkpointed_every or 0) > num_blocks:
        raise RecipeError(
            f"the model has {num_blocks} blocks, so every {settings.checkpointed_every}th is none",
            where=f"stages.{stage.name}.gradient_checkpointing",
            fix="set gradient_checkpointing to none, full, or a smaller number",
        )
    memory = predict_memory(config, workload, size=size)
    disk = predict_disk(config, keep_checkpoints=settings.keep_checkpoints, dtype=settings.dtype, size=size)
    limits = Limits(machines.gpu_bytes, machines.host_bytes_per_rank)
    fits = limits.fits(memory)
    advice = advise(config, workload, limits, size=size) if fits is False else Advice((), None)
    notes = []
    if memory.engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        notes.append(f"DeepSpeed isn't installed here: {INSTALL_DEEPSPEED}")
    if memory.engine == "deepspeed" and (why := refusal(recipe.zero, precision=settings.mixed_precision)):
        notes.append(f"DeepSpeed can't do this exactly, so a run refuses it: {why}")

    def change(found: Any) -> dict[str, Any]:
        return {
            "settings": found.settings,
            "device_bytes_per_rank": found.plan.device_bytes,
            "host_bytes_per_rank": found.plan.host_bytes,
            "nvme_bytes_per_rank": found.plan.nvme_bytes,
        }

    return {
        "engine": memory.engine,
        "engine_reason": memory.engine_reason,
        "notes": notes,
        "num_parameters": memory.num_parameters,
        "parts": [
            {
                "name": item.name,
                "num_bytes": item.num_bytes,
                "place": item.place,
                "moments": [moment for moment in MOMENTS if moment in item.moments],
                "note": item.note,
            }
            for item in memory.items
        ],
        "peak_moments": {place: memory.peak(place)[1] for place in ("device", "host")},  # type: ignore[arg-type]
        "device_bytes_per_rank": memory.device_bytes,
        "host_bytes_per_rank": memory.host_bytes,
        "nvme_bytes_per_rank": memory.nvme_bytes,
        "device_limit_bytes_per_rank": limits.device_bytes,
        "host_limit_bytes_per_rank": limits.host_bytes,
        "fits": fits,
        "changes": [change(found) for found in advice.changes],
        "closest": None if advice.closest is None else change(advice.closest),
        "disk_bytes": disk.total_bytes,
        "checkpoint_bytes": disk.checkpoint_bytes,
        "num_checkpoints": disk.num_checkpoints,
        "model_bytes": disk.model_bytes,
    }
