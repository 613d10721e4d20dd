"""Memory of a quantization: hidden states past the budget lie on disk, and a model of more blocks takes no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from finetune.artifact import record_files
from finetune.quant import quantize as module
from finetune.quant.quantize import quantize_model
from finetune.quant.settings import QuantizeSettings
from finetune.quant.spill import HiddenStates, OneOf
from tests.test_quant_model import settings_for
from tests.tiny import CORPUS, tiny_llama

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, budget=st.integers(0, 200), changes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5))))
def test_it_is_a_list_whatever_the_budget(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], budget: int, changes: list[tuple[int, int]]
) -> None:
    def chunk(size: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(size, 3, 2, generator=generator)
        return whole.to(torch.bfloat16) if seed % 2 else whole.transpose(1, 2)

    folder = tmp_path_factory.mktemp("spill") / "inputs"
    plain = [chunk(size, seed) for seed, size in enumerate(sizes)]
    spilled = HiddenStates(folder, budget)
    spilled.extend(plain)
    for step, (position, size) in enumerate(changes):
        if position < len(plain):
            plain[position] = spilled[position] = chunk(size, step)
            OneOf(spilled, position)[0] = plain[position]
    same(list(spilled), plain)
    same([OneOf(spilled, position)[0] for position in range(len(plain))], plain)
    same(spilled[1:], plain[1:])
    same([spilled[-1]], plain[-1:])
    held = sum(tensor.nbytes for tensor in spilled._held if tensor is not None)
    assert held <= budget
    assert spilled.num_spilled == sum(tensor is None for tensor in spilled._held)
    if budget < 12:  # the smallest chunk
        assert spilled.num_spilled == len(plain)


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "values",
    [{"tuning_steps": 0}, {"tuning_steps": 2}, {"method": "learned", "rounding_iterations": 4}, {"scheme": "w8a8"}],
    ids=["gptq", "tuned", "learned", "smoothed"],
)
def test_the_same_bytes_with_all_of_it_on_disk(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_llama(tmp_path / "source", dtype="bfloat16")
    begun: list[HiddenStates] = []

    class Watched(HiddenStates):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            begun.append(self)

    monkeypatch.setattr(module, "HiddenStates", Watched)
    given_values = {"calibration": settings_for(tmp_path).calibration, "group_size": 32, **values}
    if values.get("scheme") == "w8a8":
        del given_values["group_size"]
    records = {}
    for limit in ("1GiB", "1B"):
        chosen = QuantizeSettings.model_validate({**given_values, "activation_memory": limit})
        quantize_model(source, settings=chosen, out=tmp_path / limit, seed=0)
        exclude = ("quantization_report.json", "quantization_report.png")
        records[limit] = {name: file.sha256 for name, file in record_files(tmp_path / limit, exclude=exclude).items()}
        on_disk = [states.num_spilled for states in begun]
        assert on_disk == ([0] if limit == "1GiB" else [2]) * len(begun)
        begun.clear()
    assert records["1GiB"] == records["1B"]
    assert "model.safetensors" in records["1B"]
    assert not list(tmp_path.glob("*.work"))


def test_a_budget_that_is_no_size_is_refused() -> None:
    with pytest.raises(ValidationError, match="not a size"):
        QuantizeSettings(method="rtn", group_size=32, activation_memory="much")


MEASURE = """
import json, sys
from pathlib import Path
import compressed_tensors, matplotlib.pyplot, transformers
from transformers import LlamaForCausalLM
import finetune.quant.learned_rounding, finetune.quant.tuning
from finetune.quant.quantize import quantize_model
from finetune.quant.settings import QuantizeSettings
def peak():
    # Not getrusage: its peak begins with that of the process that started this one.
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024
before = peak()
settings = QuantizeSettings.model_validate_json(sys.argv[2])
quantize_model(Path(sys.argv[1]), settings=settings, out=Path(sys.argv[3]), seed=0)
print(json.dumps(peak() - before))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {"hidden_size": 768, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 2048}
    return {
        num_layers: tiny_llama(folder / str(num_layers), num_layers=num_layers, dtype="bfloat16", **sizes)
        for num_layers in (12, 48)
    }


@pytest.mark.slow
@pytest.mark.skipif("FINETUNE_TEST_MEMORY" not in os.environ, reason="takes minutes: FINETUNE_TEST_MEMORY asks for it")
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_four_times_the_blocks_take_no_more_memory(method: str, models: dict[int, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in CORPUS * 100), encoding="utf-8")
    calibration = {"data": [{"path": str(text)}], "num_samples": 16, "max_seq_length": 128, "micro_batch_size": 4}
    values: dict[str, Any] = {"method": method, "group_size": 64, "activation_memory": "1MiB"}
    if method == "gptq":
        values |= {"calibration": calibration, "tuning_steps": 1}
    chosen = QuantizeSettings.model_validate(values)
    taken = {}
    for num_layers, folder in models.items():
        out = tmp_path / str(num_layers)
        command = [sys.executable, "-c", MEASURE, str(folder), chosen.model_dump_json(), str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        taken[num_layers] = int(done.stdout.strip().splitlines()[-1])
    assert taken[48] < 1.2 * taken[12], taken
    # A block in float32 is 27 MiB, the whole of the larger model as it is stored 650 MiB.
    assert taken[48] < 500 * 2**20, taken
