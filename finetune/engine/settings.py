"""How many processes run, on what, and how they share the model's state."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, model_validator

from finetune.config.section import Section


class LaunchSettings(Section):
    num_processes: int | None = Field(None, ge=1)
    """Processes on this machine. Default: one a GPU where there are GPUs, else one."""
    device: Literal["cpu", "cuda"] | None = None
    """Default: cuda where there is one, else cpu."""
    timeout_seconds: float = Field(600, gt=0)
    """How long a process waits for the others before it gives up: none hangs when one is lost."""


def world_size(launch: LaunchSettings) -> int:
    """Ranks of the run over all machines: what an outside launcher started, or the recipe's own processes."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return launch.num_processes or 1


class OffloadSettings(Section):
    optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where float32 masters and optimizer state live, and are stepped. cpu with `parameters: none` is ZeRO-Offload."""
    parameters: Literal["none", "cpu", "nvme"] = "none"
    """Where the shards of the parameters live between their uses; needs stage 3."""
    ratio: float = Field(1.0, gt=0, le=1)
    """The part of the optimizer state that `optimizer: cpu` moves; below 1 needs stage 3 and DeepSpeed."""
    nvme_path: str | None = None
    """A folder on a fast local disk, for what is offloaded to nvme."""

    @model_validator(mode="after")
    def _complete(self) -> OffloadSettings:
        if "nvme" in (self.optimizer, self.parameters) and not self.nvme_path:
            raise ValueError("`nvme` needs a place; set `offload.nvme_path` to a folder on a fast local disk")
        if self.ratio < 1 and self.optimizer != "cpu":
            raise ValueError("`offload.ratio` below 1 divides what is moved to the cpu; set `offload.optimizer: cpu`")
        return self


class ZeroSettings(Section):
    stage: int = Field(0, ge=0, le=3)
    """0: nothing is sharded. 1: masters and optimizer state are; 2: gradients too; 3: parameters too."""
    engine: Literal["auto", "fsdp2", "deepspeed"] = "auto"
    """auto: FSDP2 (stage 0: our replicated engine) where it does exactly what is asked, DeepSpeed where only it can."""
    offload: OffloadSettings = Field(default_factory=OffloadSettings)

    @model_validator(mode="after")
    def _possible(self) -> ZeroSettings:
        """Refuse what no engine does; which of them does the rest is ``finetune.engine.build.choose_engine``'s."""
        offload = self.offload
        if offload.parameters != "none" and self.stage != 3:
            raise ValueError(
                f"`offload.parameters: {offload.parameters}` needs `stage: 3`: stage {self.stage} keeps whole "
                "parameters everywhere; set `offload.parameters: none`, or `stage: 3`"
            )
        if self.stage != 3 and (offload.optimizer == "nvme" or offload.ratio < 1):
            what = "`offload.optimizer: nvme`" if offload.optimizer == "nvme" else "`offload.ratio` below 1"
            raise ValueError(
                f"{what} needs `stage: 3`: DeepSpeed, the one engine that can, has it for stage 3 alone; set `stage: 3`"
            )
        if self.engine == "fsdp2":
            if self.stage == 0:
                raise ValueError("`engine: fsdp2` shards, so it needs `stage: 1` or more; set `engine: auto`")
            if why := needs_deepspeed(self):
                raise ValueError(f"`engine: fsdp2` can't: {why}; set `engine: auto` or `engine: deepspeed`")
        return self


def needs_deepspeed(zero: ZeroSettings) -> str | None:
    """Why only DeepSpeed can do exactly what ``zero`` asks for; None where our own engines can."""
    offload = zero.offload
    if "nvme" in (offload.optimizer, offload.parameters):
        return "it can't offload to nvme"
    if offload.ratio < 1:
        return "it moves all of the optimizer or nothing, not an `offload.ratio` of it"
    if offload.parameters == "cpu" and offload.optimizer == "none":
        return "it offloads parameters together with the optimizer, not `offload.parameters` alone"
    return None
