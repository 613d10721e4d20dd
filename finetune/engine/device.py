"""Which device a run uses, and how many processes."""

from __future__ import annotations

import torch

from finetune.engine.settings import LaunchSettings
from finetune.errors import RecipeError, ResourceError


def choose_device(device: str | None) -> str:
    """``device``, or cuda where there is one, else cpu. Raises RecipeError for a cuda that isn't there."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise RecipeError("this machine has no usable GPU", where="launch.device", fix="set launch.device: cpu")
    return device


def resolve_launch(launch: LaunchSettings) -> LaunchSettings:
    """``launch`` with device and num_processes filled in: one process a GPU, or one.

    Raises RecipeError for a cuda that isn't there, ResourceError for more processes than GPUs.
    """
    device = choose_device(launch.device)
    num_gpus = torch.cuda.device_count() if device == "cuda" else 0
    num_processes = launch.num_processes or max(1, num_gpus)
    require_gpus(num_processes, device, where="launch.num_processes")
    return launch.model_copy(update={"device": device, "num_processes": num_processes})


def require_gpus(num_processes: int, device: str, *, where: str) -> None:
    """Raise ResourceError, naming the setting ``where``, for more processes on cuda than GPUs."""
    if device == "cuda" and num_processes > (num_gpus := torch.cuda.device_count()):
        raise ResourceError(
            f"{num_processes} processes need as many GPUs, there are {num_gpus}",
            where=where,
            fix=f"set {where} to at most {num_gpus}",
        )
