"""Start one process a rank, by torch.distributed's own launcher, and let none hang or outlive the others."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import finetune.errors
from finetune.engine.lost_ranks import Watch
from finetune.engine.roll_call import call_roll, interface_for
from finetune.errors import FinetuneError, InterruptedRunError, ResourceError, resource_error
from finetune.processes import die_with_parent

TIMEOUT_SECONDS = 600.0
SHUTDOWN_SECONDS = 3
"""How long the ranks that are left have to end by themselves once one is lost."""
JOINED_VARIABLE = "FINETUNE_JOINED"
"""Set, to the launcher's name, in a process that took its rank from another launcher's environment than torchrun's."""
_OWN_RUN_ID = "ranks-"
_HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun, ``run_ranks`` or SLURM (once joined) started."""
    return "RANK" in os.environ and ("TORCHELASTIC_RUN_ID" in os.environ or JOINED_VARIABLE in os.environ)


def run_ranks(arguments: Sequence[str], *, num_processes: int, device: str, log_dir: Path) -> None:
    """Run ``python ARGUMENTS`` once a rank and wait for all of them.

    Rank 0 writes to this process's stdout and stderr, the others to files below ``log_dir``. The program enters
    ``rank_process``, which reports its errors here. When a rank ends badly the others are stopped, and its error is
    raised: its FinetuneError as itself, any other exception as RuntimeError with the rank's traceback, a signal as
    ResourceError that names rank and signal. Raises InterruptedRunError when this process is told to stop.
    """
    assert num_processes >= 1
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"{_OWN_RUN_ID}{uuid.uuid4().hex[:8]}",
        rdzv_backend="c10d",
        # Port 0: any that is free. The store lives in this process, so it outlasts a lost rank.
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=SHUTDOWN_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=str(log_dir), redirects=dict.fromkeys(range(1, num_processes), Std.ALL)),
    )
    with _quiet_launcher():
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            raise _cause(error.failures, log_dir) from None
        except SignalException as error:
            raise InterruptedRunError(f"stopped by {error.sigval.name}", fix="run the same command to go on") from None


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """The launcher logs each failure, which is raised here anyway, and keeps its signal handlers: undo both."""
    # Its loggers have levels of their own, which their parent's doesn't override.
    disabled, handlers = logging.root.manager.disable, {number: signal.getsignal(number) for number in _HANDLED_SIGNALS}
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _cause(failures: dict[int, ProcessFailure], log_dir: Path) -> Exception:
    """The failure that explains the others: who hung, who was killed, who says why of itself, then of another."""

    def order(rank: int) -> tuple[int, float]:
        failure, report = failures[rank], _report(failures[rank])
        timestamp = report.get("time", failure.timestamp)
        if report.get("about") == "hung rank":
            return 0, timestamp  # it was killed for that, so its own end says less
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return 1, failure.timestamp
        if report.get("about") == "other rank":
            return 4, timestamp
        return (2 if "error" in report else 3 if report else 5), timestamp

    rank = min(failures, key=order)
    failure = failures[rank]
    report = _report(failure)
    logs = Path(failure.error_file).parent if not failure.error_file.startswith("<") else log_dir
    if "error" in report:
        described = report["error"]
        kind: type[FinetuneError] = getattr(finetune.errors, described["kind"])
        return kind(described["what"], where=described["where"], fix=described["fix"])
    if report:
        return RuntimeError(f"rank {rank} failed:\n{report['traceback']}")
    if failure.exitcode < 0:
        name = failure.signal_name()
        hint = " (often the kernel, when memory runs out)" if failure.exitcode == -signal.SIGKILL else ""
        return ResourceError(
            f"rank {rank} was ended by {name}{hint}", where=logs, fix="run the same command to go on where it was"
        )
    return RuntimeError(f"rank {rank} ended with exit code {failure.exitcode}; its output is in {logs}")


def _report(failure: ProcessFailure) -> dict[str, Any]:
    message = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    report: dict[str, Any] = message.get("finetune", {}) if isinstance(message, dict) else {}
    return report


@contextmanager
def rank_process(device: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Iterator[tuple[int, int]]:
    """Be one rank of ``run_ranks``: yields (rank, world size) inside the process group.

    The process dies with its launcher. The cpu's cores are shared out between the ranks unless OMP_NUM_THREADS says
    otherwise. An exception is reported to the launcher and ends the process.
    """
    die_with_parent()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _num_cores() // int(os.environ["LOCAL_WORLD_SIZE"])))
    with _reported(), process_group(device, timeout_seconds=timeout_seconds) as ranks:
        yield ranks


@contextmanager
def _reported() -> Iterator[None]:
    """Write what is raised within to where the launcher looks for it, unless that is done."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, OSError):
            error = resource_error(error) or error
        if isinstance(error, KeyboardInterrupt):
            # The terminal's ^C reaches every process; the one that was started by hand says what it means.
            raise SystemExit(InterruptedRunError.exit_code) from None
        if not isinstance(error, SystemExit):
            _write_report(error)
        if isinstance(error, FinetuneError) or (isinstance(error, Exception) and _report_path() is not None):
            # The launcher raises it; a traceback on this rank's stderr (of a lost neighbour's broken connection, say)
            # would only hide that.
            raise SystemExit(error.exit_code if isinstance(error, FinetuneError) else 1) from error
        raise


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _report_path() -> str | None:
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def _write_report(error: BaseException, *, about: str = "this rank") -> None:
    """Leave the error where the launcher looks for it, in the launcher's own format with ours inside."""
    path = _report_path()
    if path is None or os.path.exists(path):
        return
    text = "".join(traceback.format_exception(error))
    report: dict[str, Any] = {"traceback": text, "time": time.time(), "about": about}
    if isinstance(error, FinetuneError):
        report["error"] = {
            "kind": type(error).__name__,
            "what": error.what,
            "where": error.where,
            "fix": error.fix,
        }
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with open(path, "w", encoding="utf-8") as stream:
        json.dump({"message": {"message": str(error), "extraInfo": extra, "finetune": report}}, stream)


@contextmanager
def process_group(
    device: str, *, timeout_seconds: float = TIMEOUT_SECONDS, alone_too: bool = False
) -> Iterator[tuple[int, int]]:
    """Join the ranks that a launcher started; yields (rank, world size): (0, 1) in a process alone, without a group.

    A collective that waits longer than ``timeout_seconds`` for another rank raises, so none hangs. Whatever ends the
    body is raised on as it is where it is this rank's own; in place of a collective that broke comes the error of the
    rank that failed first, or a ResourceError that names who was lost. A lost rank that the main thread can't see ends
    the process with that error's exit code. ``alone_too`` makes a group of one for a process alone. Inside another
    ``process_group`` it only tells the ranks.
    """
    if dist.is_initialized():
        yield dist.get_rank(), dist.get_world_size()
        return
    launched = under_torchrun()
    if device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        # A scheduler may show each process its own GPU alone.
        torch.cuda.set_device(local_rank if torch.cuda.device_count() > 1 else 0)
    if not launched and not alone_too:
        yield 0, 1
        return
    # Offloaded state is on the cpu and checkpoints gather there, so a group on GPUs speaks gloo too.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if launched:
        with _joined_group(backend, timeout_seconds) as ranks:
            yield ranks
        return
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield 0, 1
    finally:
        dist.destroy_process_group()


@contextmanager
def _joined_group(backend: str, timeout_seconds: float) -> Iterator[tuple[int, int]]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    roll = call_roll(timeout_seconds=timeout_seconds)
    interface = interface_for(roll.members, rank)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    watch = Watch(roll, rank, timeout_seconds=timeout_seconds, on_lost=_end_process)
    watch.start()
    try:
        dist.init_process_group(
            backend,
            timeout=timedelta(seconds=timeout_seconds),
            store=dist.PrefixStore("group", roll.store),
            rank=rank,
            world_size=world_size,
        )
        yield rank, world_size
    except BaseException as error:
        cause = watch.explain(error)
        # Before the group is left: the other ranks then fail too, and their errors must not look like the first.
        if not isinstance(cause, SystemExit | KeyboardInterrupt):
            _write_report(cause, about="this rank" if cause is error else "other rank")
        watch.close()
        if cause is error:
            raise
        raise cause from error
    else:
        watch.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _end_process(error: FinetuneError) -> None:
    """Report ``error`` and end at once, from any thread: the main one may wait for the lost rank in a collective."""
    _write_report(error, about="hung rank")
    if not os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_OWN_RUN_ID):
        # Our own launcher raises what was reported; nobody else shows it.
        print(error, file=sys.stderr, flush=True)
    os._exit(error.exit_code)
