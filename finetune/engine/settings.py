"""How many processes run, on what, and how they share the model's state."""

from __future__ import annotations

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


class OffloadSettings(Section):
    optimizer: Literal["none", "cpu"] = "none"
    """Where masters and optimizer state live between their uses."""
    parameters: Literal["none", "cpu"] = "none"
    """Where the shards of the parameters live between their uses; needs stage 3."""


class ZeroSettings(Section):
    stage: int = Field(0, ge=0, le=3)
    """0: nothing is sharded. 1: masters and optimizer state are; 2: gradients too; 3: parameters too."""
    engine: Literal["auto", "fsdp2"] = "auto"
    """auto: FSDP2 for stages 1 to 3 on several processes, else the replicated engine."""
    offload: OffloadSettings = Field(default_factory=OffloadSettings)

    @model_validator(mode="after")
    def _possible(self) -> ZeroSettings:
        optimizer, parameters = self.offload.optimizer == "cpu", self.offload.parameters == "cpu"
        if parameters and self.stage != 3:
            raise ValueError(
                f"`offload.parameters: cpu` needs `stage: 3`: stage {self.stage} keeps whole parameters everywhere"
            )
        if optimizer and not parameters:
            raise ValueError(
                "`offload.optimizer: cpu` alone can't be done: FSDP2 moves parameters and optimizer together; "
                "set `stage: 3` and `offload.parameters: cpu` too, or set `offload.optimizer: none`"
            )
        if parameters and not optimizer:
            raise ValueError(
                "`offload.parameters: cpu` alone can't be done: FSDP2 moves parameters and optimizer together; "
                "set `offload.optimizer: cpu` too"
            )
        if self.engine == "fsdp2" and self.stage == 0:
            raise ValueError("`engine: fsdp2` shards, so it needs a `stage` of 1, 2 or 3")
        return self
