"""Several processes that share out the calibration samples find what one process finds, but for the order of sums."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune.cli import main
from finetune.engine.launch import run_ranks
from finetune.errors import CheckpointError, DataError, RecipeError, ResourceError
from finetune.planning import plan_recipe
from finetune.quant.quantize import quantize_model
from finetune.quant.ranks import Ranks, Share, deal
from finetune.recipe import load_recipe
from finetune.stages.quantize import quantize
from tests.families import tiny_model
from tests.quantize_ranks import BY_THREE, NUM_TOKENS, jobs, run_jobs, settings_for
from tests.test_quant_resume import hashes, report, stopped_after
from tests.tiny import tiny_llama


def run_on(folder: Path, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent.parent), *sys.path]))
        run_ranks(
            [str(Path(__file__).with_name("quantize_ranks.py")), str(folder)],
            num_processes=size,
            device="cpu",
            log_dir=folder / "logs",
        )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every job by one process and by two."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_llama(folder / "llama", num_layers=3)
    tiny_model("mixtral", folder / "mixtral", dtype="float32")
    tiny_model("qwen2_moe", folder / "qwen2_moe", dtype="float32")
    jobs(folder)
    run_jobs(folder, Ranks())
    run_on(folder, 2)
    return folder


@pytest.fixture(scope="module")
def by_three(done: Path) -> Path:
    run_on(done, 3)
    return done


@pytest.mark.parametrize(
    "name", ["tuned", "padded", "smoothed", "static", "experts", "shared_expert", "scaled_experts"]
)
def test_two_ranks_find_what_one_process_finds(name: str, done: Path) -> None:
    compare(done, name, 2)


@pytest.mark.parametrize("name", BY_THREE)
def test_three_ranks_find_what_one_process_finds(name: str, by_three: Path) -> None:
    compare(by_three, name, 3)


def compare(done: Path, name: str, size: int) -> None:
    one, several = done / f"{name}-1", done / f"{name}-{size}"
    expected, found = load_file(one / "model.safetensors"), load_file(several / "model.safetensors")
    assert expected.keys() == found.keys()
    num_codes = num_same = 0
    for key, tensor in expected.items():
        if tensor.dtype in (torch.int8, torch.int32):  # codes, or eight of them in a word
            num_codes += tensor.numel()
            num_same += int((tensor == found[key]).sum())
        else:
            torch.testing.assert_close(found[key], tensor, rtol=0.03, atol=1e-4)
    assert num_codes
    assert num_same / num_codes > 0.97
    before, after = report(one), report(several)
    for key in ("perplexity", "unquantized_perplexity", "top1_agreement"):
        assert after["end_to_end"][key] == pytest.approx(before["end_to_end"][key], rel=0.01), key
    assert after["end_to_end"]["kl"] == pytest.approx(before["end_to_end"]["kl"], rel=0.1)
    assert after["calibration"] == before["calibration"]
    for mine, other in zip(before["layers"], after["layers"], strict=True):
        assert other["relative_error"] == pytest.approx(mine["relative_error"], rel=0.05), mine["layer"]
        for key in ("layer", "damp", "smoothed", "routed_tokens", "calibrated_on_all"):
            assert other.get(key) == mine.get(key), (mine["layer"], key)
        for key, value in (mine["clip"] or {}).items():
            assert other["clip"][key] == pytest.approx(value, rel=0.02, abs=0.02), (mine["layer"], key)


@pytest.mark.parametrize(("name", "size"), [("padded", 2), ("padded", 3), ("static", 2), ("experts", 2)])
def test_the_sums_are_those_of_all_samples(name: str, size: int, by_three: Path) -> None:
    expected, found = (torch.load(by_three / f"{name}-{count}.pt")["hessians"] for count in (1, size))
    assert expected.keys() == found.keys()
    for key in (key for key in expected if key.startswith("0.")):
        mean_II, num_tokens, largest = expected[key]
        assert found[key][1] == num_tokens > 0
        if "q_proj" in key:  # nothing before it was quantized
            torch.testing.assert_close(found[key][0], mean_II, rtol=1e-5, atol=1e-6 * float(mean_II.max()))
            assert found[key][2] == largest


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_hold_the_same_model(size: int, by_three: Path) -> None:
    for name, (_, settings) in jobs(by_three).items():
        if size == 2 or name in BY_THREE:
            first, *others = torch.load(by_three / f"{name}-{size}.pt")["held"]
            assert len(first) >= (6 if settings.tuning_steps and name != "experts" else 2), name
            assert others == [first] * (size - 1), name


@pytest.mark.parametrize("size", [2, 3])
def test_tuning_takes_the_same_steps(size: int, by_three: Path) -> None:
    done = by_three
    expected, found = report(done / "tuned-1")["tuning"], report(done / f"tuned-{size}")["tuning"]
    assert len(found["kl_of_each_step"]) == 3
    assert found["kl_of_each_step"] == pytest.approx(expected["kl_of_each_step"], rel=0.05)
    scales = [
        {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "norm" in name}
        for folder in (done / "llama", done / "tuned-1", done / f"tuned-{size}")
    ]
    untuned, one, several = (torch.cat([*map(torch.flatten, part.values())]) for part in scales)
    assert (one - untuned).norm() > 0
    assert (several - one).norm() < 0.2 * (one - untuned).norm()  # their codes differ here and there


def test_rounding_learns_on_all_ranks(done: Path) -> None:
    """Signs of gradients that are nearly 0 are chance, so codes differ; what they are worth doesn't."""
    one, two = (report(done / f"learned-{size}") for size in (1, 2))
    assert two["end_to_end"]["kl"] == pytest.approx(one["end_to_end"]["kl"], rel=0.3)
    start = load_file(done / "no_data-1" / "model.safetensors")
    for folder in (done / "learned-1", done / "learned-2"):
        learned = load_file(folder / "model.safetensors")
        assert any(not torch.equal(learned[name], tensor) for name, tensor in start.items())


def test_neither_spilling_nor_a_lack_of_data_changes_a_bit(done: Path) -> None:
    def weights(name: str) -> str:
        return hashes(done / name)["model.safetensors"]

    assert weights("spilled-2") == weights("tuned-2") != weights("tuned-1")
    assert weights("no_data-2") == weights("no_data-1")
    assert not list(done.glob("*.work"))


def command(done: Path, out: Path, *more: str) -> list[str]:
    """The job ``tuned`` as a verb."""
    given = [str(done / "llama"), "--scheme", "w4a16:32", "--calibration", str(done / "calibration.jsonl")]
    given += ["--num-samples", "7", "--max-seq-length", str(NUM_TOKENS), "--micro-batch-size", "2", "--seed", "0"]
    given += ["--set", "tuning_steps=3", "--no-verify", "--device", "cpu", "--out", str(out), *more]
    return ["quantize", *given]


def ranks_of(process: subprocess.Popen[str]) -> Iterator[tuple[str, int]]:
    """(rank, process id) of each rank that ``process`` started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in children:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        yield from ((entry.decode()[5:], int(pid)) for entry in entries if entry.startswith(b"RANK="))


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "sign"), [("1", "block-00000.safetensors"), ("0", "tuned-00000.safetensors")])
def test_a_killed_rank_ends_all_and_the_same_command_goes_on(rank: str, sign: str, done: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    started = [sys.executable, "-m", "finetune", *command(done, out, "--num-processes", "2")]
    process = subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (out.with_name("out.work") / sign).exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    os.kill(dict(ranks_of(process))[rank], signal.SIGKILL)
    told = process.communicate()[1]
    assert process.returncode == ResourceError.exit_code, told
    assert told.count("error:") == 1
    assert f"rank {rank} was ended by SIGKILL" in told
    kept = out.with_name("out.work") / "block-00000.safetensors"
    written = kept.stat().st_mtime_ns
    over = time.time_ns()
    finished = subprocess.run(started, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert written < over
    assert not out.with_name("out.logs").exists()
    assert hashes(out)["model.safetensors"] == hashes(done / "tuned-2")["model.safetensors"]


def test_an_error_is_told_once(done: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tiny_llama(tmp_path / "source")
    from safetensors.torch import save_file

    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    arguments = command(done, tmp_path / "out", "--num-processes", "2")
    arguments[1] = str(source)
    assert main(arguments) == CheckpointError.exit_code
    told = capfd.readouterr().err
    assert told.count("error:") == 1
    assert "model.layers.1.mlp.down_proj holds NaN" in told
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.work"]


def test_another_number_of_processes_is_refused(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = jobs(done)["tuned"][1]
    with stopped_after(1, monkeypatch):
        quantize_model(done / "llama", settings=chosen, out=tmp_path / "out", seed=0)
    other = chosen.model_copy(update={"num_processes": 2})
    with pytest.raises(CheckpointError, match="num_processes: 1 then, 2 now"):
        quantize_model(done / "llama", settings=other, out=tmp_path / "out", seed=0)


def test_fewer_samples_than_processes_are_refused(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(done, done / "out", "--num-processes", "8")) == RecipeError.exit_code
    assert "8 processes can't share 7 calibration samples" in capsys.readouterr().err
    chosen = settings_for(done, num_samples=100)  # asked for; the text has 8
    with pytest.raises(DataError, match="9 processes can't share 8 calibration samples"):
        quantize_model(done / "llama", settings=chosen, out=done / "out", seed=0, ranks=Ranks(0, 9))
    assert not list(done.glob("out*"))


def test_what_doesnt_take_several_processes_says_so(
    done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["quantize", str(done / "llama"), "--sweep", "w8a16", "--calibration", str(done / "calibration.jsonl")]
    sweep += ["--out", str(done / "out")]
    for flags in (["--num-processes", "2"], ["--set", "num_processes=2"]):
        assert main([*sweep, *flags]) == RecipeError.exit_code
        assert "a sweep is one process" in capsys.readouterr().err
    assert main(command(done, done / "out", "--num-processes", "0")) == RecipeError.exit_code
    assert "--num-processes" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    chosen = settings_for(done).model_copy(update={"num_processes": 2})
    with pytest.raises(ResourceError, match="2 processes need as many GPUs, there are 1"):
        quantize(done / "llama", settings=chosen, out=done / "out", seed=0, device="cuda")
    assert not list(done.glob("out*"))


def recipe(folder: Path, model: Path, num_processes: int) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(
        f"""
name: ranks
output_dir: {folder / "runs"}
model: {{path: {model}}}
launch: {{device: cpu, num_processes: 1}}
stages:
  - quantize:
      scheme: w4a16
      group_size: 32
      tuning_steps: 0
      num_processes: {num_processes}
      verify: false
      calibration:
        data: [{{path: {folder / "calibration.jsonl"}}}]
        num_samples: 7
        max_seq_length: {NUM_TOKENS}
        micro_batch_size: 2
"""
    )
    return path


def test_a_recipe_takes_it(done: Path, tmp_path: Path) -> None:
    settings_for(tmp_path)
    for num_processes in (1, 2):
        planned = plan_recipe(load_recipe(recipe(tmp_path, done / "llama", num_processes)))
        assert [stage["state"] for stage in planned["stages"]] == ["new"]
    with pytest.raises(RecipeError, match="8 processes can't share 7 calibration samples"):
        load_recipe(recipe(tmp_path, done / "llama", 8))


@pytest.mark.slow
def test_a_stage_runs_on_several_processes(done: Path, tmp_path: Path) -> None:
    settings_for(tmp_path)
    path = recipe(tmp_path, done / "llama", 2)
    assert main(["run", str(path)]) == 0
    stage = tmp_path / "runs" / "ranks" / "01-quantize"
    assert report(stage / "model")["settings"]["num_processes"] == 2
    assert sorted(entry.name for entry in stage.iterdir()) == ["manifest.json", "model"]
    # How it was shared out is no reason to do it again.
    planned = plan_recipe(load_recipe(recipe(tmp_path, done / "llama", 1)))
    assert [entry["state"] for entry in planned["stages"]] == ["done"]


@pytest.mark.parametrize("num_samples", [3, 7, 8, 16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_sample_is_on_one_rank(num_samples: int, size: int) -> None:
    shares = [Share([NUM_TOKENS] * num_samples, 4, rank, size) for rank in range(size)]
    assert sorted(number for share in shares for chunk in share.chunks for number in chunk) == list(range(num_samples))
    for start in range(num_samples):
        for stop in range(start, num_samples + 1):
            found = [
                share.chunks[chunk][row]
                for share in shares
                for chunk, rows in share.rows(range(start, stop))
                for row in range(rows.start, rows.stop)
            ]
            assert sorted(found) == list(range(start, stop))
            counts = [sum(rows.stop - rows.start for _, rows in share.rows(range(start, stop))) for share in shares]
            assert max(counts) - min(counts) <= 1


def test_work_is_dealt_out_whole_where_there_is_enough() -> None:
    assert deal([(10, 4), (6, 4)], 1) == [[(0, slice(0, 10))], [(0, slice(0, 6))]]
    assert deal([(10, 4)], 3) == [[(0, slice(0, 3)), (1, slice(3, 6)), (2, slice(6, 10))]]
    assert deal([(1, 4)], 2) == [[(0, slice(0, 1))]]
    whole = deal([(10, 4), (10, 64), (10, 8), (10, 8)], 2)
    assert [[rank for rank, _ in pieces] for pieces in whole] == [[1], [0], [1], [1]]
