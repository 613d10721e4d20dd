"""Ranks that fail, are killed or lose their parent: nothing hangs, and the parent says which and why."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune.engine.launch import run_ranks, under_torchrun
from finetune.errors import DataError, ResourceError

RANK = """
import os, signal, sys, time
from pathlib import Path
from finetune.engine.launch import rank_process, under_torchrun
from finetune.errors import DataError
import torch, torch.distributed as dist

verb, folder = sys.argv[1], Path(sys.argv[2])
with rank_process("cpu", timeout_seconds=6 if verb in ("stopped", "hangs") else 60) as (rank, world_size):
    assert under_torchrun() and world_size == 2
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    if verb == "succeed":
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        (folder / f"{rank}.txt").write_text(f"{total.item()} {torch.get_num_threads()}")
    elif rank == 1 and verb == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 1 and verb == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 1 and verb == "hangs":
        time.sleep(600)
    elif rank == 1 and verb == "data":
        raise DataError("row 7 is bad", where="rows.jsonl:7", fix="correct it")
    elif rank == 1 and verb == "bug":
        raise KeyError("a bug of ours")
    else:
        dist.barrier()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "rank.py"
    path.write_text(RANK)
    return path


def launch(program, verb, folder):
    run_ranks([str(program), verb, str(folder)], num_processes=2, device="cpu", log_dir=folder / "logs")


def test_two_ranks_meet_and_share_the_cores(program, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert not under_torchrun()
    handler = signal.getsignal(signal.SIGTERM)
    launch(program, "succeed", tmp_path)
    assert signal.getsignal(signal.SIGTERM) is handler
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == [f"3.0 {threads}"] * 2


def test_a_killed_rank_ends_the_others_within_seconds_and_is_named(program, tmp_path):
    start = time.monotonic()
    with pytest.raises(ResourceError, match="rank 1 was ended by SIGKILL"):
        launch(program, "killed", tmp_path)
    assert time.monotonic() - start < 40
    assert not alive(tmp_path)


@pytest.mark.parametrize(
    ("verb", "sign"), [("stopped", "gave no sign of life for 4.8 s"), ("hangs", "didn't come to where the others")]
)
def test_a_rank_that_hangs_ends_the_others_within_the_timeout_and_is_named(program, tmp_path, verb, sign):
    start = time.monotonic()
    with pytest.raises(ResourceError, match=rf"rank 1 \(process \d+ on .*\) {sign}"):
        launch(program, verb, tmp_path)
    assert time.monotonic() - start < 40
    assert not alive(tmp_path)


KEEPER = """
import os, signal, sys
import torch.distributed as dist
from finetune.engine.launch import process_group
from finetune.errors import FinetuneError

try:
    with process_group("cpu", timeout_seconds=6) as (rank, world_size):
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        dist.barrier()
except FinetuneError as error:
    sys.exit(f"{type(error).__name__} {error}")
"""


@pytest.mark.parametrize(
    ("name", "how"), [("SIGKILL", "was lost"), ("SIGSTOP", "doesn't answer any more: it hangs or was stopped")]
)
def test_a_lost_rank_0_that_keeps_the_store_is_named(tmp_path, name, how):
    """As under srun, where no agent keeps it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"FINETUNE_JOINED": "slurm", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-c", KEEPER, name]
    keeper, other = (
        subprocess.Popen(command, env={**os.environ, **place, "RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    )
    try:
        _, stderr = other.communicate(timeout=60)
        assert re.search(rf"rank 0 \(process {keeper.pid} on .*\), which keeps the ranks' store, {how}", stderr), stderr
        assert "Traceback" not in stderr
        assert keeper.wait(timeout=10) == -signal.SIGKILL, "stopped, and not ended by the other rank"
    finally:
        keeper.kill()
        keeper.communicate()


def test_a_ranks_own_error_is_raised_in_the_parent(program, tmp_path):
    with pytest.raises(DataError) as caught:
        launch(program, "data", tmp_path)
    assert (caught.value.what, caught.value.where, caught.value.fix) == ("row 7 is bad", "rows.jsonl:7", "correct it")


def test_a_bug_in_a_rank_shows_its_traceback(program, tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed.*KeyError: 'a bug of ours'"):
        launch(program, "bug", tmp_path)


def test_no_rank_survives_a_killed_parent(program, tmp_path):
    code = (
        "from pathlib import Path; from finetune.engine.launch import run_ranks; "
        f"run_ranks([{str(program)!r}, 'wait', {str(tmp_path)!r}], num_processes=2, device='cpu', "
        f"log_dir=Path({str(tmp_path / 'logs')!r}))"
    )
    # One rank is stopped before the barrier, so that the other waits in it.
    stopper = RANK.replace('if verb == "succeed"', 'if rank == 1: time.sleep(600)\n    elif verb == "succeed"')
    program_that_waits = tmp_path / "waits.py"
    program_that_waits.write_text(stopper)
    parent = subprocess.Popen([sys.executable, "-c", code.replace(str(program), str(program_that_waits))])
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(alive(tmp_path)) == 2
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(tmp_path)


def alive(folder: Path) -> list[int]:
    found = []
    for path in folder.glob("*.pid"):
        pid = int(path.read_text())
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            continue
        if state != "Z":
            found.append(pid)
    return found
