"""A real model: two ranks of stage 3 train as one process does, and the held-out loss falls."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from finetune.engine.launch import run_ranks
from finetune.engine.settings import ZeroSettings
from finetune.train.loop import train
from finetune.train.metrics import read_metrics
from tests.training import train_settings


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.skipif("FINETUNE_TEST_MODEL" not in os.environ, reason="FINETUNE_TEST_MODEL is not set")
@pytest.mark.skipif("FINETUNE_TEST_DATA" not in os.environ, reason="FINETUNE_TEST_DATA is not set")
def test_two_ranks_equal_one_process_in_bfloat16(tmp_path):
    model = Path(os.environ["FINETUNE_TEST_MODEL"])
    alpaca = {"path": str(Path(os.environ["FINETUNE_TEST_DATA"]) / "alpaca_en.json"), "format": "alpaca"}
    settings = train_settings(
        Path("unused"),
        data=[{**alpaca, "limit": 40}],
        eval_data=[{**alpaca, "limit": 4}],
        max_seq_length=128,
        max_steps=4,
        learning_rate=2e-5,
        save_every_steps=None,
    )
    one = train(
        model_folder=model,
        settings=settings,
        zero=ZeroSettings(),
        launch_device="cpu",
        seed=5,
        folder=tmp_path / "one",
    )
    assert one["eval_loss_after"] < one["eval_loss_before"]
    halved = settings.model_copy(update={"gradient_accumulation_steps": 1})
    (tmp_path / "settings.json").write_text(halved.model_dump_json())
    folder = tmp_path / "two"
    arguments = ["-m", "tests.training", "train", str(model), str(tmp_path / "settings.json"), str(folder), "3"]
    run_ranks(arguments, num_processes=2, device="cpu", log_dir=folder / "logs")
    losses = [[line["loss"] for line in read_metrics(path / "metrics.jsonl")] for path in (tmp_path / "one", folder)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
