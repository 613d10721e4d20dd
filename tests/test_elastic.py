"""A training goes on from its checkpoint on any number of ranks, under any stage and offload, with what may change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.checkpoint.bands import read_tensor
from finetune.checkpoint.stored import stored_tensors
from finetune.engine.launch import run_ranks
from finetune.errors import CheckpointError
from finetune.fingerprint import Fingerprints
from finetune.recipe import load_recipe
from finetune.train.metrics import read_metrics
from tests.tiny import tiny_llama
from tests.training import run_task, train_settings, training_task, write_texts

ROWS_A_STEP = 12
STEPS = 6
HOST = {"stage": 3, "offload": {"optimizer": "cpu"}}
BOTH = {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}}
TWO_RANKS = {"stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "stage 2": {"stage": 2}, "host": HOST, "both": BOTH}


def settings(data: Path, ranks: int, **changes: Any) -> Any:
    chosen = {
        "gradient_accumulation_steps": ROWS_A_STEP // ranks,
        "max_steps": STEPS,
        "mixed_precision": "fp32",
        "max_seq_length": 16,
        "packing": False,
    }
    return train_settings(data, **{**chosen, **changes})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elastic")
    write_texts(folder / "texts.jsonl", 40)
    tiny_llama(folder / "model", hidden_size=32, intermediate_size=47)
    dropout = tiny_llama(folder / "dropout", hidden_size=32, intermediate_size=47)
    config = json.loads((dropout / "config.json").read_text())
    (dropout / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.2}))
    return folder


def launch(place: Path, ranks: int, tasks: list[dict[str, Any]]) -> None:
    (place / f"tasks-{ranks}.json").write_text(json.dumps(tasks))
    arguments = ["-m", "tests.training", "runs", str(place / f"tasks-{ranks}.json")]
    run_ranks(arguments, num_processes=ranks, device="cpu", log_dir=place / f"logs-{ranks}")


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """Two ranks, stage 3, six steps; the same again from the checkpoint of step 2 under every stage and offload."""
    data = place / "texts.jsonl"
    tasks = [training_task(place / "model", settings(data, 2), {"stage": 3}, place / "whole")]
    for name, zero in TWO_RANKS.items():
        tasks.append(training_task(place / "model", settings(data, 2), zero, place / name, go_on=(place / "whole", 2)))
    for precision in ("fp32", "fp16"):
        chosen, whole = settings(data, 2, mixed_precision=precision), place / f"whole-{precision}"
        tasks.append(training_task(place / "dropout", chosen, {"stage": 3}, whole))
        tasks.append(training_task(place / "dropout", chosen, {"stage": 3}, place / precision, go_on=(whole, 2)))
        again = training_task(place / "dropout", chosen, HOST, place / f"host-{precision}")
        tasks.append(again)
        tasks.append(
            training_task(
                place / "dropout", chosen, HOST, place / f"{precision}-host", go_on=(place / f"host-{precision}", 4)
            )
        )
    launch(place, 2, tasks)
    return place


def state(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = folder / f"checkpoints/step-{STEPS:08d}"
    return {name: read_tensor(stored) for name, stored in stored_tensors(checkpoint).items()}


def figures(folder: Path, *keys: str) -> list[list[Any]]:
    return [[line[key] for key in keys] for line in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("whole", "resumed"),
    [("whole-fp32", "fp32"), ("whole-fp16", "fp16"), ("host-fp32", "fp32-host"), ("host-fp16", "fp16-host")],
)
def test_two_ranks_resume_bit_by_bit_dropout_included(trained: Path, whole: str, resumed: str) -> None:
    expected, found = state(trained / whole), state(trained / resumed)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert value.equal(found[name]), name
    assert figures(trained / whole, "step", "loss", "grad_norm", "num_tokens", "num_supervised_tokens") == figures(
        trained / resumed, "step", "loss", "grad_norm", "num_tokens", "num_supervised_tokens"
    )
    assert ("optimizer.loss_scale" in expected) == ("fp16" in whole)


def require_alike(trained: Path, name: str) -> None:
    expected, found = (figures(trained / folder, "loss", "grad_norm") for folder in ("whole", name))
    assert len(found) == STEPS
    assert found[:2] == expected[:2]
    for got, wanted in zip(found[2:], expected[2:], strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    exact = ("step", "learning_rate", "num_tokens", "num_supervised_tokens")
    assert figures(trained / name, *exact) == figures(trained / "whole", *exact)
    assert state(trained / name).keys() == state(trained / "whole").keys()


@pytest.mark.parametrize("name", TWO_RANKS)
def test_a_checkpoint_goes_on_under_every_stage_and_offload(trained: Path, name: str) -> None:
    require_alike(trained, name)


@pytest.mark.parametrize(("ranks", "zero"), [(1, {"stage": 3}), (3, {"stage": 2}), (4, {"stage": 3}), (4, HOST)])
def test_a_checkpoint_of_two_ranks_goes_on_on_one_three_or_four(
    trained: Path, ranks: int, zero: dict[str, Any]
) -> None:
    name = f"{ranks} ranks, {'host' if 'offload' in zero else zero['stage']}"
    task = training_task(
        trained / "model", settings(trained / "texts.jsonl", ranks), zero, trained / name, go_on=(trained / "whole", 2)
    )
    if ranks == 1:
        run_task(task, rank=0)
    else:
        launch(trained, ranks, [task])
    require_alike(trained, name)


def test_one_rank_then_two_then_one_train_on_the_packs_of_an_uninterrupted_run(place: Path) -> None:
    """Forty rows packed into less than two steps an epoch, so each part crosses an epoch's end."""
    data, zero = place / "texts.jsonl", {"stage": 2}

    def task(name: str, ranks: int, go_on: tuple[Path, int] | None) -> dict[str, Any]:
        chosen = settings(data, ranks, packing=True, max_seq_length=64)
        return training_task(place / "model", chosen, zero, place / name, go_on=go_on)

    run_task(task("packed", 1, None), rank=0)
    launch(place, 2, [task("packed-two", 2, (place / "packed", 2))])
    run_task(task("packed-one", 1, (place / "packed-two", 4)), rank=0)
    whole = figures(place / "packed", "step", "num_tokens", "num_supervised_tokens", "learning_rate")
    assert len(whole) == STEPS
    assert figures(place / "packed-one", "step", "num_tokens", "num_supervised_tokens", "learning_rate") == whole
    for got, wanted in zip(
        *(figures(place / name, "loss", "grad_norm") for name in ("packed-one", "packed")), strict=True
    ):
        assert got == pytest.approx(wanted, rel=1e-5)


def go_on(trained: Path, folder: Path, *, accept: bool, data: Path | None = None, **changes: Any) -> dict[str, Any]:
    from finetune.engine.settings import ZeroSettings
    from finetune.train.loop import train

    if not folder.exists():
        (folder / "checkpoints").mkdir(parents=True)
        shutil.copytree(trained / "whole/checkpoints/step-00000004", folder / "checkpoints/step-00000004")
        lines = (trained / "whole/metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[:4]))
    return train(
        model_folder=trained / "model",
        settings=settings(data or trained / "texts.jsonl", 1, **changes),
        zero=ZeroSettings(),
        launch_device="cpu",
        seed=5,
        folder=folder,
        accept_changes=accept,
    )


def test_another_learning_rate_is_refused_or_accepted(trained: Path, tmp_path: Path) -> None:
    change = {"learning_rate": 5e-4, "lr_schedule": "constant", "warmup_ratio": 0.0}
    with pytest.raises(CheckpointError, match=r"learning_rate: 0.001 → 0.0005") as caught:
        go_on(trained, tmp_path / "run", accept=False, **change)
    assert "--accept-changes" in str(caught.value.fix)
    assert go_on(trained, tmp_path / "run", accept=True, **change)["resumed_from"] == 4
    rates = [rate for (rate,) in figures(tmp_path / "run", "learning_rate")]
    assert rates[4:] == [5e-4, 5e-4]
    assert rates[:4] == [rate for (rate,) in figures(trained / "whole", "learning_rate")][:4]
    # Accepted once: the checkpoints are of the new settings now.
    assert go_on(trained, tmp_path / "run", accept=False, **change)["resumed_from"] == STEPS


def test_another_batch_size_goes_on_at_the_same_place_in_the_data(trained: Path, tmp_path: Path) -> None:
    """40 rows: an epoch is 4 steps of 12 (the last of 4) or 7 of 6 (the last of 4): step 4 is the start of epoch 1."""
    change = {"gradient_accumulation_steps": 6, "max_steps": 9}
    with pytest.raises(CheckpointError, match="num_processes: 12 → 6"):
        go_on(trained, tmp_path / "run", accept=False, **change)
    result = go_on(trained, tmp_path / "run", accept=True, **change)
    assert (result["resumed_from"], result["num_steps"]) == (7, 9)
    assert [step for (step,) in figures(tmp_path / "run", "step")] == [8, 9]
    # Nothing is lost: the steps before are counted in the other file.
    assert len(read_metrics(tmp_path / "run/metrics-until-step-4.jsonl")) == 4
    whole = figures(trained / "whole", "num_supervised_tokens")
    assert sum(n for (n,) in figures(tmp_path / "run", "num_supervised_tokens")) == whole[4][0]


def test_other_data_are_refused_even_then(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="other data"):
        go_on(trained, tmp_path / "run", accept=True, data=write_texts(tmp_path / "x.jsonl", 39))


def test_how_a_training_is_shared_out_does_not_change_its_fingerprint(trained: Path, tmp_path: Path) -> None:
    recipe = {
        "name": "x",
        "output_dir": str(tmp_path),
        "model": {"path": str(trained / "model")},
        "launch": {"num_processes": 2, "device": "cpu"},
        "stages": [{"pretrain": {"data": [{"path": str(trained / "texts.jsonl")}], "max_steps": 3}}],
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))

    def fingerprint(*overrides: str) -> str:
        return Fingerprints(load_recipe(tmp_path / "recipe.yaml", overrides)).of("pretrain")

    alone = ("launch.num_processes=1", "stages.pretrain.gradient_accumulation_steps=2")
    for same in (alone, ("zero.stage=3",), ("stages.pretrain.gradient_checkpointing=full",)):
        assert fingerprint(*same) == fingerprint()
    for other in (("launch.num_processes=1",), ("stages.pretrain.micro_batch_size=2",)):
        assert fingerprint(*other) != fingerprint()
