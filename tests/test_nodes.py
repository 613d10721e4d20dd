"""Ranks on two machines, which are two network namespaces here: one run, a lost rank, a rank that hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes import Node, cannot, pids, two_nodes
from tests.small_run import finetune, write_inputs

RECIPE = """\
name: two
seed: 5
model:
  scratch:
    config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
             num_key_value_heads: 2, max_position_embeddings: 128, tie_word_embeddings: true}
    tokenizer: {vocab_size: 320}
launch: {num_processes: 1, device: cpu, timeout_seconds: 60}
zero: {stage: 3}
stages:
  - pretrain: {data: [{path: data/pretrain.jsonl}], max_seq_length: 64, micro_batch_size: 2, epochs: 9, max_steps: 24,
               learning_rate: 1e-3, save_every_steps: 2, mixed_precision: fp32}
  - export: {}
"""

STOPPED = """
import os, signal, sys, time
import torch.distributed as dist
from finetune.engine.launch import rank_process

with rank_process("cpu", timeout_seconds=6) as (rank, world_size):
    dist.barrier()
    if rank == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    if reason := cannot():
        pytest.skip(reason)
    with two_nodes() as pair:
        yield pair


def ranks(node: Node) -> list[int]:
    """The processes on ``node`` that are ranks of a run."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids(node)}
    return [pid for pid, line in lines.items() if b"-m\0finetune\0run" in line and b"torch.distributed" not in line]


def wait_for_all(processes: list, seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    return [process.wait(timeout=max(1.0, deadline - time.monotonic())) for process in processes]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "01-pretrain/metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_nodes_train_as_one_process_does_though_a_rank_is_killed(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    project = tmp_path / "a project"
    project.mkdir()
    write_inputs(project)
    (project / "two.yaml").write_text(RECIPE)
    alone = "stages.pretrain.gradient_accumulation_steps=2"
    done = finetune(project, "run", "two.yaml", "--until", "pretrain", "--set", "name=one", "--set", alone)
    assert done.returncode == 0, done.stderr
    script = ["launch-script", "two.yaml", "--torchrun", "--nodes", "2", "--max-restarts", "1", "--out", "two nodes.sh"]
    done = finetune(project, *script)
    assert done.returncode == 0, done.stderr

    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    processes = [
        node.start(["bash", "two nodes.sh"], cwd=project, log=log, environment={"MASTER_ADDR": nodes[0].address})
        for node, log in zip(nodes, logs, strict=True)
    ]
    saved = project / "outputs/two/01-pretrain/checkpoints/step-00000002/manifest.json"
    deadline = time.monotonic() + 120
    while not saved.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    (victim,) = ranks(nodes[1])
    os.kill(victim, signal.SIGKILL)
    codes = wait_for_all(processes, 200)
    texts = [log.read_text() for log in logs]
    assert codes == [0, 0], "\n".join(texts)
    assert re.search(rf"rank \d \(process {victim} on {nodes[1].namespace}\) was lost: it died", texts[0]), texts[0]
    # The restart may give rank 0 to the other node.
    assert sum(text.count("pretrain: starts") for text in texts) == 1
    assert sum(text.count("pretrain: goes on where it was") for text in texts) == 1

    run = project / "outputs/two"
    assert losses(run) == pytest.approx(losses(project / "outputs/one"), rel=1e-4)
    assert json.loads((run / "summary.json").read_text())["finished"] is True
    assert (run / "02-export/model/model.safetensors").is_file()
    assert not list(run.glob(".joined-*"))
    assert [pids(node) for node in nodes] == [[], []]


@pytest.mark.slow
def test_a_rank_that_is_stopped_on_the_stores_node_is_named_on_the_other_and_ended(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(STOPPED)
    start = time.monotonic()
    processes = []
    for node, is_host in zip(nodes, ("true", "false"), strict=True):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--rdzv-backend=c10d"]
        place = [f"--rdzv-endpoint={nodes[0].address}:29500", f"--rdzv-conf=is_host={is_host}"]
        command = [*torchrun, *place, f"--local-addr={node.address}", str(tmp_path / "rank.py"), "0"]
        processes.append(node.start(command, cwd=Path.cwd(), log=tmp_path / f"{is_host}.log", environment={}))
    codes = wait_for_all(processes, 100)
    text = (tmp_path / "false.log").read_text() + (tmp_path / "true.log").read_text()
    assert all(codes), text
    assert re.search(r"rank 0 \(process \d+ on node\w-\d+\) gave no sign of life for 4.8 s", text), text
    assert re.search(r"exitcode *: 5 ", text), text
    assert time.monotonic() - start < 60
    assert [pids(node) for node in nodes] == [[], []]
