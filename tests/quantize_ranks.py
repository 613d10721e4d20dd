"""What the ranks of ``test_quant_ranks`` do, and one process beside them; run as a program it is one rank."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.engine.launch import rank_process
from finetune.quant.quantize import quantize_model
from finetune.quant.ranks import Ranks
from finetune.quant.settings import QuantizeSettings
from finetune.quant.stream import BlockQuantizer, BlockResult
from finetune.quant.tuning import ScaleTuner
from tests.tiny import CORPUS

NUM_TOKENS = 24
BY_THREE = ("tuned", "padded", "smoothed")
"""Jobs that three ranks do, too."""


def settings_for(folder: Path, **values: Any) -> QuantizeSettings:
    """On 7 samples, or the 8 that the text has, of which the last is padded."""
    path = folder / "calibration.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS * 3), encoding="utf-8")
    calibration = {"data": [{"path": str(path)}], "max_seq_length": NUM_TOKENS, "micro_batch_size": 2}
    calibration["num_samples"] = values.pop("num_samples", 7)
    values = {"calibration": calibration, "tuning_steps": 0, "verify": False, **values}
    return QuantizeSettings(**({"group_size": 32} if "scheme" not in values else {}), **values)


def jobs(folder: Path) -> dict[str, tuple[str, QuantizeSettings]]:
    return {
        "tuned": ("llama", settings_for(folder, tuning_steps=3)),
        "spilled": ("llama", settings_for(folder, tuning_steps=3, activation_memory="1B")),
        "padded": ("llama", settings_for(folder, num_samples=100, true_sequential=False, symmetric=False)),
        "smoothed": ("llama", settings_for(folder, scheme="w8a8", num_samples=100)),
        "static": ("llama", settings_for(folder, scheme="w8a8_static")),
        "experts": ("mixtral", settings_for(folder, num_samples=100, tuning_steps=2)),
        "shared_expert": ("qwen2_moe", settings_for(folder, num_samples=100)),
        "scaled_experts": ("mixtral", settings_for(folder, num_samples=100, method="awq")),
        "learned": ("llama", settings_for(folder, method="learned", rounding_iterations=60)),
        "no_data": ("llama", QuantizeSettings(method="rtn", group_size=32, verify=False)),
    }


def run_jobs(folder: Path, ranks: Ranks) -> None:
    """Quantize by every job. Beside the model lie the Hessians of each block's layers, and hashes of what each rank
    holds of each block, quantized and tuned."""
    hessians: dict[str, Any] = {}
    held: list[str] = []
    find, quantize_block, tune = BlockQuantizer._hessians, BlockQuantizer.quantize, ScaleTuner.tune

    def finding(self: BlockQuantizer, block: Any, index: int, *rest: Any) -> Any:
        sums = find(self, block, index, *rest)
        for name, total in sums.items():
            hessians.setdefault(f"{index}.{name}", (total.mean(), total.num_tokens, total.largest))
        return sums

    def quantizing(self: BlockQuantizer, *rest: Any, **options: Any) -> BlockResult:
        held.append(digest(result := quantize_block(self, *rest, **options)))
        return result

    def tuning(self: ScaleTuner, *, save: Callable[[int, BlockResult], None], **options: Any) -> Any:
        def saving(index: int, result: BlockResult) -> None:
            held.append(digest(result))
            save(index, result)

        return tune(self, save=saving, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockQuantizer, "_hessians", finding)
        patch.setattr(BlockQuantizer, "quantize", quantizing)
        patch.setattr(ScaleTuner, "tune", tuning)
        for name, (source, settings) in jobs(folder).items():
            if (ranks.size == 1 and name == "spilled") or (ranks.size == 3 and name not in BY_THREE):
                continue
            out = folder / f"{name}-{ranks.size}"
            chosen = settings.model_copy(update={"num_processes": ranks.size})
            quantize_model(folder / source, settings=chosen, out=out, seed=0, ranks=ranks)
            all_held = ranks.gather(held)
            if ranks.is_first:
                torch.save({"hessians": hessians, "held": all_held}, folder / f"{name}-{ranks.size}.pt")
            hessians.clear()
            held.clear()


def digest(result: BlockResult) -> str:
    parts = dict(result.tensors)
    for name, weight in result.quantized.items():
        fields = {"codes": weight.codes, "scale": weight.scale, "zero": weight.zero_point, "input": weight.input_scale}
        parts |= {f"{name}.{key}": tensor for key, tensor in fields.items() if tensor is not None}
    whole = hashlib.sha256()
    for name, tensor in sorted(parts.items()):
        whole.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


if __name__ == "__main__":
    with rank_process("cpu", timeout_seconds=120) as (own_rank, num_ranks):
        run_jobs(Path(sys.argv[1]), Ranks(own_rank, num_ranks))
