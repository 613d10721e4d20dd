"""A small process beside a rank that ends it once it is stopped: one that hangs can't, and no other node can."""

from __future__ import annotations

import subprocess
import sys

# Reads the rank's heartbeat; at its end the rank has ended, too. Imports nothing but what starts in milliseconds.
_PROGRAM = """
import os, select, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
rank, seconds = int(sys.argv[1]), float(sys.argv[2])
while select.select([0], [], [], seconds)[0]:
    if not os.read(0, 4096):
        sys.exit()
if os.getppid() == rank:
    os.kill(rank, signal.SIGKILL)
"""


class Guardian:
    """Kills this process when it doesn't beat for ``seconds``; ends with it, or at ``close``."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(pid), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
        )

    def beat(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b".")
        except OSError:
            return  # someone has ended it; the rank goes on unguarded

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
