"""``metrics.jsonl``: one JSON object a step, without a gap or a repetition however often a run was resumed."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import torch

from finetune.files import write_text


class MetricsLog:
    """Appends to ``path`` on the rank that ``writes``; elsewhere it does nothing."""

    def __init__(self, path: Path, *, writes: bool, last_step: int) -> None:
        """Drop what an earlier try wrote after ``last_step``, the step that is resumed from."""
        self.path = path
        self._writes = writes
        if not writes:
            return
        kept = [line for line in read_metrics(path) if line["step"] <= last_step]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def add(self, line: dict[str, Any]) -> None:
        if self._writes:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, without a last one that was cut short; none where there is no file."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def peak_memory_bytes(device: str) -> int:
    """The most memory this process has held: allocated on the GPU, or resident on the cpu."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.is_file():
        # ru_maxrss survives exec, so a rank would report what its launcher once held.
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
