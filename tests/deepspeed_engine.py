"""What each rank runs for tests/test_engine_deepspeed.py: python -m tests.deepspeed_engine MODEL ODD_MODEL OUT

Starting DeepSpeed takes longer than all of this, so it is one launch. Rank 0 leaves the results in OUT as JSON.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.checkpoint.commit import load_checkpoint, save_checkpoint
from finetune.engine.build import build_engine
from finetune.engine.launch import process_group, rank_process
from finetune.engine.protocol import AdamWSettings, Engine, MicroBatch
from finetune.engine.settings import ZeroSettings
from finetune.model.activations import checkpoint_blocks
from finetune.model.load import meta_model
from finetune.model.matmul import round_alike
from finetune.train.loss import CausalLMLoss
from tests.buffered import register_buffered
from tests.training import joined, random_row

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"optimizer": "cpu"},
    "both": {"optimizer": "cpu", "parameters": "cpu"},
    "parameters": {"parameters": "cpu"},
    "ratio": {"optimizer": "cpu", "ratio": 0.5},
}
ALLOWED = [(0, "none")]
ALLOWED += [(stage, offload) for stage in (1, 2) for offload in ("none", "optimizer")]
ALLOWED += [(3, offload) for offload in OFFLOADS]
PARITY = [("fp32", stage, offload, 4) for stage, offload in ALLOWED]
PARITY += [("fp32", stage, offload, 1) for stage, offload in ALLOWED if offload not in ("parameters", "ratio")]
# The optimizers that DeepSpeed has for bfloat16: its own for stage 1, one for stages 1 and 2, one for 3.
PARITY += [("bf16", 1, "none", 4), ("bf16", 2, "optimizer", 4), ("bf16", 3, "both", 4)]
ROUND_TRIPS = [("fp32", 0, "none"), ("bf16", 1, "none"), ("bf16", 2, "optimizer"), ("bf16", 3, "both")]
FROZEN = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight")
TARGETS = (3, 9, 0, 5, 2, 7, 1, 4)
VOCABULARY = 90


def make(
    folder: Path,
    zero: dict[str, Any],
    *,
    dtype: str,
    accumulation: int = 1,
    frozen: tuple[str, ...] = (),
    checkpoints: bool = False,
) -> Engine:
    model = meta_model(folder)
    round_alike(model)
    if checkpoints:
        checkpoint_blocks(model, every=1)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    engine, _ = build_engine(
        CausalLMLoss(model),
        model,
        folder,
        zero=ZeroSettings.model_validate(zero),
        device="cpu",
        compute_dtype=DTYPES[dtype],
        adamw=AdamWSettings(weight_decay=0.1),
        gradient_accumulation_steps=accumulation,
    )
    return engine


def deepspeed(stage: int, offload: str) -> dict[str, Any]:
    return {"stage": stage, "engine": "deepspeed", "offload": OFFLOADS[offload]}


def micro_batches(step: int, *, accumulation: int, rank: int, world_size: int) -> list[MicroBatch]:
    """Rows of unequal numbers of targets, one of none; the fifth step has half the micro-batches, as an epoch's end."""
    rows = [random_row(10 * step + number, num_targets=count) for number, count in enumerate(TARGETS)]
    for row in rows:
        row["input_ids"] %= VOCABULARY
        row["targets"] = torch.where(row["targets"] < 0, row["targets"], row["targets"] % VOCABULARY)
    mine, size = rows[rank::world_size], max(1, accumulation // 2) if step == 4 else accumulation
    return [joined(mine[first::size]) for first in range(size)]


def run(
    engine: Engine, steps: range, *, accumulation: int, rank: int, world_size: int, denominator: float = sum(TARGETS)
) -> dict[str, list[float]]:
    losses, norms = [], []
    for step in steps:
        batches = micro_batches(step, accumulation=accumulation, rank=rank, world_size=world_size)
        engine.forward_backward(batches, denominator=denominator)
        result = engine.clip_and_step(max_norm=1.0, learning_rate=1e-3 * (1 + step % 3))
        losses.append(result.loss)
        norms.append(result.grad_norm)
    held_out = engine.forward(micro_batches(99, accumulation=1, rank=0, world_size=1)[0], denominator=sum(TARGETS))
    return {"losses": losses, "norms": norms, "held_out": [float(held_out)]}


def whole_state(engine: Engine) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in engine.state().items()
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def parity(folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    results = {}
    for dtype, stage, offload, accumulation in PARITY:
        engine = make(folder, deepspeed(stage, offload), dtype=dtype, accumulation=accumulation)
        key = f"{dtype} {stage} {offload} {accumulation}"
        results[key] = run(engine, range(6), accumulation=accumulation, rank=rank, world_size=world_size)
    engine = make(folder, deepspeed(3, "none"), dtype="bf16", accumulation=2, checkpoints=True)
    kept = make(folder, deepspeed(3, "none"), dtype="bf16", accumulation=2)
    runs = [run(each, range(2), accumulation=2, rank=rank, world_size=world_size) for each in (engine, kept)]
    results["checkpointed blocks are the same"] = runs[0] == runs[1]
    return results


def round_trips(folder: Path, out: Path, rank: int, world_size: int) -> dict[str, Any]:
    """Three steps, a checkpoint, two steps more; what the same checkpoint gives when another engine loads it."""
    results: dict[str, Any] = {}
    for dtype, stage, offload in ROUND_TRIPS:
        key, root = f"{dtype} {stage} {offload}", out.parent / f"deepspeed-{dtype}-{stage}-{offload}"
        arguments: dict[str, Any] = {"dtype": dtype, "accumulation": 2, "frozen": FROZEN}
        engine = make(folder, deepspeed(stage, offload), **arguments)
        begun = whole_state(engine)
        run(engine, range(3), accumulation=2, rank=rank, world_size=world_size)
        save_checkpoint(root, step=3, state=engine.state(), extra={}, model_files=folder)
        saved = whole_state(engine)
        again = make(folder, deepspeed(stage, offload), **arguments)
        load_checkpoint(root / "step-00000003", again.state())
        again.state_loaded()
        loaded = whole_state(again)
        went_on = [run(each, range(3, 5), accumulation=2, rank=rank, world_size=world_size) for each in (engine, again)]
        results[key] = {"went on": went_on[0], "resumed bit for bit": went_on[0] == went_on[1]}
        results[key] |= {"loaded": same(saved, loaded), "steps": float(saved["optimizer.step"])}
        if rank == 0:
            torch.save(begun, root / "begun.pt")
    root = out.parent / "fsdp2"
    engine = make(folder, {"stage": 2}, dtype="bf16", accumulation=2, frozen=FROZEN)
    run(engine, range(3), accumulation=2, rank=rank, world_size=world_size)
    save_checkpoint(root, step=3, state=engine.state(), extra={}, model_files=folder)
    again = make(folder, deepspeed(3, "none"), dtype="bf16", accumulation=2, frozen=FROZEN)
    load_checkpoint(root / "step-00000003", again.state())
    again.state_loaded()
    results["fsdp2"] = [
        run(each, range(3, 5), accumulation=2, rank=rank, world_size=world_size) for each in (engine, again)
    ]
    return results


def bad_steps(folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    """A loss that isn't finite on rank 0 alone; a float16 gradient that overflows."""
    results: dict[str, Any] = {}
    for stage, offload in ((0, "none"), (1, "none"), (2, "optimizer"), (3, "none"), (3, "both")):
        engine = make(folder, deepspeed(stage, offload), dtype="fp32", accumulation=2)
        run(engine, range(1), accumulation=2, rank=rank, world_size=world_size)
        before = whole_state(engine)
        batches = micro_batches(1, accumulation=2, rank=rank, world_size=world_size)
        engine.forward_backward(batches, denominator=math.nan if rank == 0 else 31.0)
        result = engine.clip_and_step(max_norm=1.0, learning_rate=1e-3)
        unchanged = same(before, whole_state(engine))
        after = run(engine, range(1, 2), accumulation=2, rank=rank, world_size=world_size)
        results[f"{stage} {offload}"] = {"finite": result.is_finite, "unchanged": unchanged, "after": after}
    for stage, offload in ((2, "optimizer"), (3, "both")):
        engine = make(folder, deepspeed(stage, offload), dtype="fp16", accumulation=2)
        engine.state()["optimizer.loss_scale"].fill_(2.0**40)
        engine.state_loaded()
        before = whole_state(engine)
        batches = micro_batches(1, accumulation=2, rank=rank, world_size=world_size)
        engine.forward_backward(batches, denominator=31.0)
        result = engine.clip_and_step(max_norm=1.0, learning_rate=1e-3)
        after = whole_state(engine)
        scale = float(after.pop("optimizer.loss_scale"))
        before.pop("optimizer.loss_scale")
        results[f"fp16 {stage} {offload}"] = {
            "skipped": result.is_skipped,
            "loss is finite": math.isfinite(result.loss),
            "unchanged": same(before, after),
            "scale": scale / 2.0**40,
        }
        engine.state()["optimizer.loss_scale"].fill_(2.0**6)
        engine.state_loaded()
        trained = run(engine, range(3), accumulation=2, rank=rank, world_size=world_size)
        results[f"fp16 {stage} {offload}"] |= {"trained": trained, "steps": float(engine.state()["optimizer.step"])}
    return results


def nvme(folder: Path, out: Path, rank: int, world_size: int) -> None:
    """The optimizer on the cpu and on nvme; a checkpoint there, loaded anew."""
    root, runs = out.parent / "checkpoints", []
    zero = deepspeed(3, "none") | {"offload": {"optimizer": "nvme", "nvme_path": str(out.parent)}}
    for each in (deepspeed(3, "optimizer"), zero):
        engine = make(folder, each, dtype="bf16", accumulation=2)
        runs.append(run(engine, range(2), accumulation=2, rank=rank, world_size=world_size))
    save_checkpoint(root, step=2, state=engine.state(), extra={}, model_files=folder)
    again = make(folder, zero, dtype="bf16", accumulation=2)
    load_checkpoint(root / "step-00000002", again.state())
    again.state_loaded()
    went_on = [run(each, range(2, 4), accumulation=2, rank=rank, world_size=world_size) for each in (engine, again)]
    if rank == 0:
        out.write_text(json.dumps({"runs": runs, "went on": went_on}))


def main(arguments: list[str]) -> None:
    model, odd, out = map(Path, arguments[-3:])
    register_buffered()
    if arguments[0] == "nvme":
        with rank_process("cpu", timeout_seconds=120) as (rank, world_size):
            torch.set_num_threads(1)
            nvme(model, out, rank, world_size)
        return
    if arguments[0] == "alone":
        with process_group("cpu", alone_too=True) as (rank, world_size):
            engine = make(model, deepspeed(3, "optimizer"), dtype="fp32", accumulation=4)
            out.write_text(json.dumps(run(engine, range(6), accumulation=4, rank=rank, world_size=world_size)))
        return
    with rank_process("cpu", timeout_seconds=120) as (rank, world_size):
        torch.set_num_threads(1)
        results = {
            "parity": parity(model, rank, world_size),
            "round trips": round_trips(odd, out, rank, world_size),
            "bad steps": bad_steps(model, rank, world_size),
        }
        if rank == 0:
            out.write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
