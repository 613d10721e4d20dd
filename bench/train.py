"""Fine-tune one model on the same packed rows by finetune and by TRL's SFTTrainer; compare speed, memory and losses.

    python bench/train.py --model FOLDER --data ALPACA.json --peer-python PYTHON

Every run is a process of its own; the two alternate, ``--rounds`` times. Both train in bfloat16 over float32 masters,
one process, 4 packed rows of 512 tokens a step, AdamW at a constant learning rate, losses on the replies. TRL gets
finetune's rows ready packed, in the same order, and its faster settings (no gradient checkpointing, fused AdamW).
The first two steps of each run warm up and don't count. Prints a Markdown table; --out keeps the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WARMUP_STEPS = 2
SEED = 3


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "data": [{"path": str(args.data), "format": "alpaca", "limit": args.num_rows}],
        "max_seq_length": args.max_seq_length,
        "packing": True,
        "overlong": "drop",
        "micro_batch_size": args.micro_batch_size,
        "max_steps": args.steps,
        "learning_rate": 2e-5,
        "lr_schedule": "constant",
        "warmup_ratio": 0.0,
        "betas": [0.9, 0.999],
        "weight_decay": 0.0,
    }


def write_rows(args: argparse.Namespace) -> None:
    """Write finetune's packed rows in their order, as TRL wants them: input_ids, labels, seq_lengths."""
    from finetune.data.loader import StepLoader
    from finetune.data.tokens import tokenize_dataset
    from finetune.model.load import load_tokenizer
    from finetune.train.settings import TrainSettings

    chosen = TrainSettings.model_validate(settings(args))
    dataset = tokenize_dataset(
        chosen.data,
        tokenizer=load_tokenizer(args.model),
        max_seq_length=chosen.max_seq_length,
        overlong=chosen.overlong,
        train_on=chosen.train_on,
    )
    loader = StepLoader(
        dataset,
        packing=True,
        max_seq_length=chosen.max_seq_length,
        micro_batch_size=chosen.micro_batch_size,
        gradient_accumulation_steps=1,
        world_size=1,
        rank=0,
        seed=SEED,
        epochs=None,
        max_steps=args.steps,
        pad_token_id=0,
    )
    rows = []
    for step in range(args.steps):
        for pack in loader.sequences(step):
            documents = [dataset.rows[row] for row in pack]
            ids = [token for document in documents for token in document.input_ids.tolist()]
            mask = [target for document in documents for target in document.loss_mask.tolist()]
            labels = [token if target else -100 for token, target in zip(ids, mask, strict=True)]
            lengths = [len(document.input_ids) for document in documents]
            rows.append({"input_ids": ids, "labels": labels, "seq_lengths": lengths})
    (args.work / "rows.json").write_text(json.dumps(rows))


def run_ours(args: argparse.Namespace) -> dict[str, Any]:
    from finetune.engine.settings import ZeroSettings
    from finetune.train.loop import train
    from finetune.train.settings import TrainSettings

    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        train(
            model_folder=args.model,
            settings=TrainSettings.model_validate(settings(args)),
            zero=ZeroSettings(),
            launch_device="cpu",
            seed=SEED,
            folder=Path(folder),
        )
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {
        "losses": [line["loss"] for line in lines],
        "grad_norms": [line["grad_norm"] for line in lines],
        "tokens": [line["num_tokens"] for line in lines],
        "seconds": [line["num_tokens"] / line["tokens_per_second"] for line in lines],
    }


def run_trl(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows = json.loads((args.work / "rows.json").read_text())
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        config = SFTConfig(
            output_dir=folder,
            bf16=True,
            use_cpu=True,
            packing=True,
            max_length=args.max_seq_length,
            dataset_kwargs={"skip_prepare_dataset": True},
            per_device_train_batch_size=args.micro_batch_size,
            max_steps=args.steps,
            learning_rate=2e-5,
            lr_scheduler_type="constant",
            warmup_steps=0,
            weight_decay=0.0,
            adam_beta2=0.999,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            gradient_checkpointing=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = InOrder(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa"),
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            callbacks=[Clock()],
        )
        trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    in_step = args.micro_batch_size
    tokens = [sum(len(row["input_ids"]) for row in rows[i : i + in_step]) for i in range(0, len(rows), in_step)]
    return {
        "losses": [line["loss"] for line in logs],
        "grad_norms": [line["grad_norm"] for line in logs],
        "tokens": tokens,
        "seconds": seconds,
    }


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux only")


def child(args: argparse.Namespace, role: str, python: str) -> dict[str, Any]:
    flags = ["--role", role, "--model", args.model, "--data", args.data, "--work", args.work]
    for name in ("steps", "num_rows", "max_seq_length", "micro_batch_size"):
        flags += [f"--{name.replace('_', '-')}", getattr(args, name)]
    # Threads that spin while they wait would measure what else the machine does.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run([python, __file__, *map(str, flags)], check=True, env=environment)
    result = args.work / f"{role}.json"
    return json.loads(result.read_text()) if result.exists() else {}


def speed(run: dict[str, Any]) -> float:
    """Tokens a second over the steps after the warm-up."""
    return sum(run["tokens"][WARMUP_STEPS:]) / sum(run["seconds"][WARMUP_STEPS:])


def report(runs: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["| | tokens/s, each round | median | peak memory, GiB | losses |", "|---|---|---|---|---|"]
    for name, rounds in runs.items():
        speeds = [speed(run) for run in rounds]
        peak = max(run["peak_bytes"] for run in rounds) / 2**30
        losses = " ".join(f"{loss:.4f}" for loss in rounds[0]["losses"])
        each = ", ".join(f"{value:.0f}" for value in speeds)
        lines.append(f"| {name} | {each} | {statistics.median(speeds):.0f} | {peak:.2f} | {losses} |")
    ours, theirs = runs["finetune"], runs["TRL"]
    ratios = [speed(a) / speed(b) for a, b in zip(ours, theirs, strict=True)]
    worst = max(abs(a - b) for a, b in zip(ours[0]["losses"], theirs[0]["losses"], strict=True))
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    lines += ["", f"finetune over TRL, each round: {shown}. Largest difference of a step's loss: {worst:.4f}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer-python", help="an interpreter that has trl")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num-rows", type=int, default=400)
    parser.add_argument("--max-seq-length", type=int, default=512)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--role", choices=["rows", "ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "rows":
        write_rows(args)
    elif args.role:
        figures = run_ours(args) if args.role == "ours" else run_trl(args)
        (args.work / f"{args.role}.json").write_text(json.dumps({**figures, "peak_bytes": peak_bytes()}))
    else:
        with tempfile.TemporaryDirectory() as folder:
            args.work = Path(folder)
            child(args, "rows", sys.executable)
            runs: dict[str, list[dict[str, Any]]] = {"finetune": [], "TRL": []}
            for _ in range(args.rounds):
                runs["finetune"].append(child(args, "ours", sys.executable))
                runs["TRL"].append(child(args, "trl", args.peer_python))
        print(report(runs))
        if args.out:
            args.out.write_text(json.dumps(runs, indent=2))


if __name__ == "__main__":
    main()
