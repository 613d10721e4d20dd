"""What the processes of the checkpoint tests do: ``python -m tests.checkpoint_ranks SCENARIO FOLDER NUM_RANKS``.

Each scenario leaves ``FOLDER/SCENARIO-rankR.json`` with what it saw. It imports torch but not transformers, which
would take longer to import than everything here takes to run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from finetune.checkpoint import commit
from finetune.checkpoint.commit import find_checkpoint, find_checkpoint_together, load_checkpoint, save_checkpoint
from finetune.errors import FinetuneError


def launch(scenario: str, folder: Path, *, num_ranks: int, timeout_seconds: float = 120) -> list[int]:
    """Run ``scenario`` on ``num_ranks`` processes and return their exit codes (negative: the signal)."""
    subprocess.run(
        [sys.executable, "-m", "tests.checkpoint_ranks", scenario, str(folder), str(num_ranks)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[1],
        timeout=timeout_seconds,
        check=True,
    )
    codes: list[int] = json.loads((folder / f"{scenario}-codes.json").read_text())
    return codes


def example_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Even, uneven and too few rows for two or four ranks, every kind of dtype, and 0-dim."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.even.weight": torch.randn(8, 6, generator=generator),
        "model.uneven.weight": torch.randn(7, 3, generator=generator),
        "model.one_row.weight": torch.randn(1, 5, generator=generator),
        "model.vector": torch.randn(64, generator=generator),
        "optimizer.exp_avg.even.weight": torch.randn(8, 6, generator=generator),
        "buffer.count": torch.tensor([2**62 + 1 + seed, -1]),
        "buffer.flags": torch.tensor([True, False, bool(seed % 2)]),
        "buffer.scale": torch.tensor(1.0 / 3 + seed),
    }


def sharded(tensors: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """As a sharded engine holds them: parameters split by rows, buffers whole on every rank."""
    return {
        name: tensor if name.startswith("buffer.") else distribute_tensor(tensor.clone(), mesh, [Shard(0)])
        for name, tensor in tensors.items()
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def refused(action: Any) -> str:
    """The message of the FinetuneError that ``action`` must raise."""
    try:
        action()
    except FinetuneError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")


def save(folder: Path) -> dict[str, Any]:
    """Save models sharded over the ranks; refusals; the time of a save; rank 1 is killed while it writes step 20."""
    from safetensors.torch import load_file

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    seen: dict[str, Any] = {}
    for name in ("tied", "untied"):
        weights = {f"model.{key}": value for key, value in load_file(folder / name / "model.safetensors").items()}
        state = sharded(weights, mesh)
        if name == "tied":
            # The head too, as an engine that gathers by name would give it.
            state["model.lm_head.weight"] = state["model.model.embed_tokens.weight"]
        save_checkpoint(folder / f"{name}-run", step=3, state=state, extra={}, model_files=folder / name)
    tensors = example_tensors()
    root = folder / "run"
    arguments = {"extra": {"position": 40}, "model_files": folder / "tied"}
    save_checkpoint(root, step=10, state=sharded(tensors, mesh), **arguments)
    replicated = {key: distribute_tensor(value.clone(), mesh, [Replicate()]) for key, value in tensors.items()}
    save_checkpoint(folder / "replicated", step=1, state=replicated, **arguments)
    save_checkpoint(folder / "plain", step=1, state=tensors, **arguments)

    weights = {f"model.{key}": value for key, value in load_file(folder / "untied/model.safetensors").items()}
    state = sharded(weights, mesh)
    for kind in ("exp_avg", "exp_avg_sq"):
        state |= {f"optimizer.{kind}.{key}": value for key, value in sharded(weights, mesh).items()}
    seconds = []
    for step in range(1, 6):
        started = time.perf_counter()
        save_checkpoint(folder / "timed", step=step, state=state, **arguments)
        seconds.append(time.perf_counter() - started)
    seen["save_seconds"] = sorted(seconds)

    state = sharded(tensors, mesh)
    seen["other step"] = refused(lambda: save_checkpoint(folder / "refused", step=5 + rank, state=state, **arguments))
    broken = dict(arguments, model_files=folder / "no such folder")
    seen["no model"] = refused(lambda: save_checkpoint(folder / "refused", step=5, state=state, **broken))
    if rank == 0:
        (folder / "refused.json").write_text(json.dumps([path.name for path in (folder / "refused").glob("step-*")]))
    if rank == 1:
        time.sleep(1.0)
    seen["late"] = refused(
        lambda: save_checkpoint(folder / "refused", step=5, state=state, timeout_seconds=0.5, **arguments)
    )
    dist.barrier()
    save_checkpoint(folder / "recovered", step=5, state=state, **arguments)

    if rank == 1:
        write_data = commit.dcp.FileSystemWriter.write_data

        def write_and_die(*arguments: Any, **keywords: Any) -> Any:
            write_data(*arguments, **keywords)
            os.kill(os.getpid(), signal.SIGKILL)

        commit.dcp.FileSystemWriter.write_data = write_and_die  # type: ignore[method-assign]
    started = time.perf_counter()
    # Kept out of the clean-up that rank 0 does, as if the launcher had ended it too: what is left must be recognised.
    commit.shutil.rmtree = lambda *_, **__: None
    other = sharded(example_tensors(seed=1), mesh)
    seen["lost"] = refused(lambda: save_checkpoint(root, step=20, state=other, timeout_seconds=2, **arguments))
    seen["lost_seconds"] = time.perf_counter() - started
    return seen


def load(folder: Path) -> dict[str, Any]:
    """Load what two ranks saved on another number of ranks, in three ways; refusals reach every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = example_tensors()
    skipped: list[Any] = []
    found = find_checkpoint_together(folder / "run", skipped=skipped)
    assert found is not None
    blank = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    states = {
        "sharded": sharded(blank, mesh),
        "replicated": {name: distribute_tensor(value.clone(), mesh, [Replicate()]) for name, value in blank.items()},
        "plain": {name: value.clone() for name, value in blank.items()},
    }
    equal = {}
    for kind, state in states.items():
        load_checkpoint(found.path, state)
        equal[kind] = all(torch.equal(whole(state[name]), tensor) for name, tensor in tensors.items())
    damaged = folder / "damaged-run" / "step-00000010"
    return {
        "found": [found.step, found.extra, found.world_size],
        "skipped": [[path.name, reason] for path, reason in skipped],
        "equal": equal,
        "damaged": refused(lambda: load_checkpoint(damaged, states["sharded"])),
    }


def crash(folder: Path) -> dict[str, Any]:
    """Kill a save before each of its changes to the disk in turn; afterwards one whole checkpoint must be found."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    state = {"model.a": torch.zeros(3), "model.b": torch.zeros(2, 2), "buffer.c": torch.tensor(0.0)}

    def filled(value: float) -> dict[str, torch.Tensor]:
        return {name: torch.full_like(tensor, value) for name, tensor in state.items()}

    def save_one(root: Path, step: int, value: float) -> None:
        save_checkpoint(root, step=step, state=filled(value), extra={"value": value}, model_files=model)

    outcomes: dict[str, list[Any]] = {}
    for existing in (20, 10):
        base = folder / f"crash-base-{existing}"
        save_one(base, existing, 1.0)
        seen = outcomes.setdefault(str(existing), [])
        for kill_at in range(1, 1000):
            root = folder / "crash"
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(base, root)
            child = os.fork()
            if child == 0:
                _die_at_call(kill_at)
                save_one(root, 20, 2.0)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            found = find_checkpoint(root)
            assert found is not None, f"nothing was left after a kill at call {kill_at}"
            loaded = filled(0.0)
            load_checkpoint(found.path, loaded)
            values = {float(value) for tensor in loaded.values() for value in tensor.flatten()}
            assert values == {found.extra["value"]}, f"a kill at call {kill_at} left a mix: {values}"
            assert found.step == (20 if found.extra["value"] == 2.0 else existing)
            # The next save must clean up whatever is there.
            save_one(root, 20, 3.0)
            after = find_checkpoint(root)
            assert after is not None
            assert after.extra == {"value": 3.0}
            assert not [path for path in root.iterdir() if path.name.startswith("step-00000020.")]
            seen.append([found.extra["value"], found.path.name])
            if status == 0:
                break
            assert os.WTERMSIG(status) == signal.SIGKILL, f"the child failed by itself: {status}"
    return outcomes


def _die_at_call(number: int) -> None:
    """Kill this process just before its ``number``-th call that changes the file system."""
    remaining = number

    def hook(event: str, arguments: Any) -> None:
        nonlocal remaining
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            remaining -= 1
            if remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main() -> None:
    """Import once, then fork the ranks: torch's import takes longer than a scenario."""
    scenario, folder, num_ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    ranks = []
    for rank in range(num_ranks):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            try:
                run_rank(scenario, folder, rank, num_ranks)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
    (folder / f"{scenario}-codes.json").write_text(json.dumps(codes))


def run_rank(scenario: str, folder: Path, rank: int, num_ranks: int) -> None:
    os.environ["RANK"] = str(rank)
    if num_ranks > 1:
        dist.init_process_group("gloo")
    seen = globals()[scenario](folder)
    (folder / f"{scenario}-rank{rank}.json").write_text(json.dumps(seen))
    if num_ranks > 1 and rank == 0:
        # It keeps the store. No destroy_process_group: that would wait for a rank that a scenario has killed.
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    main()
