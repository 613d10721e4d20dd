"""Two network namespaces as two machines: each with its own interfaces, loopback, host name and address."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.small_run import ENVIRONMENT


@dataclass(frozen=True)
class Node:
    namespace: str
    address: str

    def start(
        self, command: Sequence[str], *, cwd: Path, log: Path, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """Run ``command`` here, its output to ``log``."""
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c"]
        with log.open("wb") as stream:
            return subprocess.Popen(
                [*enter, 'hostname "$0" && exec "$@"', self.namespace, *command],
                cwd=cwd,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**ENVIRONMENT, **environment},
            )


def cannot() -> str | None:
    """Why this machine has no namespaces to give; None where it has."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"there is no `{program}`"
    probe = f"probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return f"`ip netns add`: {done.stderr.strip()}" if done.returncode else None


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes joined by one cable. Whatever runs there when the body ends is killed, and both are taken away."""
    nodes = tuple(Node(f"node{letter}-{os.getpid()}", f"10.91.7.{number}") for number, letter in ((1, "a"), (2, "b")))
    cable = [f"ft{letter}{os.getpid()}" for letter in "ab"]
    try:
        for node in nodes:
            _ip("netns", "add", node.namespace)
        ends = ["link", "add", cable[0], "netns", nodes[0].namespace, "type", "veth"]
        _ip(*ends, "peer", "name", cable[1], "netns", nodes[1].namespace)
        for node, interface in zip(nodes, cable, strict=True):
            _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", interface)
            for name in ("lo", interface):
                _ip("-n", node.namespace, "link", "set", name, "up")
        yield nodes[0], nodes[1]
    finally:
        for node in nodes:
            for pid in pids(node):
                subprocess.run(["kill", "-9", str(pid)], capture_output=True)
            subprocess.run(["ip", "netns", "del", node.namespace], capture_output=True)


def pids(node: Node) -> list[int]:
    """The processes that run on ``node``."""
    done = subprocess.run(["ip", "netns", "pids", node.namespace], capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
