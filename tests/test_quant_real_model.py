"""A real 135M model to int4 and int8: perplexity, size and memory."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODEL = os.environ.get("FINETUNE_TEST_MODEL")
DATA = os.environ.get("FINETUNE_TEST_DATA")
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.slow,
    pytest.mark.skipif(not (MODEL and DATA), reason="FINETUNE_TEST_MODEL or FINETUNE_TEST_DATA isn't set"),
]

QUANTIZE = """
import json, resource, sys
from pathlib import Path
from finetune.quant.quantize import quantize_model
from finetune.quant.settings import QuantizeSettings
import transformers.models.llama.modeling_llama
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
settings = QuantizeSettings(**json.loads(sys.argv[2]))
report = quantize_model(Path(sys.argv[1]), settings=settings, out=Path(sys.argv[3]), seed=0)
print(json.dumps({"over_imports": report["peak_memory_bytes"] - before, "size_ratio": report["size_ratio"]}))
"""


def quantized(out: Path, **settings: Any) -> dict[str, float]:
    assert DATA is not None
    if settings["method"] == "gptq":
        data = [{"path": f"{DATA}/c4_calibration.jsonl"}]
        settings["calibration"] = {"data": data, "num_samples": 16, "max_seq_length": 512}
    command = [sys.executable, "-c", QUANTIZE, str(MODEL), json.dumps(settings), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def perplexity(folder: str | Path) -> float:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = Path(f"{DATA}/wikitext2_valid.txt").read_text(encoding="utf-8")[:60_000]
    ids_NS = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"][: 8 * 1024]).view(-1, 1024)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(ids.unsqueeze(0)).logits[0, :-1].float(), ids[1:]).item()
            for ids in ids_NS
        ]
    return math.exp(sum(losses) / len(losses))


def test_gptq_beats_rounding_within_the_memory_and_size_of_a_small_machine(tmp_path: Path) -> None:
    int4 = {"scheme": "w4a16", "group_size": 64}
    gptq = quantized(tmp_path / "gptq", method="gptq", **int4)
    quantized(tmp_path / "rtn", method="rtn", **int4)
    quantized(tmp_path / "int8", scheme="w8a8", method="gptq")
    assert gptq["size_ratio"] <= 0.45
    assert gptq["over_imports"] < 1.5 * 2**30
    whole, int4_gptq, int4_rtn, int8 = (
        perplexity(folder) for folder in (str(MODEL), tmp_path / "gptq", tmp_path / "rtn", tmp_path / "int8")
    )
    # 1.15 with these 16 samples; 1.10 with 128.
    assert whole < int4_gptq < 1.2 * whole
    assert int4_gptq - whole < 0.6 * (int4_rtn - whole)
    # The goal is 1% over 32,768 tokens; a quarter of them moves by 0.4% with chance.
    assert int8 < 1.02 * whole
