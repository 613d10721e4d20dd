"""Prepare 100,000 short conversations by finetune and by TRL's SFTTrainer: tokens a second, memory, and a second start.

    python bench/data.py --model FOLDER --data gsm8k_train.jsonl --peer-python PYTHON

The rows are the file's questions and answers, repeated with a number before each question, so that no two are equal.
Both tokenize them by the model's chat template and learn the answer alone; TRL gets them as prompt and completion, for
which it needs no markers in the template. Every run is a process of its own on an empty cache, the two alternate, and
only preparing counts: no imports, no model, no packing. Then finetune starts once more, on the cache it left. Prints a
Markdown table; --out keeps the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MAX_SEQ_LENGTH = 1024


def write_rows(source: Path, num_rows: int, work: Path) -> None:
    """The same conversations in the shape that each of the two reads."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    with (work / "finetune.jsonl").open("w") as ours, (work / "trl.jsonl").open("w") as theirs:
        for number in range(num_rows):
            row = rows[number % len(rows)]
            prompt = [{"role": "user", "content": f"{number}. {row['question']}"}]
            reply = [{"role": "assistant", "content": row["answer"]}]
            ours.write(json.dumps({"messages": prompt + reply}) + "\n")
            theirs.write(json.dumps({"prompt": prompt, "completion": reply}) + "\n")


def run_ours(args: argparse.Namespace) -> dict[str, Any]:
    from finetune.data.loader import StepLoader
    from finetune.data.settings import DatasetSettings
    from finetune.data.tokens import prepare_dataset
    from finetune.model.load import load_tokenizer

    tokenizer = load_tokenizer(args.model)
    before = own_peak_bytes()
    start = time.perf_counter()
    dataset, _ = prepare_dataset(
        [DatasetSettings(path=str(args.work / "finetune.jsonl"))],
        tokenizer=tokenizer,
        max_seq_length=MAX_SEQ_LENGTH,
        overlong="truncate",
        num_workers=args.workers,
    )
    seconds = time.perf_counter() - start
    loader = StepLoader(
        dataset,
        packing=True,
        max_seq_length=MAX_SEQ_LENGTH,
        micro_batch_size=8,
        gradient_accumulation_steps=1,
        world_size=1,
        rank=0,
        seed=0,
        epochs=1,
        max_steps=None,
        pad_token_id=0,
    )
    loader.batches(0)
    return {
        "rows": len(dataset),
        "tokens": int(dataset.lengths.sum(dtype="int64")),
        "targets": int(dataset.supervised.sum(dtype="int64")),
        "seconds": seconds,
        "first_batch_seconds": time.perf_counter() - start,
        "fill_rate": loader.fill_rate(),
        "peak_bytes": own_peak_bytes(),
        "over_imports_bytes": own_peak_bytes() - before,
        "worker_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }


def run_trl(args: argparse.Namespace) -> dict[str, Any]:
    import pyarrow.compute as pc
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    taken = {}

    class Timed(SFTTrainer):
        def _prepare_dataset(self, *positional: Any, **named: Any) -> Any:
            start = time.perf_counter()
            prepared = super()._prepare_dataset(*positional, **named)
            taken["prepare"] = time.perf_counter() - start
            return prepared

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    config = SFTConfig(
        output_dir=str(args.work / "out"),
        max_length=MAX_SEQ_LENGTH,
        packing=False,
        dataset_num_proc=args.workers or None,
        use_cpu=True,
        report_to="none",
    )
    before = own_peak_bytes()
    start = time.perf_counter()
    rows = load_dataset("json", data_files=str(args.work / "trl.jsonl"), split="train")
    read = time.perf_counter() - start
    trainer = Timed(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
    prepared = trainer.train_dataset
    seconds, peak = read + taken["prepare"], own_peak_bytes()
    table = prepared.with_format("arrow")[:]
    return {
        "rows": len(prepared),
        "tokens": pc.sum(pc.list_value_length(table["input_ids"])).as_py(),
        "targets": pc.sum(pc.not_equal(pc.list_flatten(table["labels"]), -100)).as_py(),
        "seconds": seconds,
        "peak_bytes": peak,
        "over_imports_bytes": peak - before,
        "worker_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }


def own_peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux only")


def child(args: argparse.Namespace, role: str, *, workers: int, cache: Path) -> dict[str, Any]:
    python = args.peer_python if role == "trl" else sys.executable
    flags = ["--role", role, "--model", args.model, "--work", args.work, "--workers", workers]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "FINETUNE_CACHE": str(cache)}
    environment |= {"HF_DATASETS_CACHE": str(cache / "datasets"), "TOKENIZERS_PARALLELISM": "true"}
    subprocess.run([python, __file__, *map(str, flags)], check=True, env=environment, stdout=sys.stderr)
    result: dict[str, Any] = json.loads((args.work / f"{role}.json").read_text())
    return result


def report(runs: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| | tokens/s, each round | median | seconds | memory over the imports | largest worker |",
        "|---|---|---|---|---|---|",
    ]
    for name, rounds in runs.items():
        speeds = [run["tokens"] / run["seconds"] for run in rounds]
        seconds = statistics.median(run["seconds"] for run in rounds)
        memory = max(run["over_imports_bytes"] for run in rounds) / 2**20
        worker = max(run["worker_bytes"] for run in rounds) / 2**20
        each = ", ".join(f"{speed:,.0f}" for speed in speeds)
        median = f"{statistics.median(speeds):,.0f} | {seconds:.2f}"
        lines.append(f"| {name} | {each} | {median} | {memory:,.0f} MiB | {worker:,.0f} MiB |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--peer-python", help="an interpreter that has trl")
    parser.add_argument("--num-rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--role", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        figures = run_ours(args) if args.role == "ours" else run_trl(args)
        (args.work / f"{args.role}.json").write_text(json.dumps(figures))
        return
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        args.work = Path(folder)
        write_rows(args.data, args.num_rows, args.work)
        for number in range(args.rounds):
            for workers in (0, args.workers):
                told = f", {workers} processes" if workers else ", one process"
                cache = args.work / f"cache-{number}-{workers}"
                runs.setdefault("finetune" + told, []).append(child(args, "ours", workers=workers, cache=cache))
                again = child(args, "ours", workers=workers, cache=cache)
                again |= {"seconds": again["first_batch_seconds"]}
                runs.setdefault("finetune again, to the first batch", []).append(again)
                if args.peer_python:
                    runs.setdefault("TRL" + told, []).append(child(args, "trl", workers=workers, cache=cache))
    print(report(runs))
    if args.out:
        args.out.write_text(json.dumps(runs, indent=2))


if __name__ == "__main__":
    main()
