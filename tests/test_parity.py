"""The parity table: every stage, offload, accumulation and engine that is allowed against one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from bench import parity

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[parity.Combination, dict[str, Any]]:
    work = tmp_path_factory.mktemp("parity")
    entries = parity.measure(
        parity.make_model(work / "model"),
        work,
        ranks=2,
        precision="fp32",
        num_steps=6,
        engines=["own", "deepspeed"] if HAS_DEEPSPEED else ["own"],
    )
    return {(entry["stage"], entry["offload"], entry["accumulation"], entry["asked"]): entry for entry in entries}


@pytest.mark.parametrize("combination", parity.combinations(["own", "deepspeed"]), ids=str)
def test_losses_and_norms_equal_one_process_or_are_refused_with_the_reason(
    table: dict[parity.Combination, dict[str, Any]], combination: parity.Combination
) -> None:
    stage, offload, _, engine = combination
    if engine == "deepspeed" and not HAS_DEEPSPEED:
        pytest.skip("DeepSpeed isn't installed")
    entry = table[combination]
    if offload == "both" and stage < 3:
        assert f"stage {stage} keeps whole parameters everywhere" in entry["refused"]
    elif (stage, offload, engine) == (0, "optimizer", "deepspeed"):
        assert "ignores `offload.optimizer`" in entry["refused"]
    else:
        assert entry["engine"] == (engine if engine == "deepspeed" else "replicated" if stage == 0 else "fsdp2")
        assert entry["loss"] < 1e-4
        assert entry["norm"] < 1e-4


def test_a_difference_is_shown_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    entry = {"stage": 1, "offload": "none", "accumulation": 1, "asked": "own", "engine": "fsdp2", "seconds": 1.0}
    monkeypatch.setattr(parity, "measure", lambda *_, **__: [{**entry, "loss": 2e-4, "norm": 1e-7}])
    monkeypatch.setattr("sys.argv", ["parity.py", "--model", str(tmp_path)])
    assert parity.main() == 1
    assert "2.0e-04" in capsys.readouterr().out
    monkeypatch.setattr(parity, "measure", lambda *_, **__: [{**entry, "loss": 2e-5, "norm": 1e-7}])
    assert parity.main() == 0
