"""Measure what training really takes, beside what ``finetune plan`` predicts: stages x offloads x ranks, on the cpu.

    python bench/memory.py                                     # a 70M Llama on 1, 2 and 4 ranks
    python bench/memory.py --ranks 2 --stages 3 --offloads none,both

Each combination is a launch of its own. A rank trains a tiny model first, through the same loop and engine, so that
libraries, process group and their threads stand; what it then grows by while it trains the model for a few steps (rows
packed and attended as in any training, to the checkpoint at the end) is set against the prediction without its
``process`` part. The rank that grew most counts. Prints a Markdown table; --out keeps the figures as JSON. Linux only.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from finetune.engine.settings import OffloadSettings, ZeroSettings
from finetune.train.settings import TrainSettings

SEED = 5
WORDS = "the a ship leaves harbour at nine comes back noon user asks and assistant answers Paris is it far".split()  # noqa: SIM905
OFFLOADS = {
    "none": OffloadSettings(),
    "optimizer": OffloadSettings(optimizer="cpu"),
    "both": OffloadSettings(optimizer="cpu", parameters="cpu"),
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}


def make_model(folder: Path, sizes: dict[str, int]) -> Path:
    """A Llama of random weights in float32 with a small tokenizer, which writes the first few of its tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from finetune.model.tokenizer import train_tokenizer

    heads = max(1, sizes["hidden_size"] // 64)
    config = LlamaConfig(
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=2048,
        tie_word_embeddings=bool(sizes.get("tied", 0)),
        **{name: value for name, value in sizes.items() if name != "tied"},
    )
    torch.manual_seed(SEED)
    LlamaForCausalLM(config).save_pretrained(folder)
    train_tokenizer([" ".join(WORDS)] * 4, vocab_size=300, chat_template=None).save_pretrained(folder)
    return folder


def make_rows(path: Path, *, num_rows: int) -> Path:
    """Documents of 5 to 120 words."""
    chosen = random.Random(SEED)
    with path.open("w") as stream:
        for _ in range(num_rows):
            text = " ".join(chosen.choices(WORDS, k=chosen.randint(5, 120)))
            stream.write(json.dumps({"text": text}) + "\n")
    return path


def settings(job: dict[str, Any], data: str) -> TrainSettings:
    return TrainSettings.model_validate(
        {
            "data": [{"path": data}],
            "max_seq_length": job["max_seq_length"],
            "micro_batch_size": job["micro_batch_size"],
            "gradient_accumulation_steps": job["accumulation"],
            "gradient_checkpointing": job["checkpointing"],
            "mixed_precision": job["precision"],
            "max_steps": job["steps"],
            "keep_checkpoints": 1,
        }
    )


def zero(job: dict[str, Any]) -> ZeroSettings:
    return ZeroSettings(stage=job["stage"], engine=job["engine"], offload=OFFLOADS[job["offload"]])


def measure_rank(job: dict[str, Any], rank: int) -> None:
    """Train the tiny model, then the model; leave this process's memory before, and its peak, in a file."""
    from finetune.train.loop import train

    def run(model: Path, folder: Path, data: str) -> None:
        train(
            model_folder=model,
            settings=settings(job, data),
            zero=zero(job),
            launch_device="cpu",
            seed=SEED,
            folder=folder,
        )

    if job.get("plain_heap"):
        from finetune.engine import build

        build.give_back_large_memory = lambda: None
    work = Path(job["work"])
    run(Path(job["tiny"]), work / "tiny-run", job["data"])
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # The peak so far is forgotten: proc(5).
    started = time.process_time()
    run(Path(job["model"]), work / "run", job["data"])
    figures = {"before": before, "peak": status_bytes("VmHWM"), "cpu_seconds": time.process_time() - started}
    (work / f"rank-{rank}.json").write_text(json.dumps(figures))


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def measure(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Launch the ranks of one combination; their figures in order."""
    from finetune.engine.launch import run_ranks

    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "job.json"
        path.write_text(json.dumps({**job, "work": work}))
        arguments = [__file__, "--rank-of", str(path)]
        if job["ranks"] == 1:
            subprocess.run([sys.executable, *arguments], check=True)
        else:
            run_ranks(arguments, num_processes=job["ranks"], device="cpu", log_dir=Path(work) / "logs")
        return [json.loads((Path(work) / f"rank-{rank}.json").read_text()) for rank in range(job["ranks"])]


def predict(job: dict[str, Any]) -> Any:
    from finetune.engine.memory import Workload, predict_memory
    from finetune.model.load import load_config

    chosen = settings(job, job["data"])
    workload = Workload(
        zero=zero(job),
        world_size=job["ranks"],
        micro_batch_size=chosen.micro_batch_size,
        max_seq_length=chosen.max_seq_length,
        gradient_accumulation_steps=chosen.gradient_accumulation_steps,
        mixed_precision=chosen.mixed_precision,
        checkpointed_every=chosen.checkpointed_every,
    )
    return predict_memory(load_config(Path(job["model"])), workload)


def jobs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The combinations that the settings allow."""
    found = []
    for ranks in args.ranks:
        for stage in args.stages:
            for offload in args.offloads:
                if offload == "both" and stage != 3:
                    continue
                for accumulation in args.accumulations:
                    found.append(
                        {
                            "ranks": ranks,
                            "stage": stage,
                            "offload": offload,
                            "accumulation": accumulation,
                            "engine": args.engine,
                            "checkpointing": args.checkpointing,
                            "precision": args.precision,
                            "micro_batch_size": args.micro_batch_size,
                            "max_seq_length": args.max_seq_length,
                            "steps": args.steps,
                            "plain_heap": args.plain_heap,
                        }
                    )
    return found


def words(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=words(int), default=[1, 2, 4])
    parser.add_argument("--stages", type=words(int), default=[0, 1, 2, 3])
    parser.add_argument("--offloads", type=words(str), default=list(OFFLOADS))
    parser.add_argument("--accumulations", type=words(int), default=[1])
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--checkpointing", default="none")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--max-seq-length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", type=json.loads, default={}, help="sizes that differ from the 70M model's, as JSON")
    parser.add_argument("--plain-heap", action="store_true", help="leave glibc's heap as it is where ranks shard")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        return be_rank(json.loads(args.rank_of.read_text()))
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "vocab_size": 32000, **args.model}
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        common = {
            "model": str(make_model(folder / "model", sizes)),
            "tiny": str(make_model(folder / "tiny", TINY)),
            "data": str(make_rows(folder / "rows.jsonl", num_rows=400)),
        }
        print(
            "| ranks | stage | offload | accumulation | measured MiB | predicted MiB | predicted / measured | CPU s |"
        )
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for job in jobs(args):
            ranks = measure({**job, **common})
            grown = [figures["peak"] - figures["before"] for figures in ranks]
            seconds = max(figures["cpu_seconds"] for figures in ranks)
            found = predict({**job, **common})
            row = {**job, "measured": grown, "predicted": found.growth_bytes, "ratio": found.growth_bytes / max(grown)}
            rows.append(row)
            print(
                f"| {job['ranks']} | {job['stage']} | {job['offload']} | {job['accumulation']} | "
                f"{max(grown) / 2**20:,.0f} | {row['predicted'] / 2**20:,.0f} | {row['ratio']:.3f} | {seconds:.1f} |",
                flush=True,
            )
    ratios = [row["ratio"] for row in rows]
    print(f"\n{found.num_parameters / 1e6:.1f}M parameters; ratios {min(ratios):.3f} to {max(ratios):.3f}")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=2))


def be_rank(job: dict[str, Any]) -> None:
    from finetune.worker import quiet_libraries

    quiet_libraries()
    if job["ranks"] == 1:
        return measure_rank(job, 0)
    from finetune.engine.launch import rank_process

    with rank_process("cpu") as (rank, _):
        measure_rank(job, rank)


if __name__ == "__main__":
    main()
