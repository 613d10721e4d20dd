"""Killed at any moment, a quantization ends with the bytes of an undisturbed one; begun otherwise it is refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from finetune.artifact import record_files
from finetune.errors import CheckpointError
from finetune.quant.quantize import quantize_model
from finetune.quant.settings import QuantizeSettings
from finetune.quant.work import WorkFolder
from tests.families import tiny_model
from tests.test_quant_model import settings_for
from tests.tiny import tiny_llama

RUN = """
import sys
from pathlib import Path
import compressed_tensors, matplotlib.pyplot, transformers
import finetune.quant.tuning, finetune.quant.learned_rounding
from finetune.quant.quantize import quantize_model
from finetune.quant.settings import QuantizeSettings
settings = QuantizeSettings.model_validate_json(sys.argv[2])
print("begun", flush=True)
quantize_model(Path(sys.argv[1]), settings=settings, out=Path(sys.argv[3]), seed=0)
print("done", flush=True)
"""
REPORTS = ("quantization_report.json", "quantization_report.png")
TIMES = {"seconds", "peak_memory_bytes"}


def hashes(folder: Path) -> dict[str, str]:
    return {name: file.sha256 for name, file in record_files(folder, exclude=REPORTS).items()}


def report(folder: Path) -> Any:
    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: timeless(entry) for key, entry in value.items() if key not in TIMES}
        return [timeless(entry) for entry in value] if isinstance(value, list) else value

    return timeless(json.loads((folder / REPORTS[0]).read_text()))


def start(source: Path, settings: QuantizeSettings, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN, str(source), settings.model_dump_json(), str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def finish(process: subprocess.Popen[str]) -> float:
    started = time.monotonic()
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out == "done\n"
    return time.monotonic() - started


def llama(tmp_path: Path) -> tuple[Path, QuantizeSettings]:
    source = tiny_llama(tmp_path / "source", num_layers=6, dtype="bfloat16")
    return source, settings_for(tmp_path, tuning_steps=2, activation_memory="1B")


def smoothed(tmp_path: Path) -> tuple[Path, QuantizeSettings]:
    return tiny_llama(tmp_path / "source", num_layers=6), settings_for(tmp_path, scheme="w8a8", activation_memory="5kB")


def mixtral(tmp_path: Path) -> tuple[Path, QuantizeSettings]:
    return tiny_model("mixtral", tmp_path / "source", num_hidden_layers=6, dtype="float32"), settings_for(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif("FINETUNE_TEST_KILLS" not in os.environ, reason="takes minutes: FINETUNE_TEST_KILLS asks for it")
@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("make", [llama, smoothed, mixtral])
def test_killed_at_random_moments(
    make: Callable[[Path], tuple[Path, QuantizeSettings]], seed: int, tmp_path: Path
) -> None:
    source, chosen = make(tmp_path)
    seconds = finish(start(source, chosen, tmp_path / "undisturbed"))
    expected = hashes(tmp_path / "undisturbed")
    assert "model.safetensors" in expected
    moments = random.Random(seed)
    num_killed = 0
    # A machine that does other work is fast and slow by turns: a run that was over before its moment doesn't count.
    for number in range(30):
        # The last of the moments lie where files are written and published.
        share = moments.uniform(0, 1) if num_killed < 7 else moments.uniform(0.8, 1)
        out = tmp_path / f"killed-{number}"
        process = start(source, chosen, out)
        time.sleep(seconds * share)
        process.kill()
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            seconds *= 0.9
            continue
        num_killed += 1
        finish(start(source, chosen, out))
        assert hashes(out) == expected, number
        assert report(out) == report(tmp_path / "undisturbed")
        assert sorted(path.name for path in tmp_path.glob(f"{out.name}*")) == [out.name]
        if num_killed == 10:
            return
    pytest.fail(f"only {num_killed} runs were killed in time")


class StoppedError(Exception):
    pass


@contextmanager
def stopped_after(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within: a quantization ends before block ``num_blocks`` is saved."""
    save = WorkFolder.save

    def stopping(self: WorkFolder, index: int, *rest: Any, **options: Any) -> None:
        if index == num_blocks:
            raise StoppedError
        save(self, index, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "save", stopping)
        with pytest.raises(StoppedError):
            yield


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_stopped_in_the_middle_the_bytes_are_the_same(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a block hands on is the same whether it was just quantized or is read from its file."""
    extra = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    source = tiny_model(family, tmp_path / "source", dtype=dtype, **extra)
    chosen = settings_for(tmp_path, tuning_steps=0, **({"format": "gptq"} if family == "gpt2" else {}))
    quantize_model(source, settings=chosen, out=tmp_path / "undisturbed", seed=0)
    with stopped_after(1, monkeypatch):
        quantize_model(source, settings=chosen, out=tmp_path / "out", seed=0)
    assert len(list((tmp_path / "out.work").glob("block-*"))) == 1
    quantize_model(source, settings=chosen, out=tmp_path / "out", seed=0)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "undisturbed")
    assert report(tmp_path / "out") == report(tmp_path / "undisturbed")


def test_what_was_begun_otherwise_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_llama(tmp_path / "source")
    out = tmp_path / "out"
    first = settings_for(tmp_path, method="rtn")

    def refusal(settings: QuantizeSettings) -> str:
        with pytest.raises(CheckpointError) as caught:
            quantize_model(source, settings=settings, out=out, seed=0)
        return str(caught.value)

    with stopped_after(0, monkeypatch):
        quantize_model(source, settings=first, out=out, seed=0)
    # Nothing is lost yet: other settings may have the folder.
    with stopped_after(1, monkeypatch):
        quantize_model(source, settings=settings_for(tmp_path, method="rtn", group_size=16), out=out, seed=0)
    told = refusal(first)
    assert "group_size: 16 then, 32 now" in told
    assert "method" not in told
    assert f"at:  {out}.work" in told
    assert "--force" in told
    (source / "config.json").write_text((source / "config.json").read_text() + "\n")
    assert "config.json" in refusal(settings_for(tmp_path, method="rtn", group_size=16))
    kept = (out.with_name("out.work") / "block-00000.safetensors").stat().st_mtime_ns
    # What doesn't decide any block's bytes may change.
    changed = settings_for(tmp_path, method="rtn", group_size=16, max_shard_size="100kB", activation_memory="1MB")
    assert "group_size" not in refusal(changed)
    assert (out.with_name("out.work") / "block-00000.safetensors").stat().st_mtime_ns == kept
    quantize_model(source, settings=first, out=out, seed=0, restart=True)
    quantize_model(source, settings=first, out=tmp_path / "fresh", seed=0)
    assert hashes(out) == hashes(tmp_path / "fresh")
