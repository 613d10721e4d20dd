"""Everything that touches a GPU, once, on one GPU: every ZeRO stage and offload, resume, consolidation, quantization.

    python bench/cuda_smoke.py                 a Llama of 200M random parameters, under 8 minutes, nothing downloaded
    python bench/cuda_smoke.py --device cpu    the same code on a tiny model, for machines without a GPU

Each combination trains the same model on the same rows in bfloat16 (one also in float32 and float16) and prints its
tokens a second, the peak of the device's memory and the plan's prediction of it, and how far its losses are from the
CPU's in float32. Then the training loop stops and goes on under another offload, its checkpoint is consolidated and
quantized, and the logits of both models on the device are compared with the CPU's. Ends with 1 where something is
further off than the tolerances below, or failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TEXT = HERE.parent / "data/pretrain.jsonl"
SIZES: dict[str, dict[str, Any]] = {
    "200m": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16},
    "tiny": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4},
}
ROWS = {"200m": (8, 1024), "tiny": (2, 64)}
"""(micro-batch, tokens a row)."""
LOSS_TOLERANCES = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
"""Relative, of the first steps' losses against the CPU's in float32."""
RESUME_TOLERANCE = 5e-3
LOGIT_TOLERANCE = 5e-2
"""Largest difference over the spread of the logits, bfloat16 on the device against float32 on the CPU."""
REFERENCE_STEPS = 2
HOST = {"optimizer": "cpu"}
BOTH = {"optimizer": "cpu", "parameters": "cpu"}
Case = dict[str, Any]


def cases() -> list[Case]:
    """What one process on one device can be asked for; the engine is named, or a group of one would need none."""
    found: list[Case] = [{"name": "stage 0", "zero": {"stage": 0}}]
    found.append({"name": "stage 0, optimizer on the host", "zero": {"stage": 0, "offload": HOST}})
    for stage in (1, 2, 3):
        zero = {"stage": stage, "engine": "fsdp2"}
        found.append({"name": f"stage {stage}", "zero": zero})
        found.append({"name": f"stage {stage}, optimizer on the host", "zero": {**zero, "offload": HOST}})
    both = {"stage": 3, "engine": "fsdp2", "offload": BOTH}
    found.append({"name": "stage 3, both on the host", "zero": both})
    for every in (1, 2):
        found.append({"name": f"stage 0, checkpointing every {every}", "zero": {"stage": 0}, "every": every})
    found.append({"name": "stage 0, activations on the host", "zero": {"stage": 0}, "offload_activations": True})
    found.append(
        {"name": "stage 3, both, checkpointing, activations", "zero": both, "every": 1, "offload_activations": True}
    )
    for precision in ("fp32", "fp16"):
        found.append({"name": f"stage 0, {precision}", "zero": {"stage": 0}, "precision": precision})
        found.append({"name": f"stage 3, both, {precision}", "zero": both, "precision": precision})
    found.append({"name": "stage 0, 2 micro-batches", "zero": {"stage": 0}, "accumulation": 2})
    found.append({"name": "stage 2, optimizer, 2 micro-batches", "zero": found[5]["zero"], "accumulation": 2})
    return found


def deepspeed_cases() -> list[Case]:
    found = []
    for stage in (1, 2, 3):
        for name, offload in (("", {}), (", optimizer on the host", HOST), (", both on the host", BOTH)):
            if stage == 3 or offload is not BOTH:
                zero = {"stage": stage, "engine": "deepspeed", "offload": offload}
                found.append({"name": f"deepspeed stage {stage}{name}", "zero": zero})
    ratio = {"stage": 3, "engine": "deepspeed", "offload": {**HOST, "ratio": 0.5}}
    return [*found, {"name": "deepspeed stage 3, half of the optimizer on the host", "zero": ratio}]


class Setting:
    """What every part of the smoke test knows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device: str = options.device
        self.size: str = options.size or ("tiny" if options.device == "cpu" else "200m")
        self.steps: int = options.steps
        self.work = Path(options.work)
        self.model = self.work / "model"
        self.micro_batch_size, self.seq_length = ROWS[self.size]

    def micro_batches(self, step: int, *, vocab_size: int, count: int, device: str) -> list[dict[str, Any]]:
        """The step's rows, two documents each, in ``count`` micro-batches."""
        import torch

        generator = torch.Generator().manual_seed(step)
        rows, length = self.micro_batch_size, self.seq_length
        ids = torch.randint(3, vocab_size, (rows, length), generator=generator)
        half = length // 2
        batch = {
            "input_ids": ids,
            "targets": torch.cat([ids[:, 1:], torch.full((rows, 1), -100)], dim=1),
            "position_ids": (torch.arange(length) % half).expand(rows, -1).contiguous(),
            "document_ids": (torch.arange(length) // half).int().expand(rows, -1).contiguous(),
        }
        batch["targets"][:, half - 1] = -100
        return [
            {name: value[first : first + rows // count].to(device) for name, value in batch.items()}
            for first in range(0, rows, rows // count)
        ]


def make_model(setting: Setting) -> None:
    from finetune.data.settings import DatasetSettings
    from finetune.data.text import raw_texts
    from finetune.model.scratch import create_model
    from finetune.model.tokenizer import train_tokenizer

    source = DatasetSettings.model_validate({"path": str(TEXT)})
    tokenizer = train_tokenizer(raw_texts([source]), vocab_size=1024, chat_template=None)
    config = {"model_type": "llama", "max_position_embeddings": 2048, **SIZES[setting.size]}
    create_model(config, tokenizer, seed=0, out=setting.model)


def run_case(setting: Setting, case: Case, *, device: str, num_steps: int) -> dict[str, Any]:
    """{"losses", "norms", "tokens_per_second", "peak_bytes", "engine"} of one combination, trained in this process."""
    import torch

    from finetune.engine.build import build_engine
    from finetune.engine.protocol import AdamWSettings
    from finetune.engine.settings import ZeroSettings
    from finetune.model.activations import checkpoint_blocks
    from finetune.model.load import load_config, meta_model
    from finetune.model.matmul import round_alike
    from finetune.train.loop import COMPUTE_DTYPES
    from finetune.train.loss import CausalLMLoss

    config = load_config(setting.model)
    model = meta_model(config)
    round_alike(model)
    if case.get("every"):
        checkpoint_blocks(model, every=case["every"])
    engine, _ = build_engine(
        CausalLMLoss(model, offload_activations=case.get("offload_activations", False)),
        model,
        setting.model,
        zero=ZeroSettings.model_validate(case["zero"]),
        device=device,
        compute_dtype=COMPUTE_DTYPES[case.get("precision", "bf16")],
        adamw=AdamWSettings(),
        gradient_accumulation_steps=case.get("accumulation", 1),
    )
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, norms, seconds = [], [], []
    for step in range(num_steps):
        batches = setting.micro_batches(
            step, vocab_size=config.vocab_size, count=case.get("accumulation", 1), device=device
        )
        num_targets = sum(int((batch["targets"] >= 0).sum()) for batch in batches)
        start = time.perf_counter()
        engine.forward_backward(batches, denominator=float(num_targets))
        result = engine.clip_and_step(max_norm=1.0, learning_rate=1e-4)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    # The first steps compile and allocate.
    steady = sorted(seconds[2:] or seconds)
    return {
        "engine": engine.name,
        "losses": losses,
        "norms": norms,
        "tokens_per_second": setting.micro_batch_size * setting.seq_length / steady[len(steady) // 2],
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


def predicted_bytes(setting: Setting, case: Case) -> int:
    """The plan's peak of the device's memory, without the context, which torch doesn't count either."""
    from finetune.engine.memory import Workload, predict_memory
    from finetune.engine.settings import ZeroSettings
    from finetune.model.load import load_config

    accumulation = case.get("accumulation", 1)
    plan = predict_memory(
        load_config(setting.model),
        Workload(
            zero=ZeroSettings.model_validate(case["zero"]),
            world_size=1,
            micro_batch_size=setting.micro_batch_size // accumulation,
            max_seq_length=setting.seq_length,
            gradient_accumulation_steps=accumulation,
            mixed_precision=case.get("precision", "bf16"),
            checkpointed_every=case.get("every"),
            activation_offload=case.get("offload_activations", False),
            device="cuda",
        ),
    )
    return plan.device_bytes - sum(item.num_bytes for item in plan.items if item.name == "CUDA context")


def engines_part(setting: Setting, chosen: list[Case]) -> dict[str, Any]:
    import gc

    import torch

    from finetune.engine.launch import process_group

    results: dict[str, Any] = {}
    with process_group(setting.device, alone_too=True):
        for case in chosen:
            try:
                result = run_case(setting, case, device=setting.device, num_steps=setting.steps)
                results[case["name"]] = {**result, "predicted_bytes": predicted_bytes(setting, case)}
            except Exception:
                results[case["name"]] = {"error": traceback.format_exc(limit=4)}
            gc.collect()
            if setting.device == "cuda":
                torch.cuda.empty_cache()
    return results


def reference_part(setting: Setting) -> dict[str, Any]:
    """The CPU's losses in float32."""
    case = {"zero": {"stage": 0}, "precision": "fp32"}
    return run_case(setting, case, device="cpu", num_steps=REFERENCE_STEPS)


def logits_on(folder: Path, *, device: str, dtype: Any, ids: Any) -> Any:
    import torch

    from finetune.model.load import load_model

    with torch.no_grad():
        return load_model(folder, dtype=dtype, device=device)(ids.to(device)).logits.float().cpu()


def difference(left: Any, right: Any) -> float:
    return float((left - right).abs().max() / right.std())


def seams_part(setting: Setting) -> dict[str, Any]:
    """The loop, a resume under another offload, consolidation, quantization, and logits on the device and the CPU."""
    import torch

    from finetune.checkpoint.consolidate import consolidate
    from finetune.engine.settings import ZeroSettings
    from finetune.model.load import load_config
    from finetune.quant.quantize import quantize_model
    from finetune.quant.settings import QuantizeSettings
    from finetune.train.loop import train
    from finetune.train.metrics import read_metrics
    from finetune.train.settings import TrainSettings

    settings = TrainSettings.model_validate(
        {
            "data": [{"path": str(TEXT)}],
            "max_seq_length": setting.seq_length,
            "overlong": "split",
            "micro_batch_size": setting.micro_batch_size,
            "max_steps": 8,
            "save_every_steps": 4,
            "keep_checkpoints": 9,
            "learning_rate": 3e-4,
        }
    )

    def trained(folder: Path, zero: dict[str, Any]) -> list[float]:
        train(
            model_folder=setting.model,
            settings=settings,
            zero=ZeroSettings.model_validate(zero),
            launch_device=setting.device,
            seed=0,
            folder=folder,
        )
        return [line["loss"] for line in read_metrics(folder / "metrics.jsonl")]

    whole = trained(setting.work / "whole", {"stage": 0})
    resumed_folder = setting.work / "resumed"
    (resumed_folder / "checkpoints").mkdir(parents=True)
    (setting.work / "whole/checkpoints/step-00000004").rename(resumed_folder / "checkpoints/step-00000004")
    shutil.copyfile(setting.work / "whole/metrics.jsonl", resumed_folder / "metrics.jsonl")
    resumed = trained(resumed_folder, {"stage": 3, "engine": "fsdp2", "offload": BOTH})
    started = time.perf_counter()
    model = setting.work / "consolidated"
    consolidate(resumed_folder / "checkpoints/step-00000008", out=model)
    consolidate_seconds = time.perf_counter() - started
    vocab_size = load_config(model).vocab_size
    ids = torch.randint(3, vocab_size, (1, setting.seq_length), generator=torch.Generator().manual_seed(9))
    on_cpu = logits_on(model, device="cpu", dtype=torch.float32, ids=ids)
    result = {
        "losses": whole,
        "resume": max(abs(a - b) / b for a, b in zip(resumed, whole, strict=True)),
        "consolidate_seconds": consolidate_seconds,
        "logits": difference(logits_on(model, device=setting.device, dtype=torch.bfloat16, ids=ids), on_cpu),
    }
    for method in ("rtn", "gptq"):
        started = time.perf_counter()
        calibration = {"data": [{"path": str(TEXT)}], "num_samples": 16, "max_seq_length": setting.seq_length}
        values: dict[str, Any] = {"scheme": "w4a16", "group_size": 32, "method": method}
        quantize_model(
            model,
            settings=QuantizeSettings.model_validate(
                values | ({"calibration": calibration} if method == "gptq" else {})
            ),
            out=setting.work / method,
            seed=0,
            device=setting.device,
        )
        expected = logits_on(setting.work / method, device="cpu", dtype=torch.float32, ids=ids)
        found = logits_on(setting.work / method, device=setting.device, dtype=torch.bfloat16, ids=ids)
        result[method] = {"seconds": time.perf_counter() - started, "logits": difference(found, expected)}
    return result


def run_part(options: argparse.Namespace, part: str) -> Any:
    """A part in a process of its own, so that each starts with an empty device."""
    out = Path(options.work) / f"{part}.json"
    arguments = [sys.executable, str(Path(__file__).resolve()), "--part", part, "--work", options.work]
    arguments += ["--device", options.device, "--steps", str(options.steps)]
    arguments += ["--size", options.size] if options.size else []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    if done.returncode or not out.exists():
        return {"error": f"part `{part}` ended with {done.returncode}:\n{done.stderr[-3000:]}"}
    return json.loads(out.read_text())


def do_part(options: argparse.Namespace) -> None:
    import torch

    # float32 on the device means float32, to compare with the CPU's.
    torch.backends.cuda.matmul.allow_tf32 = False
    setting = Setting(options)
    parts = {
        "model": lambda: make_model(setting),
        "reference": lambda: reference_part(setting),
        "engines": lambda: engines_part(setting, cases()),
        "deepspeed": lambda: engines_part(setting, deepspeed_cases()),
        "seams": lambda: seams_part(setting),
    }
    (setting.work / f"{options.part}.json").write_text(json.dumps(parts[options.part]()))


def show_engines(results: dict[str, Any], reference: dict[str, Any], precisions: dict[str, str]) -> tuple[str, int]:
    """(Markdown table, number of faults)."""
    lines = [
        "| | engine | tokens/s | peak GiB | predicted GiB | ratio | loss off the CPU's |",
        "|---|---|---|---|---|---|---|",
    ]
    faults = 0
    for name, result in results.items():
        if "error" in result:
            faults += 1
            lines.append(f"| {name} | FAILED: {result['error'].strip().splitlines()[-1]} | | | | | |")
            continue
        off = max(abs(a - b) / b for a, b in zip(result["losses"][:REFERENCE_STEPS], reference["losses"], strict=True))
        is_off = not off <= LOSS_TOLERANCES[precisions.get(name, "bf16")]
        faults += is_off
        peak, predicted = result["peak_bytes"], result["predicted_bytes"]
        memory = f"{peak / 2**30:.2f}" if peak else "-"
        ratio = f"{predicted / peak:.2f}" if peak else "-"
        lines.append(
            f"| {name} | {result['engine']} | {result['tokens_per_second']:,.0f} | {memory} | "
            f"{predicted / 2**30:.2f} | {ratio} | {off:.1e}{' TOO FAR' if is_off else ''} |"
        )
    return "\n".join(lines), faults


def show_seams(result: dict[str, Any]) -> tuple[str, int]:
    if "error" in result:
        return f"seams FAILED: {result['error']}", 1
    lines = [
        f"losses of the loop: {' '.join(f'{loss:.4f}' for loss in result['losses'])}",
        f"resumed under another offload: off by {result['resume']:.1e} (allowed {RESUME_TOLERANCE:g})",
        f"consolidated in {result['consolidate_seconds']:.1f} s; logits off the CPU's by {result['logits']:.1e} "
        f"(allowed {LOGIT_TOLERANCE:g})",
    ]
    faults = int(not result["resume"] <= RESUME_TOLERANCE) + int(not result["logits"] <= LOGIT_TOLERANCE)
    for method in ("rtn", "gptq"):
        found = result[method]
        lines.append(f"w4a16 {method} in {found['seconds']:.1f} s; logits off the CPU's by {found['logits']:.1e}")
        faults += int(not found["logits"] <= LOGIT_TOLERANCE)
    return "\n".join(lines), faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=list(SIZES), help="default: 200m on a GPU, tiny on the cpu")
    parser.add_argument("--steps", type=int, default=6, help="steps of each combination")
    parser.add_argument("--out", type=Path, help="also write all figures there, as JSON")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        do_part(options)
        return 0
    import torch

    from finetune.engine.choice import require_installed
    from finetune.errors import FinetuneError

    if options.device == "cuda" and not torch.cuda.is_available():
        print("this machine has no usable GPU; --device cpu runs the same code on a tiny model", file=sys.stderr)
        return 5
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        options.work = work
        parts = ["model", "reference", "engines", "seams"]
        try:
            require_installed("deepspeed")
            parts.insert(3, "deepspeed")
        except FinetuneError as error:
            print(f"without DeepSpeed: {error.what} ({error.fix})")
        figures = {part: run_part(options, part) for part in parts}
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(f"\n{name}, torch {torch.__version__}, {time.perf_counter() - started:.0f} s\n")
    faults = 0
    for part in ("model", "reference"):
        if figures[part] and "error" in figures[part]:
            print(figures[part]["error"])
            return 1
    precisions = {case["name"]: case.get("precision", "bf16") for case in cases()}
    for part in ("engines", "deepspeed"):
        if part not in figures:
            continue
        result = figures[part]
        if isinstance(result.get("error"), str):
            print(result["error"])
            faults += 1
            continue
        table, found = show_engines(result, figures["reference"], precisions)
        print(table, end="\n\n")
        faults += found
        for each in result.values():
            if "error" in each:
                print(each["error"])
    text, found = show_seams(figures["seams"])
    print(text)
    faults += found
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2))
    print(f"\n{faults} faults" if faults else "\nall as it should be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    sys.exit(main())
