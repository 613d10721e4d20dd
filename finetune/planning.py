"""What ``finetune plan`` shows: the stages, what is done, and the memory and disk that each will need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune.pipeline import plan_stages
from finetune.recipe import LoadedRecipe, Stage, check_files_exist
from finetune.stages.base import BASE_MODEL
from finetune.train.settings import TrainSettings


def plan_recipe(loaded: LoadedRecipe) -> dict[str, Any]:
    """The plan as plain values. Reads the recipe's files and the model's configuration; loads no weights.

    Memory is a prediction a rank for training stages (``finetune.engine.memory``); other stages' need is the models'
    sizes. Raises the same errors as a run would before its first stage.
    """
    check_files_exist(loaded)
    config = model_config(loaded)
    stages = []
    for planned in plan_stages(loaded):
        stage = planned.stage
        entry: dict[str, Any] = {
            "name": stage.name,
            "kind": stage.kind,
            "from": stage.input,
            "path": str(loaded.run_dir / stage.folder_name),
            "state": planned.state,
            "differences": list(planned.differences),
        }
        if stage.implementation.run_rank is not None:
            entry |= training_need(loaded, stage, config)
        stages.append(entry)
    recipe = loaded.recipe
    return {
        "recipe": recipe.name,
        "run_dir": str(loaded.run_dir),
        "num_processes": recipe.launch.num_processes,
        "device": recipe.launch.device,
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


def training_need(loaded: LoadedRecipe, stage: Stage, config: Any) -> dict[str, Any]:
    """The predicted memory and disk of a training stage; ``need`` holds the same as lines for a person."""
    from finetune.engine import memory as prediction

    recipe, settings = loaded.recipe, stage.settings
    assert isinstance(settings, TrainSettings)
    assert recipe.launch.num_processes is not None
    assert recipe.launch.device is not None
    memory = prediction.predict_memory(
        config,
        zero=recipe.zero,
        world_size=recipe.launch.num_processes,
        micro_batch_size=settings.micro_batch_size,
        max_seq_length=settings.max_seq_length,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        mixed_precision=settings.mixed_precision,
        checkpointed_every=settings.checkpointed_every,
        device=recipe.launch.device,
        attn_implementation=recipe.model.attn_implementation,
        packing=settings.packing,
    )
    disk = prediction.predict_disk(config, keep_checkpoints=settings.keep_checkpoints, dtype=settings.dtype)
    return {
        "engine": memory.engine,
        "engine_reason": memory.engine_reason,
        "num_parameters": memory.num_parameters,
        "device_bytes_per_rank": memory.device_bytes,
        "host_bytes_per_rank": memory.host_bytes,
        "disk_bytes": disk.total_bytes,
        "need": [*prediction.format_plan(memory).splitlines(), prediction.format_disk(disk)],
    }


def format_plan(plan: dict[str, Any]) -> str:
    """The plan as lines for a terminal."""
    lines = [f"{plan['recipe']}: {plan['num_processes']} process(es) on {plan['device']}, in {plan['run_dir']}", ""]
    width = max(len(stage["name"]) for stage in plan["stages"])
    for index, stage in enumerate(plan["stages"], start=1):
        kind = "" if stage["kind"] == stage["name"] else f"{stage['kind']} "
        lines.append(
            f"  {index:2d}  {stage['name']:<{width}}  {stage['state']:<10}  {kind}from {stage['from'] or 'scratch'}"
        )
        lines += [f"      {'':<{width}}  {difference}" for difference in stage["differences"]]
    for stage in plan["stages"]:
        if "need" in stage:
            lines += ["", f"{stage['name']}:", *(f"  {line}" for line in stage["need"])]
    return "\n".join(lines)
