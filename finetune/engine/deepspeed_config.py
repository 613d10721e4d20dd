"""DeepSpeed's configuration, from a recipe's values alone, and what it can't do exactly. Loads neither it nor torch."""

from __future__ import annotations

from typing import Any

from finetune.engine.settings import ZeroSettings

REDUCE_BUCKET_ELEMENTS = 50_000_000
"""Gradients that are reduced together: 200 MB in float32. DeepSpeed's own 500 million would take 2 GB of a device."""
RATIO_GROUP_ELEMENTS = 10_000_000
"""DeepSpeed deals the optimizer's state out to device and host by whole groups of about so many elements of a rank."""
PERSISTENT_ELEMENTS = 10_000
"""Below this a parameter stays whole on every rank in stage 3: norms and biases, not worth a gather each."""
LOSS_SCALE_POWER = 16
LOSS_SCALE_WINDOW = 2000


def deepspeed_config(
    zero: ZeroSettings,
    *,
    precision: str,
    gradient_accumulation_steps: int,
    world_size: int,
    device: str,
) -> dict[str, Any]:
    """The dictionary that ``deepspeed.initialize`` takes. What the optimizer does is no part of it: see ``ShardAdamW``.

    ``precision``: fp32, bf16 or fp16; in each gradients are reduced and added up in float32. Clipping is left to
    the optimizer: DeepSpeed's divides by the norm plus 1e-6, and its stage 3 isn't given ``gradient_clipping`` at all
    (0.19.8). ``overlap_comm`` is off: the reductions that it starts early were the source of wrong gradients more than
    once (DeepSpeed's issues 966, 7967), and a race is nothing that a test here would find.
    """
    offload = zero.offload
    pin_memory = device != "cpu"
    zero_optimization: dict[str, Any] = {
        "stage": zero.stage,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
        "allgather_bucket_size": REDUCE_BUCKET_ELEMENTS,
        # It would replace torch.nn.functional.linear for the whole process; the engine replaces the module's own.
        "memory_efficient_linear": False,
    }
    if zero.stage == 3:
        zero_optimization["stage3_param_persistence_threshold"] = PERSISTENT_ELEMENTS
    if offload.optimizer != "none":
        zero_optimization["offload_optimizer"] = {"device": offload.optimizer, "pin_memory": pin_memory}
    if offload.optimizer == "nvme":
        zero_optimization["offload_optimizer"]["nvme_path"] = offload.nvme_path
    if offload.ratio < 1:
        zero_optimization["offload_optimizer"]["ratio"] = offload.ratio
        zero_optimization["sub_group_size"] = RATIO_GROUP_ELEMENTS
    if offload.parameters != "none":
        zero_optimization["offload_param"] = {"device": offload.parameters, "pin_memory": pin_memory}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "train_batch_size": gradient_accumulation_steps * world_size,
        "zero_optimization": zero_optimization,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": precision == "bf16", "check_grad_overflow": True},
        "fp16": {
            "enabled": precision == "fp16",
            "loss_scale": 0,
            "initial_scale_power": LOSS_SCALE_POWER,
            "loss_scale_window": LOSS_SCALE_WINDOW,
            "hysteresis": 1,
            "min_loss_scale": 1,
        },
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


def refusal(zero: ZeroSettings, *, precision: str, gradient_accumulation_steps: int = 1) -> str | None:
    """Why DeepSpeed (0.19.8) can't do exactly what is asked; None where it can. ``precision``: fp32, bf16 or fp16.

    Accumulation makes no difference: what earlier versions lost with offload and several micro-batches (issues 966,
    7967) is right with float32 accumulation and without ``overlap_comm``; tests/test_engine_deepspeed.py.
    """
    if zero.stage == 0 and zero.offload.optimizer != "none":
        return "at stage 0 it ignores `offload.optimizer`; it offloads from stage 1 on"
    if zero.offload.parameters == "nvme":
        return "its swapping of parameters to nvme runs out of its own buffers (`Not enough buffers 0 for swapping 1`)"
    if zero.stage == 0 and precision != "fp32":
        return f"at stage 0 it adds up and reduces gradients in {precision}, not in float32"
    return None
