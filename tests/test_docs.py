"""Every command that the README and the docs show is run, in the order in which they show it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from finetune.cli import build_parser
from tests.small_run import finetune

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "data" / "README.md"]
# The two that install and test are CI's own steps; the recipe is run by the `project` fixture and in full by CI;
# FOLDER is the reader's.
ELSEWHERE = {
    "pip install -e . && python -m finetune run recipes/llama_sft.yaml",
    "pip install -e '.[dev]' && python -m pytest",
    "finetune run recipes/smollm2_sft.yaml --set model.path=FOLDER --set stages.sft.data.0.path=alpaca.json",
}


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


def test_the_commands_done_elsewhere_are_still_shown() -> None:
    assert set(commands(ROOT / "README.md")) >= ELSEWHERE


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shown_commands_work(page: Path, project: Path) -> None:
    for command in commands(page):
        if command in ELSEWHERE:
            if command.startswith("finetune "):
                build_parser().parse_args(shlex.split(command)[1:])
            continue
        words = shlex.split(command)
        if words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), command
            continue
        assert words[0] == "finetune", f"{page.name} shows a command that no test runs: {command}"
        done = finetune(project, *words[1:])
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert done.stdout, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shown_recipes_are_valid(page: Path, tmp_path: Path) -> None:
    from finetune.recipe import load_recipe

    for index, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), flags=re.S | re.M)):
        path = tmp_path / f"{index}.yaml"
        path.write_text(block)
        load_recipe(path)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_recipes_are_valid_and_their_data_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.recipe import check_files_exist, load_recipe

    monkeypatch.chdir(ROOT)
    check_files_exist(load_recipe(path))
