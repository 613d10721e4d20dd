"""Every ZeRO stage, offload, accumulation and engine against one process: losses and gradient norms, step by step.

    python bench/parity.py [--ranks 2] [--precision fp32] [--steps 6] [--model FOLDER] [--engines own deepspeed]

Each combination trains the same model on the same rows of the same steps, dealt out to ranks and micro-batches, and is
compared with one process that takes them all at once. The numbers of targets a row differ and one row has none, so a
mean of means would show at once. Prints one line a combination: the largest relative difference of a loss and of a
gradient norm before clipping, or why no engine does it. Ends with 1 where a difference is above --tolerance (default:
1e-4 in fp32, 2e-2 otherwise). Without --model a small Llama with random weights is made; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
OFFLOADS = {
    "none": {},
    "optimizer": {"optimizer": "cpu"},
    "both": {"optimizer": "cpu", "parameters": "cpu"},
}
ACCUMULATIONS = (1, 4)
ROWS_A_RANK = 4
LENGTH = 24
SMALL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 40,
    # 63 rows of a matrix divide by neither two nor four: ranks hold unequal parts.
    "intermediate_size": 63,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
Combination = tuple[int, str, int, str]


def combinations(engines: list[str]) -> list[Combination]:
    return list(itertools.product(range(4), OFFLOADS, ACCUMULATIONS, engines))


def zero_section(combination: Combination) -> dict[str, Any]:
    stage, offload, _, engine = combination
    return {"stage": stage, "offload": OFFLOADS[offload], "engine": "auto" if engine == "own" else engine}


def refusal(combination: Combination, *, ranks: int, precision: str) -> str | None:
    """Why no engine does this, as the recipe's settings, the engine or what is installed say it."""
    from pydantic import ValidationError

    from finetune.engine.choice import choose_engine, require_installed
    from finetune.engine.settings import ZeroSettings
    from finetune.errors import FinetuneError

    try:
        zero = ZeroSettings.model_validate(zero_section(combination))
        name, _ = choose_engine(zero, world_size=ranks, device="cpu")
        require_installed(name)
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    except FinetuneError as error:
        return f"{error.what}: {error.fix}"
    if name == "deepspeed":
        from finetune.engine.deepspeed_config import refusal as deepspeed_refusal

        return deepspeed_refusal(zero, precision=precision, gradient_accumulation_steps=combination[2])
    return None


def make_model(folder: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    # As it saves, transformers imports a DeepSpeed that is installed, which would warn that it found no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def rows_of_step(step: int, *, num_rows: int, vocab_size: int) -> list[dict[str, Any]]:
    """Rows (1, LENGTH) of two documents and padding; numbers of targets from none to all."""
    import torch

    rows = []
    for number in range(num_rows):
        generator = torch.Generator().manual_seed(1000 * step + number)
        row = {
            "input_ids": torch.zeros(1, LENGTH, dtype=torch.int64),
            "targets": torch.full((1, LENGTH), -100),
            "position_ids": torch.zeros(1, LENGTH, dtype=torch.int64),
            "document_ids": torch.full((1, LENGTH), -1, dtype=torch.int32),
        }
        ids = torch.randint(3, vocab_size, (LENGTH - 4,), generator=generator)
        for document, (start, end) in enumerate(((0, 9), (9, LENGTH - 4))):
            row["input_ids"][0, start:end] = ids[start:end]
            row["position_ids"][0, start:end] = torch.arange(end - start)
            row["document_ids"][0, start:end] = document
            row["targets"][0, start : end - 1] = ids[start + 1 : end]
        keep = (3, 9, 0, 5, 18, 1, 12, 7)[number % 8]
        places = (row["targets"][0] >= 0).nonzero().squeeze(1)
        dropped = places[torch.randperm(len(places), generator=generator)[keep:]]
        row["targets"][0, dropped] = -100
        rows.append(row)
    return rows


def run_steps(
    model_folder: Path,
    zero_values: dict[str, Any],
    *,
    accumulation: int,
    precision: str,
    num_steps: int,
    rank: int,
    world_size: int,
    total_rows: int,
) -> dict[str, Any]:
    """{"engine", "losses", "norms", "seconds"} of ``num_steps`` steps over the rows that are this rank's."""
    import time

    import torch

    from finetune.engine.build import build_engine
    from finetune.engine.protocol import AdamWSettings
    from finetune.engine.settings import ZeroSettings
    from finetune.model.load import load_config, meta_model
    from finetune.train.loop import COMPUTE_DTYPES
    from finetune.train.loss import CausalLMLoss

    vocab_size = load_config(model_folder).get_text_config().vocab_size
    model = meta_model(model_folder)
    engine, _ = build_engine(
        CausalLMLoss(model),
        model,
        model_folder,
        zero=ZeroSettings.model_validate(zero_values),
        device="cpu",
        compute_dtype=COMPUTE_DTYPES[precision],
        adamw=AdamWSettings(weight_decay=0.1),
        gradient_accumulation_steps=accumulation,
    )
    losses, norms, start = [], [], time.perf_counter()
    for step in range(num_steps):
        rows = rows_of_step(step, num_rows=total_rows, vocab_size=vocab_size)
        mine = rows[rank::world_size]
        size = len(mine) // accumulation
        micro_batches = [
            {name: torch.cat([row[name] for row in mine[first : first + size]]) for name in mine[0]}
            for first in range(0, len(mine), size)
        ]
        num_targets = sum(int((row["targets"] >= 0).sum()) for row in rows)
        engine.forward_backward(micro_batches, denominator=float(num_targets))
        result = engine.clip_and_step(max_norm=1.0, learning_rate=1e-3)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return {"engine": engine.name, "losses": losses, "norms": norms, "seconds": time.perf_counter() - start}


def rank_main(task_file: Path) -> None:
    """One rank: every allowed combination in turn, in one launch; rank 0 leaves the results."""
    import torch

    from finetune.engine.launch import rank_process

    task = json.loads(task_file.read_text())
    with rank_process("cpu", timeout_seconds=300) as (rank, world_size):
        torch.set_num_threads(1)
        results = []
        for combination in task["combinations"]:
            results.append(
                run_steps(
                    Path(task["model"]),
                    zero_section(tuple(combination)),
                    accumulation=combination[2],
                    precision=task["precision"],
                    num_steps=task["steps"],
                    rank=rank,
                    world_size=world_size,
                    total_rows=ROWS_A_RANK * world_size,
                )
            )
        if rank == 0:
            task_file.with_suffix(".out").write_text(json.dumps(results))


def differences(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def measure(
    model_folder: Path, work: Path, *, ranks: int, precision: str, num_steps: int, engines: list[str]
) -> list[dict[str, Any]]:
    """One entry a combination: {"stage", "offload", "accumulation", "engine", and "loss", "norm" or "refused"}."""
    from finetune.engine.launch import run_ranks

    expected = run_steps(
        model_folder,
        {"stage": 0},
        accumulation=1,
        precision=precision,
        num_steps=num_steps,
        rank=0,
        world_size=1,
        total_rows=ROWS_A_RANK * ranks,
    )
    wanted = combinations(engines)
    refused = {each: refusal(each, ranks=ranks, precision=precision) for each in wanted}
    allowed = [each for each in wanted if refused[each] is None]
    task_file = work / "task.json"
    task = {"model": str(model_folder), "combinations": allowed, "precision": precision, "steps": num_steps}
    task_file.write_text(json.dumps(task))
    run_ranks(
        [str(Path(__file__).resolve()), "--rank-task", str(task_file)],
        num_processes=ranks,
        device="cpu",
        log_dir=work / "logs",
    )
    results = dict(zip(allowed, json.loads(task_file.with_suffix(".out").read_text()), strict=True))
    table = []
    for each in wanted:
        entry: dict[str, Any] = dict(zip(("stage", "offload", "accumulation", "asked"), each, strict=True))
        if refused[each] is not None:
            entry |= {"engine": each[3], "refused": refused[each]}
        else:
            found = results[each]
            entry |= {
                "engine": found["engine"],
                "loss": differences(found["losses"], expected["losses"]),
                "norm": differences(found["norms"], expected["norms"]),
                "seconds": found["seconds"],
            }
        table.append(entry)
    return table


def show(table: list[dict[str, Any]]) -> str:
    lines = ["| stage | offload | accumulation | engine | loss | gradient norm |", "|---|---|---|---|---|---|"]
    for entry in table:
        head = f"| {entry['stage']} | {entry['offload']} | {entry['accumulation']} | {entry['engine']} |"
        if "refused" in entry:
            lines.append(f"{head} refused: {entry['refused']} | |")
        else:
            lines.append(f"{head} {entry['loss']:.1e} | {entry['norm']:.1e} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder (default: a small Llama made here)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", choices=list(TOLERANCES), default="fp32")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--engines", nargs="+", choices=["own", "deepspeed"], default=["own", "deepspeed"])
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--json", type=Path, help="write the table there, too")
    parser.add_argument("--rank-task", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_task:
        rank_main(options.rank_task)
        return 0
    with tempfile.TemporaryDirectory() as work:
        table = measure(
            options.model or make_model(Path(work) / "model"),
            Path(work),
            ranks=options.ranks,
            precision=options.precision,
            num_steps=options.steps,
            engines=options.engines,
        )
    print(f"{options.ranks} ranks against one process, {options.steps} steps, {options.precision}\n\n{show(table)}")
    if options.json:
        options.json.write_text(json.dumps(table, indent=2))
    tolerance = options.tolerance or TOLERANCES[options.precision]
    off = [entry for entry in table if "loss" in entry and not max(entry["loss"], entry["norm"]) <= tolerance]
    print(f"\n{len(off)} above {tolerance:g}" if off else f"\nall within {tolerance:g}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
