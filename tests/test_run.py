"""The main job on a tiny scale, as a user gives it: two ranks, all stages; killed, changed and repeated."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.small_run import ENVIRONMENT, RECIPE, command, finetune


def weights(run: Path, stage: str) -> dict[str, bytes]:
    model = next(run.glob(f"*-{stage}")) / "model"
    return {path.name: path.read_bytes() for path in sorted(model.glob("*.safetensors"))}


def test_the_summary_holds_every_stage(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert [stage["name"] for stage in summary["stages"]] == ["pretrain", "sft", "int8", "int4", "evaluate", "export"]
    assert summary["finished"] is True
    for index, stage in enumerate(summary["stages"], start=1):
        assert stage["path"].endswith(f"{index:02d}-{stage['name']}")
        assert stage["seconds"] > 0
    models = summary["stages"][4]["metrics"]["models"]
    assert list(models) == ["pretrain", "sft", "int8", "int4"]
    for figures in models.values():
        assert figures["perplexity"] > 1
        assert 0 <= figures["exact_match"] <= 1
    assert models["int4"]["kl"] > models["int8"]["kl"] > 0


def test_every_stage_folder_has_a_true_manifest(finished: Path) -> None:
    from finetune.artifact import check_files, read_manifest

    for stage in sorted(finished.glob("0*-*")):
        manifest = read_manifest(stage)
        assert manifest is not None
        check_files(stage, manifest.files, trust_mtime=False)
        assert set(manifest.files) == {
            str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file() and path.name != "manifest.json"
        } | {name for name in manifest.files if name.endswith("/manifest.json")}


def test_training_writes_one_line_a_step(finished: Path) -> None:
    keys = {"step", "loss", "grad_norm", "learning_rate", "num_tokens", "num_supervised_tokens"}
    for stage in ("01-pretrain", "02-sft"):
        lines = [json.loads(line) for line in (finished / stage / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
        for line in lines:
            assert keys | {"tokens_per_second", "peak_memory_bytes"} <= set(line)
            assert line["loss"] > 0


def test_each_stage_is_a_plain_model_and_generate_answers_as_transformers_does(finished: Path, project: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_folder = finished / "06-export" / "model"
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": "say red 3"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ids = model.generate(**encoded, max_new_tokens=8, do_sample=False)
    expected = tokenizer.decode(ids[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    done = finetune(project, "generate", str(model_folder), "--prompt", "say red 3", "--max-new-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected + "\n"
    for stage in ("01-pretrain", "02-sft"):
        AutoModelForCausalLM.from_pretrained(finished / stage / "model")


def test_a_second_run_does_nothing_and_a_change_runs_from_there(finished: Path, project: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.glob("0*/manifest.json")}
    again = finetune(project, "run", "recipes/llama_sft.yaml")
    assert again.returncode == 0
    assert "nothing to do" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before
    plan = finetune(project, "plan", "recipes/llama_sft.yaml", "--set", "stages.int4.group_size=64", "--json")
    states = {stage["name"]: stage["state"] for stage in json.loads(plan.stdout)["stages"]}
    done, changed = dict.fromkeys(["pretrain", "sft", "int8"], "done"), ["int4", "evaluate", "export"]
    assert states == {**done, **dict.fromkeys(changed, "changed")}


def test_a_run_in_use_is_left_alone(finished: Path, project: Path) -> None:
    from finetune.processes import run_lock

    with run_lock(finished):
        done = finetune(project, "run", "recipes/llama_sft.yaml")
    assert done.returncode == 5
    assert "another process" in done.stderr


def children(parent: int) -> list[tuple[int, str]]:
    """All processes below ``parent`` as (pid, command line)."""
    found, queue = [], [parent]
    while queue:
        pid = queue.pop()
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                below = [int(word) for word in task.read_text().split()]
            except OSError:
                continue
            for child in below:
                try:
                    line = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
                found.append((child, line))
                queue.append(child)
    return found


def kill_when(project: Path, recipe: str, ready: Any, victim: str) -> tuple[int, str]:
    """Start a run; once ``ready()``, SIGKILL the newest process whose command line matches ``victim``."""
    process = subprocess.Popen(
        command("run", recipe),
        cwd=project,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=ENVIRONMENT,
    )
    deadline = time.monotonic() + 200
    victims: list[int] = []
    while time.monotonic() < deadline and process.poll() is None and not victims:
        if ready():
            victims = [pid for pid, line in children(process.pid) if re.search(victim, line)]
        time.sleep(0.02)
    assert victims, "the moment to kill never came"
    below = [pid for pid, _ in children(process.pid)]
    os.kill(victims[-1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=120)
    time.sleep(0.5)
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists() and _alive(pid)], "a child outlived the run"
    return process.returncode, stderr


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_killed_ranks_and_workers_leave_nothing_behind_but_time(finished: Path, project: Path) -> None:
    run = project / "outputs" / "killed"
    (project / "killed.yaml").write_text(RECIPE.replace("name: llama-sft", "name: killed", 1))
    shutil.rmtree(run, ignore_errors=True)
    moments = [
        (lambda: (run / "01-pretrain/checkpoints/step-00000002/manifest.json").exists(), r"finetune\.worker rank"),
        (lambda: (run / "02-sft/metrics.jsonl").exists(), r"finetune\.worker rank"),
        (lambda: (run / "04-int4/started.json").exists(), r"finetune\.worker stage"),
    ]
    for ready, victim in moments:
        code, stderr = kill_when(project, "killed.yaml", ready, victim)
        assert code == 5, stderr
        assert stderr.count("error:") == 1
        assert "Traceback" not in stderr
    last = finetune(project, "run", "killed.yaml")
    assert last.returncode == 0, last.stderr
    assert "pretrain: done before" in last.stderr
    for stage in ("pretrain", "sft", "int4", "export"):
        assert weights(run, stage) == weights(finished, stage), stage


def test_ranks_started_by_torchrun_train_the_same_model_though_one_is_killed(finished: Path, project: Path) -> None:
    """The script that launch-script writes for one node, path with a space and all."""
    (project / "to sft.yaml").write_text(RECIPE[: RECIPE.index("  - quantize")])
    flags = ["--torchrun", "--max-restarts", "1", "--set", "name=joined", "--out", "one node.sh"]
    assert finetune(project, "launch-script", "to sft.yaml", *flags).returncode == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    run = project / "outputs/joined"
    process = subprocess.Popen(
        ["bash", "one node.sh"],
        cwd=project,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**ENVIRONMENT, "MASTER_PORT": port},
    )
    saved = run / "01-pretrain/checkpoints/step-00000002/manifest.json"
    deadline = time.monotonic() + 100
    while not saved.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    below = [pid for pid, line in children(process.pid) if re.search(r"-m finetune run", line)]
    os.kill(below[-1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert re.search(rf"rank [01] \(process {below[-1]} on .*\) was lost: it died", stderr), stderr
    assert stderr.count("pretrain: starts") == stderr.count("pretrain: goes on where it was") == 1
    assert stderr.count("sft: starts") == 1
    assert not [pid for pid in below if _alive(pid)]
    assert weights(run, "sft") == weights(finished, "sft")
