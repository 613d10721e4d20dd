"""The one function from a recipe's values to DeepSpeed's configuration, as a table; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from finetune.engine.deepspeed import DeepSpeedEngine
from finetune.engine.deepspeed_config import deepspeed_config, refusal
from finetune.engine.protocol import AdamWSettings
from finetune.engine.settings import ZeroSettings
from finetune.errors import RecipeError

NVME = {"nvme_path": "/fast"}


def settings(stage: int, **offload: Any) -> ZeroSettings:
    return ZeroSettings.model_validate({"stage": stage, "engine": "deepspeed", "offload": offload})


def config(zero: ZeroSettings, **changes: Any) -> dict[str, Any]:
    values = {"precision": "bf16", "gradient_accumulation_steps": 1, "world_size": 2, "device": "cuda"}
    return deepspeed_config(zero, **{**values, **changes})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("accumulation", "world_size"), [(1, 1), (4, 2), (3, 8)])
def test_batches_and_what_never_changes(stage, accumulation, world_size):
    found = config(settings(stage), gradient_accumulation_steps=accumulation, world_size=world_size)
    assert found["train_batch_size"] == accumulation * world_size
    assert found["gradient_accumulation_steps"] == accumulation
    assert found["train_micro_batch_size_per_gpu"] == 1
    assert found["zero_optimization"]["stage"] == stage
    # Ours alone clips and decays; gradients are float32 once they leave the backward.
    assert found["gradient_clipping"] == 0.0
    assert "optimizer" not in found
    assert found["communication_data_type"] == found["data_types"]["grad_accum_dtype"] == "fp32"
    assert not found["zero_optimization"]["overlap_comm"]
    assert not found["zero_force_ds_cpu_optimizer"]
    assert ("stage3_param_persistence_threshold" in found["zero_optimization"]) == (stage == 3)


@pytest.mark.parametrize(("precision", "bf16", "fp16"), [("fp32", 0, 0), ("bf16", 1, 0), ("fp16", 0, 1)])
def test_precision(precision, bf16, fp16):
    found = config(settings(2), precision=precision)
    assert (found["bf16"]["enabled"], found["fp16"]["enabled"]) == (bool(bf16), bool(fp16))
    # 0 asks for a scale that adapts; it begins and grows as our own engines' does.
    assert (found["fp16"]["loss_scale"], found["fp16"]["initial_scale_power"]) == (0, 16)
    assert (found["fp16"]["loss_scale_window"], found["fp16"]["hysteresis"]) == (2000, 1)


@pytest.mark.parametrize(
    ("offload", "optimizer", "parameters"),
    [
        ({}, None, None),
        ({"optimizer": "cpu"}, {"device": "cpu"}, None),
        ({"optimizer": "cpu", "ratio": 0.3}, {"device": "cpu", "ratio": 0.3}, None),
        ({"optimizer": "cpu", "parameters": "cpu"}, {"device": "cpu"}, {"device": "cpu"}),
        ({"parameters": "cpu"}, None, {"device": "cpu"}),
        ({"optimizer": "nvme", **NVME}, {"device": "nvme", **NVME}, None),
        ({"optimizer": "nvme", "parameters": "cpu", **NVME}, {"device": "nvme", **NVME}, {"device": "cpu"}),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_offload(offload, optimizer, parameters, device):
    found = config(settings(3, **offload), device=device)["zero_optimization"]
    pinned = {"pin_memory": device == "cuda"}
    assert found.get("offload_optimizer") == (None if optimizer is None else {**optimizer, **pinned})
    assert found.get("offload_param") == (None if parameters is None else {**parameters, **pinned})
    # The ratio is of whole sub-groups, so these are small then.
    assert ("sub_group_size" in found) == ("ratio" in offload)


def test_deepspeed_reads_every_key():
    """A misspelt key of ``zero_optimization`` is an error of DeepSpeed's; it ignores others without a word."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    found = config(settings(3, optimizer="nvme", parameters="cpu", **NVME))["zero_optimization"]
    read = DeepSpeedZeroConfig(**found)
    assert read.param_persistence_threshold == found["stage3_param_persistence_threshold"]
    assert str(read.offload_optimizer.nvme_path) == "/fast"
    assert read.memory_efficient_linear is False


@pytest.mark.parametrize(
    ("zero", "precision", "reason"),
    [
        (settings(0, optimizer="cpu"), "fp32", "from stage 1 on"),
        (settings(0), "bf16", "not in float32"),
        (settings(0), "fp16", "not in float32"),
        (settings(3, parameters="nvme", **NVME), "bf16", "nvme"),
        (settings(3, optimizer="nvme", parameters="nvme", **NVME), "fp32", "nvme"),
    ],
)
def test_refused_before_anything_is_loaded(zero, precision, reason):
    assert reason in (refusal(zero, precision=precision) or "")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with pytest.raises(RecipeError, match="can't do this exactly"):
        DeepSpeedEngine(
            nn.Linear(2, 2),
            Path("/nowhere"),
            zero=zero,
            device=torch.device("cpu"),
            compute_dtype=dtype,
            adamw=AdamWSettings(),
        )


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (1, {}),
        (1, {"optimizer": "cpu"}),
        (2, {"optimizer": "cpu"}),
        (3, {"parameters": "cpu"}),
        (3, {"optimizer": "cpu", "ratio": 0.5}),
        (3, {"optimizer": "nvme", **NVME}),
    ],
)
def test_allowed(stage, offload):
    for precision in ("fp32", "bf16", "fp16"):
        assert refusal(settings(stage, **offload), precision=precision, gradient_accumulation_steps=4) is None
    assert refusal(settings(0), precision="fp32") is None
