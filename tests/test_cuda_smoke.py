"""bench/cuda_smoke.py in its CPU mode: the code that meets a GPU runs here on a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench/cuda_smoke.py"


@pytest.mark.slow
def test_the_smoke_test_passes_on_the_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--device", "cpu", "--steps", "3", "--out", str(tmp_path / "figures.json")],
        capture_output=True,
        text=True,
        cwd=BENCH.parents[1],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("stage 3, both on the host", "resumed under another offload", "w4a16 gptq", "all as it should be"):
        assert said in done.stdout


def test_without_a_gpu_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        return
    done = subprocess.run([sys.executable, str(BENCH)], capture_output=True, text=True, cwd=BENCH.parents[1])
    assert done.returncode == 5
    assert "--device cpu" in done.stderr
