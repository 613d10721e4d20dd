"""A recipe is typed: what is misspelt, doubled or impossible is refused with its line, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from finetune.errors import RecipeError
from finetune.recipe import load_recipe

GOOD = """\
name: demo
seed: 3
model: {path: some/model}
launch: {num_processes: 2, device: cpu}
zero:
  stage: 3
  offload: {optimizer: cpu, parameters: cpu}
stages:
  - sft:
      data: [{path: chat.jsonl, format: messages}]
      learning_rate: 2e-5
      max_steps: 5
  - quantize:
      name: int8
      scheme: w8a8
      method: rtn
  - quantize:
      name: int4
      from: sft
      scheme: w4a16
      method: rtn
      group_size: 32
  - evaluate:
      models: [sft, int8, int4]
      reference: sft
      perplexity: heldout.txt
  - export: {from: int4}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(folder: Path, old: str, new: str, *overrides: str) -> RecipeError:
    assert old in GOOD
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, GOOD.replace(old, new, 1)), overrides)
    return caught.value


def test_stages_are_named_and_connected(tmp_path: Path) -> None:
    loaded = load_recipe(write(tmp_path, GOOD))
    assert [(stage.name, stage.kind, stage.input) for stage in loaded.stages] == [
        ("sft", "sft", "model"),
        ("int8", "quantize", "sft"),
        ("int4", "quantize", "sft"),
        ("evaluate", "evaluate", "int4"),
        ("export", "export", "int4"),
    ]
    assert loaded.stages[0].settings.learning_rate == 2e-5
    assert loaded.run_dir == Path("outputs/demo")


def test_the_resolved_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    loaded = load_recipe(write(tmp_path, GOOD))
    again = tmp_path / "resolved.yaml"
    again.write_text(loaded.to_yaml(), encoding="utf-8")
    assert load_recipe(again).resolved() == loaded.resolved()
    assert load_recipe(again).sha256() == loaded.sha256()


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("learning_rate: 2e-5", "learning_rat: 2e-5", 11, "learning_rate"),
        ("optimizer: cpu, p", "optimiser: cpu, p", 7, "optimizer"),
        ("seed: 3", "sead: 3", 2, "seed"),
        ("- sft:", "- sftt:", 9, "sft"),
        ("path: chat.jsonl, format", "pth: chat.jsonl, format", 10, "path"),
        ("scheme: w8a8", "scheme: w8a9", 15, "w8a8"),
        ("from: sft", "from: stf", 17, "sft"),
        ("models: [sft, int8, int4]", "models: [sft, int8, int5]", 23, "int4"),
        ("max_steps: 5", "max_steps: many", 12, "max_steps"),
        ("learning_rate: 2e-5", "learning_rate: .nan", 11, "learning_rate"),
        ("stage: 3", "stage: 4", 6, "stage"),
        ("name: int4", "name: int8", 17, "int8"),
    ],
)
def test_faults_name_the_line_and_the_likely_word(tmp_path: Path, old: str, new: str, line: int, says: str) -> None:
    error = refused(tmp_path, old, new)
    assert error.exit_code == 2
    assert error.where == f"{tmp_path / 'recipe.yaml'}:{line}"
    assert says in str(error)


def test_a_key_written_twice_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, "      max_steps: 5\n", "      max_steps: 5\n      max_steps: 6\n")
    assert "written twice" in error.what
    assert error.where is not None
    assert error.where.endswith(":13")


def test_set_reaches_stages_by_name_and_list_items_by_index(tmp_path: Path) -> None:
    loaded = load_recipe(
        write(tmp_path, GOOD),
        ["stages.sft.learning_rate=1e-4", "stages.sft.data.0.path=other.jsonl", "stages.int4.group_size=64", "name=b"],
    )
    assert loaded.stages[0].settings.learning_rate == 1e-4
    assert loaded.stages[0].settings.data[0].path == "other.jsonl"
    assert loaded.stages[2].settings.group_size == 64
    assert loaded.recipe.name == "b"


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("stages.sft.learning_rat=1", "learning_rate"),
        ("stages.sff.learning_rate=1", "sft"),
        ("stages.sft.data.3.path=x", "no `3`"),
        ("nothing", "key=value"),
        ("stages.sft.max_steps=0", "max_steps"),
        ("seed.deep=1", "single value"),
    ],
)
def test_a_bad_set_names_its_flag(tmp_path: Path, flag: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, GOOD), [flag])
    assert caught.value.where == f"--set {flag}"
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "name: x\nmodel: {path: a}\nstages: []\n", "a: [1\n", "a: b: c\n"])
def test_what_is_no_recipe_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError):
        load_recipe(write(tmp_path, text))


def finetune(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "finetune", *arguments], cwd=cwd, capture_output=True, text=True
    )


def test_a_misspelt_key_ends_with_2_before_torch_is_imported(tmp_path: Path) -> None:
    write(tmp_path, GOOD.replace("learning_rate", "learning_rat"))
    done = finetune("run", "recipe.yaml", cwd=tmp_path)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert lines[0].startswith("error: unknown key `stages.sft.learning_rat`")
    assert lines[1] == "  at:  recipe.yaml:11"
    assert "did you mean `learning_rate`?" in lines[2]
    assert len(lines) == 3
    assert not any(line.split("|")[-1].strip() == "torch" for line in done.stderr.splitlines())


@pytest.mark.parametrize("verb", ["run", "plan", "quantize", "consolidate", "evaluate", "generate", "export", "verify"])
def test_help_needs_no_torch(verb: str, tmp_path: Path) -> None:
    done = finetune(verb, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert f"finetune {verb}" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "transformers", "numpy", "pydantic"}


def test_missing_data_is_found_before_any_work(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    done = finetune("run", "recipe.yaml", cwd=tmp_path)
    assert done.returncode == 3
    assert "chat.jsonl" in done.stderr
    assert "Traceback" not in done.stderr
