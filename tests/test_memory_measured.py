"""Real training takes what was predicted: the quick part of bench/memory.py, on a model of 27M parameters."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parent.parent / "bench" / "memory.py"
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 8000}

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_memory", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def inputs(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("memory")
    return {
        "model": str(bench.make_model(folder / "model", SIZES)),
        "tiny": str(bench.make_model(folder / "tiny", bench.TINY)),
        "data": str(bench.make_rows(folder / "rows.jsonl", num_rows=100)),
    }


@pytest.mark.parametrize(("ranks", "stage", "offload"), [(1, 0, "none"), (2, 3, "optimizer")], ids=str)
def test_a_rank_grows_by_what_is_predicted(
    bench: Any, inputs: dict[str, str], ranks: int, stage: int, offload: str
) -> None:
    job = {
        **inputs,
        "ranks": ranks,
        "stage": stage,
        "offload": offload,
        "accumulation": 1,
        "engine": "auto",
        "checkpointing": "none",
        "precision": "bf16",
        "micro_batch_size": 2,
        "max_seq_length": 256,
        "steps": 2,
    }
    grown = max(figures["peak"] - figures["before"] for figures in bench.measure(job))
    # The bench's own models are within a tenth; of one this small, a tenth is 40 MiB.
    assert bench.predict(job).growth_bytes / grown == pytest.approx(1, abs=0.15)
