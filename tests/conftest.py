"""What several test files share: one finished small run a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_run import finetune, write_inputs


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recipes/ and data/, where the recipe has been run by the command."""
    folder = tmp_path_factory.mktemp("project")
    write_inputs(folder)
    done = finetune(folder, "run", "recipes/llama_sft.yaml")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def finished(project: Path) -> Path:
    """The finished run's folder. Tests read it only."""
    return project / "outputs" / "llama-sft"
