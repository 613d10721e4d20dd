"""What users get wrong, and what a machine refuses: always an error that says so, never a traceback."""

from __future__ import annotations

import errno
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from finetune.cli import main
from finetune.commands import free_folder
from finetune.config.source import load_yaml
from finetune.data.rows import read_rows
from finetune.errors import DataError, RecipeError, ResourceError, resource_error
from finetune.pipeline import _state, write_summary
from finetune.recipe import check_files_exist, load_recipe
from finetune.train.resume import taken
from finetune.worker import begin_stage
from tests.small_run import ENVIRONMENT, command, write_inputs


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"name: \xe9", "UTF-8"),
        (b"name: \x07", "0x7"),
        (b"{[1]: 2}", "key"),
        (b"? {a: 1}\n: 3", "key"),
        (b"name: &a [*a]", "holds itself"),
        (b"a: 1\nseed: 2024-13-45", "2024-13-45"),
    ],
)
def test_yaml_that_python_chokes_on_is_a_recipe_error(tmp_path: Path, raw: bytes, says: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(raw)
    with pytest.raises(RecipeError, match=says):
        load_yaml(path)


def test_merge_keys_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n")
    assert load_yaml(path).value["b"] == {"x": 1, "y": 3}


@pytest.mark.parametrize("flag", ["seed=2024-13-45", "stages.sft.data.²=x"])
def test_a_set_that_python_chokes_on_is_a_recipe_error(
    tmp_path: Path, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError):
        load_recipe(Path("recipes/llama_sft.yaml"), [flag])


def test_a_folder_that_is_not_one_data_set_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe(Path("recipes/llama_sft.yaml"), ["stages.sft.data.0.path=data"])
    with pytest.raises(DataError, match="the folder holds several kinds of data files"):
        check_files_exist(loaded)


def test_output_that_cant_be_written_ends_with_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["run", "recipes/llama_sft.yaml", "--set", "output_dir=file"]) == 5
    assert "file/llama-sft" in capsys.readouterr().err


def test_a_full_disk_is_an_error_of_the_machine_and_a_missing_file_is_not() -> None:
    assert isinstance(resource_error(OSError(errno.ENOSPC, "No space left", "x")), ResourceError)
    assert resource_error(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None


def test_damaged_records_of_a_stage_dont_stop_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe(Path("recipes/llama_sft.yaml"))
    folder = loaded.run_dir / loaded.stages[4].folder_name
    folder.mkdir(parents=True)
    (folder / "started.json").touch()
    state, differences = _state(folder, "f", {}, {})
    assert state == "unfinished"
    assert "started.json" in differences[0]
    (folder / "manifest.json").write_text("{")
    assert write_summary(loaded)["stages"] == []


def test_force_replaces_only_a_model_folder_and_never_the_one_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "parent/model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for out in (model, tmp_path / "parent", Path(".")):
        with pytest.raises(RecipeError, match="which is read"):
            free_folder(Namespace(out=str(out), force=True), str(model))
    other = tmp_path / "other"
    other.mkdir()
    (other / "letters").touch()
    with pytest.raises(RecipeError, match="this is none"):
        free_folder(Namespace(out=str(other), force=True), str(model))
    (other / "config.json").touch()
    assert free_folder(Namespace(out=str(other), force=True), str(model)) == tmp_path / "other.new"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_under_the_output_is_said_and_ends_with_5(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("plan", "recipes/llama_sft.yaml", "--json"),
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
    assert done.returncode == 5
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_row_nested_too_deep_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a":' * 100_000)
    (row,) = read_rows(str(path))
    assert isinstance(row, DataError)
    assert row.where == f"{path}:1"


def test_a_broken_config_is_an_error_of_the_model_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{")
    assert main(["export", str(tmp_path / "model"), "--out", str(tmp_path / "out")]) == 4


def test_an_array_with_a_row_nested_too_deep_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "a"},\n{"a":' + "[" * 100_000)
    with pytest.raises(DataError, match="can't be read") as caught:
        list(read_rows(str(path)))
    assert caught.value.where == f"{path}:2"


def test_generate_blames_a_broken_config_and_not_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{")
    assert main(["generate", str(tmp_path / "model"), "--prompt", "x"]) == 4
    assert "config" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that makes no folders")
def test_a_run_folder_that_cant_be_made_is_a_resource_error(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "recipes/llama_sft.yaml", "--set", "output_dir=/proc/nowhere"]) == 5
    assert "can't be made" in capsys.readouterr().err


def test_an_engine_that_is_not_installed_is_refused_with_its_install_line_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("finetune.engine.choice.importlib.util.find_spec", lambda name: None)
    ratio = ["--set", "zero.offload.ratio=0.5", "--set", "zero.offload.parameters=none"]
    assert main(["run", "recipes/llama_sft.yaml", *ratio]) == 6
    said = capsys.readouterr().err
    assert "DeepSpeed isn't installed" in said
    assert "--no-build-isolation" in said
    assert not (tmp_path / "outputs").exists()


def test_what_no_engine_does_is_refused_with_the_reason_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("finetune.engine.choice.importlib.util.find_spec", lambda name: object())
    nvme = ["--set", "zero.offload.parameters=nvme", "--set", "zero.offload.nvme_path=fast"]
    assert main(["run", "recipes/llama_sft.yaml", *nvme]) == 2
    assert "nvme" in capsys.readouterr().err
    assert main(["run", "recipes/llama_sft.yaml", "--set", "zero.stage=2"]) == 2
    assert "fix: set `offload.parameters: none`, or `stage: 3`" in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()


def test_changes_that_were_refused_after_all_leave_the_record_as_it_was(tmp_path: Path) -> None:
    before = {"fingerprint": "a", "deciding": {"max_steps": 20}, "parents": {}}
    after = {"fingerprint": "b", "deciding": {"max_steps": 7}, "parents": {}}
    begin_stage(tmp_path, **before, keep=False)
    begin_stage(tmp_path, **after, keep=True, accept_changes=True)
    assert _state(tmp_path, "a", before["deciding"], {}) == ("unfinished", ())
    assert _state(tmp_path, "b", after["deciding"], {})[1] == ("max_steps: 20 → 7",)
    taken(tmp_path)
    assert _state(tmp_path, "b", after["deciding"], {}) == ("unfinished", ())
    begin_stage(tmp_path, **before, keep=True, accept_changes=True)
    begin_stage(tmp_path, **after, keep=True)
    assert _state(tmp_path, "b", after["deciding"], {}) == ("unfinished", ())


def test_a_place_on_nvme_that_cant_be_written_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("finetune.engine.choice.importlib.util.find_spec", lambda name: object())
    nvme = ["--set", "zero.offload.optimizer=nvme", "--set", "zero.offload.nvme_path=/proc/nope"]
    assert main(["run", "recipes/llama_sft.yaml", *nvme]) == 5
    assert "zero.offload.nvme_path" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["betas=[2,-1]", "max_shard_size=0GB", "gradient_checkpointing=all"])
def test_settings_that_mean_nothing_are_refused_by_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "recipes/llama_sft.yaml", "--set", f"stages.pretrain.{setting}"]) == 2
    assert setting.split("=")[0] in capsys.readouterr().err
    assert main(["plan", "recipes/llama_sft.yaml", "--set", "stages.pretrain.gradient_checkpointing=70"]) == 2
    assert "blocks, so every 70th is none" in capsys.readouterr().err


@pytest.mark.parametrize(("model_type", "code"), [("gpt2", 0), ("opt", 0), ("mamba", 2), ("t5", 2), ("bert", 0)])
def test_plan_knows_a_decoders_sizes_or_says_that_it_doesnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_type: str, code: int
) -> None:
    from transformers import AutoConfig

    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    AutoConfig.for_model(model_type, architectures=None).save_pretrained(tmp_path / "config")
    (tmp_path / "plan.yaml").write_text(
        "name: x\nmodel: {path: config}\nlaunch: {num_processes: 1, device: cpu}\n"
        "stages: [{pretrain: {data: [{path: data/pretrain.jsonl}], max_seq_length: 64, max_steps: 1}}]\n"
    )
    assert main(["plan", "plan.yaml"]) == code
    out = capsys.readouterr()
    assert ("memory of a rank" in out.out) if code == 0 else (model_type in out.err)


@pytest.mark.parametrize("size", ["80", "0GB", "-1GiB", "inf", "large"])
def test_a_memory_without_a_unit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "recipes/llama_sft.yaml", f"--cpu-memory={size}"]) == 2
    assert "80GiB" in capsys.readouterr().err
