"""Batches and models for the tests of loss, engines and training loop; also what each rank runs in those of several.

python -m tests.training engines MODEL OUT      every stage and accumulation; rank 0 writes the results to OUT
python -m tests.training train MODEL SETTINGS FOLDER STAGE
python -m tests.training runs TASKS             several trainings in one launch, see ``training_task``
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from finetune.engine.build import build_engine
from finetune.engine.protocol import AdamWSettings, Engine
from finetune.engine.settings import ZeroSettings
from finetune.model.load import meta_model
from finetune.train.loss import CausalLMLoss
from finetune.train.settings import TrainSettings
from tests.buffered import register_buffered

VOCABULARY = 300
# Two threads that wait for each other on a busy machine make these tiny steps ten times slower.
torch.set_num_threads(1)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def packed_row(
    documents: list[list[int]], *, length: int, supervised: list[list[bool]] | None = None
) -> dict[str, Tensor]:
    """One row (1, S) of packed documents; ``supervised[d][t]``: token t of document d is a target (default: all)."""
    input_ids = torch.zeros(1, length, dtype=torch.int64)
    targets = torch.full((1, length), -100)
    position_ids = torch.zeros(1, length, dtype=torch.int64)
    document_ids = torch.full((1, length), -1, dtype=torch.int32)
    start = 0
    for number, ids in enumerate(documents):
        end = start + len(ids)
        input_ids[0, start:end] = torch.tensor(ids)
        position_ids[0, start:end] = torch.arange(len(ids))
        document_ids[0, start:end] = number
        for t in range(1, len(ids)):
            if supervised is None or supervised[number][t]:
                targets[0, start + t - 1] = ids[t]
        start = end
    return {"input_ids": input_ids, "targets": targets, "position_ids": position_ids, "document_ids": document_ids}


def random_row(seed: int, *, num_targets: int, length: int = 24) -> dict[str, Tensor]:
    """Two documents and padding, with ``num_targets`` targets at random places."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (20,), generator=generator).tolist()
    row = packed_row([ids[:9], ids[9:]], length=length)
    places = (row["targets"][0] >= 0).nonzero().squeeze(1)
    kept = places[torch.randperm(len(places), generator=generator)[:num_targets]]
    targets = torch.full_like(row["targets"], -100)
    targets[0, kept] = row["targets"][0, kept]
    return {**row, "targets": targets}


def joined(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def num_targets(row: dict[str, Tensor]) -> int:
    return int((row["targets"] >= 0).sum())


def make_engine(folder: Path, *, stage: int = 0, dtype: str = "fp32", **adamw: Any) -> tuple[Engine, str]:
    model = meta_model(folder)
    return build_engine(
        CausalLMLoss(model),
        model,
        folder,
        zero=ZeroSettings(stage=stage),
        device="cpu",
        compute_dtype=DTYPES[dtype],
        adamw=AdamWSettings(**adamw),
    )


def run_steps(engine: Engine, *, accumulation: int, rank: int, world_size: int) -> dict[str, list[float]]:
    """Three steps over four rows of 3, 9, 0 and 5 targets, dealt out to ranks and micro-batches."""
    losses, norms = [], []
    for step in range(3):
        rows = [random_row(10 * step + i, num_targets=n) for i, n in enumerate((3, 9, 0, 5))]
        mine = rows[rank::world_size]
        micro_batches = mine if accumulation > 1 else [joined(mine)]
        engine.forward_backward(micro_batches, denominator=17)
        result = engine.clip_and_step(max_norm=1.0, learning_rate=1e-3)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    held_out = float(engine.forward(random_row(99, num_targets=7), denominator=7))
    return {"losses": losses, "norms": norms, "held_out": [held_out]}


def whole_state(engine: Engine) -> dict[str, Tensor]:
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in engine.state().items()
    }


def train_settings(data_file: Path, **changes: Any) -> TrainSettings:
    settings = {
        "data": [{"path": str(data_file), "format": "text"}],
        "max_seq_length": 32,
        "max_steps": 6,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "warmup_ratio": 0.3,
        "save_every_steps": 2,
        "keep_checkpoints": 9,
    }
    return TrainSettings.model_validate({**settings, **changes})


def write_texts(path: Path, num_rows: int = 40) -> Path:
    rows = [{"text": f"row {i}: the fox jumps over {i * i} lazy dogs" + " and on" * (i % 5)} for i in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _engines(model: Path, out: Path, rank: int, world_size: int) -> None:
    results, states = {}, {}
    for dtype in DTYPES:
        for stage in range(4):
            for accumulation in (1, 2):
                engine, _ = make_engine(model, stage=stage, dtype=dtype, weight_decay=0.1)
                key = f"{dtype} {stage} {accumulation}"
                results[key] = run_steps(engine, accumulation=accumulation, rank=rank, world_size=world_size)
                results[key]["rows"] = [float(sum(value.to_local().numel() for value in _sharded(engine)))]
                states[key] = whole_state(engine)
    states |= _odd_models(out.parent, rank, world_size)
    if rank == 0:
        torch.save(states, out.with_suffix(".pt"))
        out.write_text(json.dumps(results))


ODD = {"replicated": {"stage": 0}, "sharded": {"stage": 3}, "host": {"stage": 2, "offload": {"optimizer": "cpu"}}}
FROZEN = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight")


def _odd_models(place: Path, rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
    """Three steps of a model with tied weights, frozen parameters and buffers of several types, and its checkpoint."""
    from finetune.checkpoint.commit import save_checkpoint

    states = {}
    register_buffered()
    for name, zero in ODD.items():
        model = meta_model(place / "odd")
        for parameter, value in model.named_parameters():
            value.requires_grad_(parameter not in FROZEN)
        engine, _ = build_engine(
            CausalLMLoss(model),
            model,
            place / "odd",
            zero=ZeroSettings.model_validate(zero),
            device="cpu",
            compute_dtype=torch.bfloat16,
            adamw=AdamWSettings(),
        )
        for step in range(3):
            row = random_row(step * world_size + rank, num_targets=9)
            row = {key: value.clamp(max=96) for key, value in row.items()}
            engine.forward_backward([row], denominator=9.0 * world_size)
            assert engine.clip_and_step(max_norm=1.0, learning_rate=1e-2).is_finite
        save_checkpoint(place / f"odd-{name}", step=3, state=engine.state(), extra={}, model_files=place / "odd")
        states[f"odd {name}"] = whole_state(engine)
    return states


def training_task(
    model: Path, settings: TrainSettings, zero: dict[str, Any], folder: Path, *, go_on: tuple[Path, int] | None = None
) -> dict[str, Any]:
    """One training; ``go_on``: (folder, step) of another one's checkpoint that it starts from."""
    return {
        "model": str(model),
        "settings": settings.model_dump(mode="json"),
        "zero": zero,
        "folder": str(folder),
        "go_on": None if go_on is None else [str(go_on[0]), go_on[1]],
    }


def run_task(task: dict[str, Any], *, rank: int) -> dict[str, Any]:
    from finetune.train.loop import train

    folder = Path(task["folder"])
    if task["go_on"] is not None and rank == 0:
        source, step = task["go_on"]
        name = f"checkpoints/step-{step:08d}"
        shutil.copytree(Path(source) / name, folder / name)
        lines = (Path(source) / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[:step]))
    if dist.is_initialized():
        dist.barrier()
    return train(
        model_folder=Path(task["model"]),
        settings=TrainSettings.model_validate(task["settings"]),
        zero=ZeroSettings.model_validate(task["zero"]),
        launch_device="cpu",
        seed=5,
        folder=folder,
    )


def _sharded(engine: Engine) -> list[Any]:
    return [value for name, value in engine.state().items() if name.startswith("model.") and hasattr(value, "to_local")]


def main(arguments: list[str]) -> None:
    from finetune.engine.launch import rank_process
    from finetune.train.loop import train

    verb, model, *rest = arguments
    if verb == "runs":
        with rank_process("cpu", timeout_seconds=120) as (rank, _):
            torch.set_num_threads(1)
            for task in json.loads(Path(model).read_text()):
                run_task(task, rank=rank)
        return
    with rank_process("cpu", timeout_seconds=60) as (rank, world_size):
        torch.set_num_threads(1)
        if verb == "engines":
            _engines(Path(model), Path(rest[0]), rank, world_size)
            return
        settings, folder, stage = rest
        train(
            model_folder=Path(model),
            settings=TrainSettings.model_validate_json(Path(settings).read_text()),
            zero=ZeroSettings.model_validate({"stage": int(stage)}),
            launch_device="cpu",
            seed=5,
            folder=Path(folder),
        )


if __name__ == "__main__":
    main(sys.argv[1:])
