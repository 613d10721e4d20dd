"""Checkpoints of real launches: saved on two ranks, loaded on one and four, ranks that are late, killed or disagree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.checkpoint.commit import Skipped, find_checkpoint, load_checkpoint
from finetune.checkpoint.consolidate import consolidate
from finetune.errors import CheckpointError
from tests.checkpoint_ranks import example_tensors, launch
from tests.tiny import tiny_llama


def seen(folder: Path, scenario: str, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"{scenario}-rank{rank}.json").read_text())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two ranks have run the ``save`` scenario; rank 1 was killed at its end."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_llama(folder / "tied", tied=True)
    tiny_llama(folder / "untied", tied=False, seed=1)
    assert launch("save", folder, num_ranks=2) == [0, -9]
    return folder


@pytest.fixture(scope="module")
def loaded(saved: Path) -> list[dict[str, Any]]:
    """What four ranks saw that loaded what two had saved."""
    shutil.copytree(saved / "run", saved / "damaged-run")
    flip_byte(saved / "damaged-run/step-00000010/__1_0.distcp")
    assert launch("load", saved, num_ranks=4) == [0, 0, 0, 0]
    return [seen(saved, "load", rank) for rank in range(4)]


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_each_rank_writes_a_shard(saved: Path) -> None:
    step = saved / "run/step-00000010"
    assert sorted(path.name for path in step.glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    assert (saved / "run/latest").read_text() == "step-00000010\n"
    assert (step / "model_files/config.json").is_file()
    assert not list((step / "model_files").glob("*.safetensors"))


def test_replicated_tensors_are_stored_once(saved: Path) -> None:
    num_bytes = sum(tensor.nbytes for tensor in example_tensors().values())
    for name in ("replicated", "plain"):
        shards = list((saved / name / "step-00000001").glob("*.distcp"))
        envelopes = 2_000 * len(example_tensors())
        assert sum(path.stat().st_size for path in shards) < num_bytes + envelopes


def test_a_save_of_a_tiny_model_is_quick(saved: Path) -> None:
    # The best of five takes about 0.15 s on two busy cores, a bare DCP save 0.12 s; far more is a sync of all disks.
    assert seen(saved, "save", 0)["save_seconds"][0] < 1.0


def test_ranks_that_disagree_are_refused(saved: Path) -> None:
    message = seen(saved, "save", 0)["other step"]
    assert "rank 1 is about to start saving step 6 while rank 0 is about to start saving step 5" in message


def test_an_error_of_rank_0_is_raised_on_every_rank(saved: Path) -> None:
    message = seen(saved, "save", 0)["no model"]
    assert message.startswith("CheckpointError: error: there is no config.json")
    assert json.loads((saved / "refused.json").read_text()) == []


def test_a_rank_that_comes_too_late_is_named(saved: Path) -> None:
    message = seen(saved, "save", 0)["late"]
    assert message.startswith("ResourceError: error: rank 1 didn't come to start saving step 5 within")


def test_ranks_can_go_on_after_a_failed_save(saved: Path) -> None:
    found = find_checkpoint(saved / "recovered")
    assert found is not None
    assert found.step == 5


def test_a_rank_killed_while_saving_is_named_soon(saved: Path) -> None:
    report = seen(saved, "save", 0)
    assert "rank 1 didn't come to commit step 20" in report["lost"]
    assert report["lost_seconds"] < 10


def test_after_a_kill_the_step_before_is_found_with_the_reason(saved: Path) -> None:
    skipped: list[Skipped] = []
    found = find_checkpoint(saved / "run", skipped=skipped)
    assert found is not None
    assert (found.step, found.extra, found.world_size) == (10, {"position": 40}, 2)
    assert [(path.name, reason) for path, reason in skipped] == [
        ("step-00000020.tmp", "its saving was interrupted before the commit")
    ]


def test_one_process_loads_what_two_saved(saved: Path) -> None:
    for name, step in (("run", 10), ("replicated", 1), ("plain", 1)):
        state = {key: torch.zeros_like(tensor) for key, tensor in example_tensors().items()}
        load_checkpoint(saved / name / f"step-{step:08d}", state)
        for key, tensor in example_tensors().items():
            assert torch.equal(state[key], tensor), key


def test_four_ranks_load_what_two_saved(loaded: list[dict[str, Any]]) -> None:
    for report in loaded:
        assert report["equal"] == {"sharded": True, "replicated": True, "plain": True}
        assert report["found"] == [10, {"position": 40}, 2]
        assert report["skipped"] == loaded[0]["skipped"] != []


def test_a_damaged_shard_is_refused_on_every_rank(loaded: list[dict[str, Any]]) -> None:
    for report in loaded:
        assert "CheckpointError" in report["damaged"]
        assert "__1_0.distcp" in report["damaged"]


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_consolidated_ranks_give_the_model_back(saved: Path, tmp_path: Path, name: str) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = consolidate(saved / f"{name}-run/step-00000003", out=tmp_path / "model", dtype="float32")
    with safe_open(tmp_path / "model/model.safetensors", framework="pt") as opened:
        names = list(opened.keys())
        assert opened.metadata() == {"format": "pt"}
    with safe_open(saved / name / "model.safetensors", framework="pt") as opened:
        assert sorted(names) == sorted(opened.keys())
    assert ("lm_head.weight" in names) == (name == "untied")
    assert report["num_tensors"] == len(names)
    input_ids = AutoTokenizer.from_pretrained(tmp_path / "model")("the fox", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(saved / name)(input_ids).logits
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(input_ids).logits
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("damage", ["deleted", "flipped"])
def test_a_damaged_shard_publishes_nothing(saved: Path, tmp_path: Path, damage: str) -> None:
    checkpoint = tmp_path / "step-00000003"
    shutil.copytree(saved / "tied-run/step-00000003", checkpoint)
    shard = checkpoint / "__1_0.distcp"
    if damage == "deleted":
        shard.unlink()
    else:
        flip_byte(shard)
    with pytest.raises(CheckpointError, match=r"missing|sha256") as caught:
        consolidate(checkpoint, out=tmp_path / "model")
    assert caught.value.where == str(shard)
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "model.tmp").exists()


def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    assert launch("crash", tmp_path, num_ranks=1) == [0]
    outcomes = seen(tmp_path, "crash", 0)
    for existing in ("20", "10"):
        values = [value for value, _ in outcomes[existing]]
        assert len(values) > 10, "the save was killed at too few moments to say anything"
        # Old up to the commit, new from there on: never back.
        assert sorted(set(values)) == [1.0, 2.0]
        assert values == sorted(values)
    # Between the two renames the step that is being replaced is found where it was moved to.
    assert "step-00000020.old" in {name for _, name in outcomes["20"]}
