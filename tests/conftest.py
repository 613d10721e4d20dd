"""What several test files share: one finished small run a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.small_run import finetune, write_inputs


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepared rows of the tests, also of the commands they start, stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


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
