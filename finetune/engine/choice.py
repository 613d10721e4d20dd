"""Which engine does exactly what a recipe's ``zero:`` section asks for, and why. Loads no torch."""

from __future__ import annotations

import importlib.util

from finetune.engine.settings import ZeroSettings, needs_deepspeed
from finetune.errors import MissingDependencyError

INSTALL_DEEPSPEED = "pip install torch wheel ninja && pip install 'deepspeed>=0.19,<0.20' --no-build-isolation"


def choose_engine(zero: ZeroSettings, *, world_size: int, device: str) -> tuple[str, str]:
    """(engine's name, why): "replicated", "fsdp2" or "deepspeed"; whether it is installed isn't asked here.

    One process has nothing to shard, but FSDP2 can still offload its parameters from a GPU. Offloading the optimizer
    alone is done by our own engines, which step on the host.
    """
    if zero.engine == "deepspeed":
        return "deepspeed", f"zero.engine asks for it, stage {zero.stage}"
    if zero.engine == "fsdp2":
        return "fsdp2", f"zero.engine asks for it, stage {zero.stage}{_moved(zero, device)}"
    if why := needs_deepspeed(zero):
        return "deepspeed", f"only DeepSpeed does what zero.offload asks for: of FSDP2, {why}"
    if zero.stage == 0:
        return "replicated", f"zero.stage is 0: each process holds everything{_moved(zero, device)}"
    streams_parameters = zero.offload.parameters == "cpu" and device != "cpu"
    if world_size == 1 and not streams_parameters:
        reason = f"one process has nothing to share, so zero.stage {zero.stage} is what it holds anyway"
        return "replicated", reason + _moved(zero, device)
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    return "fsdp2", f"zero.stage {zero.stage} on {processes}{_moved(zero, device)}"


def _moved(zero: ZeroSettings, device: str) -> str:
    if zero.offload.parameters == "cpu":
        return ", parameters and optimizer offloaded to the host" if device != "cpu" else ""
    return ", optimizer stepped on the host" if zero.offload.optimizer == "cpu" else ""


def require_installed(engine: str) -> None:
    """Raise MissingDependencyError, with the install line, for a DeepSpeed that isn't there."""
    if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise MissingDependencyError("DeepSpeed isn't installed", where="zero", fix=INSTALL_DEEPSPEED)
