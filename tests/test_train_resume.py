"""The loop: resume is exact, settings may not change under it, and it stops where the numbers do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from finetune.checkpoint.commit import find_checkpoint, load_checkpoint
from finetune.data.loader import StepLoader
from finetune.data.tokens import tokenize_dataset
from finetune.engine.launch import run_ranks
from finetune.engine.settings import ZeroSettings
from finetune.errors import CheckpointError, RecipeError, ResourceError
from finetune.train.loop import train
from finetune.train.metrics import read_metrics
from finetune.train.schedule import learning_rate_at
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.training import make_engine, train_settings, write_texts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_llama(tmp_path_factory.mktemp("model"), hidden_size=32, intermediate_size=48)
    config = json.loads((folder / "config.json").read_text())
    # Dropout draws random numbers in each step: a resume that forgets their state would show.
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.2}))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("data") / "texts.jsonl", 10)


def run(model, data, folder, **changes):
    return train(
        model_folder=model,
        settings=train_settings(data, **{"packing": False, "max_steps": None, "epochs": 3, **changes}),
        zero=ZeroSettings(),
        launch_device="cpu",
        seed=5,
        folder=folder,
    )


@pytest.fixture(scope="module")
def uninterrupted(model, data, tmp_path_factory):
    """Ten rows, three epochs, two rows a step: 15 steps, a checkpoint every two."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, run(model, data, folder, eval_data=[{"path": str(data)}], eval_every_steps=4)


def weights(folder, model):
    engine, _ = make_engine(model)
    load_checkpoint(find_checkpoint(folder / "checkpoints").path, engine.state())
    return engine.state()


def without_times(folder):
    varying = ("tokens_per_second", "peak_memory_bytes")
    return [{k: v for k, v in line.items() if k not in varying} for line in read_metrics(folder / "metrics.jsonl")]


def test_stopping_twice_inside_an_epoch_changes_no_bit(model, data, uninterrupted, tmp_path):
    whole, result = uninterrupted
    assert result["num_steps"] == 15

    def stop_after(step, source):
        """What a kill after ``step`` leaves: its checkpoint, and metrics of steps that are lost, the last cut short."""
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        shutil.copytree(source / "checkpoints" / f"step-{step:08d}", tmp_path / "checkpoints" / f"step-{step:08d}")
        lines = (source / "metrics.jsonl").read_text().splitlines(keepends=True)[: step + 1]
        (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": ')

    evaluation = {"eval_data": [{"path": str(data)}], "eval_every_steps": 4}
    stop_after(8, whole)
    assert run(model, data, tmp_path, **evaluation)["resumed_from"] == 8
    stop_after(12, Path(shutil.copytree(tmp_path, tmp_path.with_name("first"))))
    again = run(model, data, tmp_path, **evaluation)
    assert again["resumed_from"] == 12
    assert without_times(tmp_path) == without_times(whole)
    assert [line["step"] for line in without_times(whole)] == list(range(1, 16))
    expected = weights(whole, model)
    for name, value in weights(tmp_path, model).items():
        assert value.equal(expected[name]), name
    timed = ("tokens_per_second", "peak_memory_bytes", "resumed_from")
    assert {k: v for k, v in again.items() if k not in timed} == {k: v for k, v in result.items() if k not in timed}
    # A run that is done trains no further.
    assert run(model, data, tmp_path, **evaluation)["resumed_from"] == 15
    assert without_times(tmp_path) == without_times(whole)


def test_training_lowers_the_held_out_loss_and_reports_itself(uninterrupted):
    _, result = uninterrupted
    assert result["eval_loss_after"] < result["eval_loss_before"]
    assert result["engine"] == "replicated"
    assert "stage" in result["engine_reason"]
    assert result["data"]["rows"] == 10


def test_the_mean_held_out_loss_is_over_tokens(model, data, uninterrupted):
    engine, _ = make_engine(model, dtype="bf16")
    tokenizer = tiny_tokenizer()
    settings = train_settings(data)
    dataset = tokenize_dataset(settings.data, tokenizer=tokenizer, max_seq_length=32, overlong="truncate")
    total, num_targets = 0.0, 0
    for row in dataset.rows:
        ids = torch.from_numpy(row.input_ids.astype("int64"))[None]
        targets = torch.cat([ids[:, 1:], torch.tensor([[-100]])], dim=1)
        documents = torch.zeros_like(ids, dtype=torch.int32)
        batch = {"input_ids": ids, "targets": targets, "position_ids": documents.long(), "document_ids": documents}
        total += float(engine.forward(batch))
        num_targets += ids.shape[1] - 1
    assert uninterrupted[1]["eval_loss_before"] == pytest.approx(total / num_targets, rel=2e-3)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"learning_rate": 2e-3}, "learning_rate: 0.001 → 0.002"),
        ({"gradient_accumulation_steps": 4}, "num_processes: 2 → 4"),
        ({"epochs": 4}, "num_steps: 15 → 20"),
        ({"data": "other"}, "data (sha256"),
    ],
)
def test_a_resume_with_other_settings_is_refused_and_shown(model, data, uninterrupted, tmp_path, change, shown):
    if "data" in change:
        data, change = write_texts(tmp_path / "other.jsonl", 9), {}
    with pytest.raises(CheckpointError) as caught:
        run(model, data, uninterrupted[0], **change)
    assert shown in caught.value.what


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(model, data, tmp_path):
    with pytest.raises(RecipeError, match=r"step \d+: the loss is"):
        run(model, data, tmp_path, learning_rate=1e30, lr_schedule="constant", warmup_ratio=0.0)


def test_rows_that_the_model_cannot_take(model, data, tmp_path):
    with pytest.raises(RecipeError, match="max_position_embeddings, 512"):
        run(model, data, tmp_path, max_seq_length=1024)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rates(schedule):
    rates = [learning_rate_at(step, num_steps=10, peak=2.0, schedule=schedule, warmup_ratio=0.3) for step in range(10)]
    assert rates[:3] == pytest.approx([2 / 3, 4 / 3, 2.0])
    assert rates[3] == 2.0
    assert min(rates) > 0
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert (rates[-1] < rates[3]) == (schedule != "constant")


def test_learning_rates_and_rows_are_the_same_on_1_and_4_ranks(data):
    dataset = tokenize_dataset(
        train_settings(data).data, tokenizer=tiny_tokenizer(), max_seq_length=32, overlong="truncate"
    )

    def loader(world_size, accumulation):
        return StepLoader(
            dataset,
            packing=True,
            max_seq_length=32,
            micro_batch_size=1,
            gradient_accumulation_steps=accumulation,
            world_size=world_size,
            rank=world_size - 1,
            seed=1,
            epochs=2.0,
            max_steps=None,
            pad_token_id=0,
        )

    alone, four = loader(1, 4), loader(4, 1)
    assert alone.num_steps == four.num_steps
    for step in range(alone.num_steps):
        assert alone.sequences(step) == four.sequences(step)
        assert alone.global_supervised_tokens(step) == four.global_supervised_tokens(step)


def test_a_killed_rank_and_the_same_command_again_equal_one_process(model, data, tmp_path):
    """Stage 3 on two ranks, one killed after a few steps, then resumed: the losses of an undisturbed single process."""
    (tmp_path / "model").mkdir()
    folder = tmp_path / "two"
    plain = tiny_llama(tmp_path / "model", hidden_size=32, intermediate_size=48)
    train(
        model_folder=plain,
        settings=train_settings(data, max_steps=30, mixed_precision="fp32"),
        zero=ZeroSettings(),
        launch_device="cpu",
        seed=5,
        folder=tmp_path / "one",
    )
    settings = train_settings(data, gradient_accumulation_steps=1, max_steps=30, mixed_precision="fp32")
    (tmp_path / "settings.json").write_text(settings.model_dump_json())
    arguments = ["-m", "tests.training", "train", str(plain), str(tmp_path / "settings.json"), str(folder), "3"]

    def kill_one_rank():
        while len(read_metrics(folder / "metrics.jsonl")) < 3:
            time.sleep(0.01)
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                mine = path.parent.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1] == str(os.getpid())
                if mine and b"\0RANK=1\0" in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except OSError:
                continue

    killer = threading.Thread(target=kill_one_rank, daemon=True)
    killer.start()
    with pytest.raises(ResourceError, match="rank 1 was ended by SIGKILL"):
        run_ranks(arguments, num_processes=2, device="cpu", log_dir=folder / "logs")
    killer.join()
    assert len(read_metrics(folder / "metrics.jsonl")) < 30
    run_ranks(arguments, num_processes=2, device="cpu", log_dir=folder / "logs")
    one, two = without_times(tmp_path / "one"), without_times(folder)
    assert [line["step"] for line in two] == list(range(1, 31))
    for expected, got in zip(one, two, strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "num_tokens", "num_supervised_tokens"):
            assert got[key] == pytest.approx(expected[key], rel=1e-5), (key, expected["step"])
