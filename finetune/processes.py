"""Child processes that never outlive their parent; a folder that only one process works in."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.errors import ResourceError

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(expected_parent: int | None = None) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends, so that no rank goes on writing alone.

    ``expected_parent`` closes the gap in which the parent died before this call. Linux only; elsewhere it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if expected_parent is not None and os.getppid() != expected_parent:
        os._exit(1)


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process alone; the kernel lets go of it however the process ends.

    Raises ResourceError when another process holds it, or the system makes no such folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise ResourceError(
            f"the folder can't be made: {cause.strerror}", where=folder, fix="choose another output_dir"
        ) from cause
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResourceError(
                "another process is running in this folder", where=folder, fix="wait for it, or give another name"
            ) from None
        yield
