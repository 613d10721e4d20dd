"""The tree explains the system: imports run downward only, brothers don't import each other, files stay short."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "finetune"
FLOORS = {
    "__main__": 11,
    "cli": 10,
    "commands": 9,
    "joined": 8,
    "planning": 8,
    "data_preview": 8,
    "plan_text": 8,
    "launch_script": 8,
    "pipeline": 7,
    "worker": 6,
    "fingerprint": 6,
    "recipe": 5,
    "stages": 4,
    "train": 3,
    "quant": 3,
    "evaluate": 3,
    "export": 3,
    "engine": 2,
    "data": 2,
    "checkpoint": 2,
    "model": 1,
    "config": 0.5,
    "artifact": 0.2,
    "processes": 0.2,
    "files": 0.1,
    "text_table": 0.1,
    "errors": 0,
}

MAX_LINES = 400
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[tuple[str, int]]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write absolute imports"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "finetune" else [base]
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "finetune" and len(pieces) > 1 and (pieces[1] in FLOORS):
                found.add((pieces[1], node.lineno))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downward(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    assert part in FLOORS, f"{part} has no floor: add it here and in docs/architecture.md"
    for imported, line in imported_parts(path):
        if imported != part:
            assert FLOORS[imported] < FLOORS[part], f"{path}:{line}: {part} may not import {imported}"


@pytest.mark.parametrize(
    "path", [*FILES, *sorted((ROOT / "tests").rglob("*.py"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_files_stay_short(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES, f"{path} has {num_lines} lines: make it two files"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("settings.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_import_nothing_heavy(path: Path) -> None:
    heavy = {"torch", "transformers", "numpy", "safetensors", "compressed_tensors", "datasets"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not {name.split(".")[0] for name in names} & heavy


def test_the_architecture_page_names_every_part() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for part in sorted({part_of(path) for path in FILES} - {"__init__", "__main__"}):
        assert f"`{part}`" in page, f"docs/architecture.md doesn't say what {part} is"
