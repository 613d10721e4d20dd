"""``finetune plan``: other machines than this one, what fits, what would make it fit, and the values it prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.engine.memory import Workload, model_size, predict_memory
from finetune.engine.memory_advice import Limits, advise
from finetune.engine.settings import LaunchSettings, ZeroSettings
from finetune.errors import RecipeError
from finetune.model.load import load_config
from finetune.plan_text import format_plan
from finetune.planning import plan_machines, plan_recipe
from finetune.recipe import load_recipe

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "tests" / "configs"
GIB = 2**30


def planned(folder: Path, *, model: str, zero: dict[str, Any], launch: dict[str, Any], **flags: Any) -> dict[str, Any]:
    """The plan of a recipe that fine-tunes ``model`` on one 4 x 2048 micro-batch a step."""
    (folder / "rows.jsonl").write_text('{"text": "a row"}\n')
    stage = {"data": [{"path": str(folder / "rows.jsonl")}], "max_seq_length": 2048, "micro_batch_size": 4}
    recipe = {
        "name": "big",
        "output_dir": str(folder / "out"),
        "model": {"path": str(CONFIGS / model)},
        "launch": launch,
        "zero": zero,
        "stages": [{"sft": stage}],
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return plan_recipe(load_recipe(folder / "recipe.yaml"), **flags)


@pytest.mark.parametrize(
    ("model", "num_parameters"),
    [("llama-3.1-8b", 8_030_261_248), ("llama-3.1-70b", 70_553_706_496), ("llama-2-13b", 13_015_864_320)],
)
def test_known_models_are_counted_without_weights(tmp_path: Path, model: str, num_parameters: int) -> None:
    found = planned(tmp_path, model=model, zero={}, launch={"num_processes": 8, "device": "cuda"}, gpu_bytes=80 * GIB)
    (stage,) = found["stages"]
    assert stage["num_parameters"] == num_parameters
    parts = {part["name"]: part["num_bytes"] for part in stage["parts"]}
    assert (parts["masters"], parts["optimizer"]) == (4 * num_parameters, 8 * num_parameters)
    assert stage["checkpoint_bytes"] == 12 * num_parameters
    assert stage["num_checkpoints"] == 3
    assert found["fits"] is False


def test_a_cluster_elsewhere_is_planned_and_what_was_assumed_is_said(tmp_path: Path) -> None:
    found = planned(tmp_path, model="llama-3.1-70b", zero={"stage": 3}, launch={}, world_size=64, gpu_bytes=80 * GIB)
    assert (found["device"], found["world_size"], found["ranks_per_machine"]) == ("cuda", 64, 8)
    assert len(found["assumed"]) == 2
    assert found["cpu_memory_bytes"] is None
    text = format_plan(found)
    assert "64 ranks on cuda, 8 a machine" in text
    assert "does NOT fit" in text
    for change in found["stages"][0]["changes"]:
        assert change["device_bytes_per_rank"] <= 0.9 * 80 * GIB
        assert all(str(value).lower() in text for value in change["settings"].values())


def test_an_engine_that_is_not_installed_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    zero = {"stage": 3, "offload": {"optimizer": "nvme", "nvme_path": "/fast"}}
    found = planned(tmp_path, model="llama-3.1-8b", zero=zero, launch={"device": "cuda"}, gpu_bytes=80 * GIB)
    (stage,) = found["stages"]
    assert stage["engine"] == "deepspeed"
    assert "pip install" in stage["notes"][0]
    assert stage["nvme_bytes_per_rank"] == 12 * 8_030_261_248
    assert stage["notes"][0] in format_plan(found)


def test_limits_are_this_machine_s_or_those_given() -> None:
    here = plan_machines(LaunchSettings(device="cpu", num_processes=2), world_size=4, gpu_bytes=None, cpu_bytes=None)
    assert (here.world_size, here.ranks_per_machine) == (4, 2)
    assert here.cpu_bytes is not None
    assert here.host_bytes_per_rank == here.cpu_bytes // 2
    there = plan_machines(LaunchSettings(device="cuda"), world_size=4, gpu_bytes=GIB, cpu_bytes=64 * GIB)
    assert (there.gpu_bytes, there.host_bytes_per_rank) == (GIB, 16 * GIB)
    with pytest.raises(RecipeError, match="trains on the cpu"):
        plan_machines(LaunchSettings(device="cpu"), world_size=None, gpu_bytes=GIB, cpu_bytes=None)


def advice(limits: Limits, **settings: Any) -> Any:
    config = load_config(CONFIGS / "llama-3.1-8b")
    defaults: dict[str, Any] = {"zero": ZeroSettings(), "world_size": 8, "micro_batch_size": 4, "max_seq_length": 2048}
    workload = Workload(**{**defaults, "device": "cuda", **settings})
    size = model_size(config)
    assert limits.fits(predict_memory(config, workload, size=size)) is False
    return advise(config, workload, limits, size=size)


def test_advice_is_ordered_sufficient_and_keeps_the_step() -> None:
    limits = Limits(80 * GIB, 64 * GIB)
    changes = advice(limits).changes
    assert changes
    assert changes[0].cost == min(change.cost for change in changes)
    for change in changes:
        assert limits.fits(change.plan)
        rows = change.settings.get("micro_batch_size", 4) * change.settings.get("gradient_accumulation_steps", 1)
        assert rows * change.settings.get("world_size", 8) == 32
    # None contains another: what one does alone isn't shown again with something besides.
    names = [set(change.settings) for change in changes if "world_size" not in change.settings]
    assert not any(a < b for a in names for b in names)


def test_one_gpu_that_is_too_small_for_the_state_is_told_to_offload() -> None:
    changes = advice(Limits(24 * GIB, 256 * GIB), world_size=1).changes
    assert changes[0].settings["zero.offload.optimizer"] == "cpu"


def test_a_needless_offload_is_dropped_where_the_host_is_small() -> None:
    zero = ZeroSettings.model_validate({"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}})
    limits = Limits(80 * GIB, 8 * GIB)
    first = advice(limits, zero=zero, checkpointed_every=1).changes[0]
    assert first.settings["zero.offload.optimizer"] == first.settings["zero.offload.parameters"] == "none"
    assert first.cost < 0


def test_where_nothing_helps_the_closest_is_said(tmp_path: Path) -> None:
    found = planned(
        tmp_path,
        model="llama-3.1-70b",
        zero={"stage": 3},
        launch={"device": "cuda", "num_processes": 8},
        world_size=8,
        gpu_bytes=4 * GIB,
        cpu_bytes=32 * GIB,
    )
    (stage,) = found["stages"]
    assert stage["changes"] == []
    assert stage["closest"]["device_bytes_per_rank"] > 0.9 * 4 * GIB
    assert "nothing would make it fit; the closest:" in format_plan(found)


def test_every_name_in_the_json_is_documented(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    found = planned(tmp_path, model="llama-3.1-8b", zero={}, launch={"num_processes": 8, "device": "cuda"})
    names = set(found) | set(found["stages"][0]) | set(found["stages"][0]["parts"][0])
    assert [name for name in sorted(names) if not re.search(rf"`{name}(\[\])?`", page)] == []


@pytest.mark.parametrize("name", ["llama_sft.yaml"])
def test_the_shipped_recipe_fits_here_and_shows_all_models_of_its_evaluation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    found = plan_recipe(load_recipe(ROOT / "recipes" / name))
    assert found["fits"] is True
    assert "from pretrain, sft, int8, int4" in format_plan(found)
