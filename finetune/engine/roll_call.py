"""Bring the ranks that a launcher started together: who is there, who is missing, over which network interface.

Torch's own start waits in silence for a rank that never comes, and trusts that all ranks count their restarts alike;
agents of several nodes don't (one that sees another come back starts its ranks again without counting it), and ranks
that count differently wait for each other under different names. Here rank 0 draws a name for each start instead, and
the others answer to it.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from finetune.errors import ResourceError

_LONGEST_POLL_SECONDS = 0.2
_GRACE_SECONDS = 5.0
"""How much longer the others wait than rank 0, which can say who is missing."""
_PREFIX = "finetune/roll"


@dataclass(frozen=True)
class Member:
    rank: int
    host: str
    pid: int
    address: str
    """The address that this rank reaches the master from."""

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


@dataclass(frozen=True)
class Roll:
    """The ranks of one start, and a store of their own."""

    store: dist.PrefixStore
    members: tuple[Member, ...]
    keeper: str
    """Who keeps the store, for messages."""


def keeps_store(rank: int) -> bool:
    """Whether this rank serves the store; under torchrun its agent does, which outlives the ranks."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def call_roll(*, timeout_seconds: float) -> Roll:
    """Meet all ranks at MASTER_ADDR:MASTER_PORT. Raises ResourceError naming those that don't come in time."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeper = f"the agent at {host}:{port}" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store = dist.TCPStore(host, port, is_master=keeps_store(rank), timeout=timeout, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        taken = "EADDRINUSE" in str(error)
        raise ResourceError(
            f"port {port} is taken"
            if taken
            else f"rank {rank} on {socket.gethostname()} didn't reach {keeper} within {timeout_seconds:g} s",
            where=f"MASTER_ADDR={host}, MASTER_PORT={port}",
            fix="set MASTER_PORT to a free one"
            if taken
            else "see whether rank 0 runs there and no firewall is between",
        ) from error
    me = Member(rank, socket.gethostname(), os.getpid(), address_towards(host))
    nonce = uuid.uuid4().hex
    store.set(f"{_PREFIX}/{rank}", json.dumps({**asdict(me), "nonce": nonce}))
    try:
        if rank == 0:
            name, members = _lead(store, world_size, timeout_seconds)
        else:
            name, members = _answer(store, rank, nonce, timeout_seconds + _GRACE_SECONDS)
    except (dist.DistError, ConnectionError) as error:
        raise ResourceError(
            f"{keeper}, which keeps the ranks' store, was lost before all ranks had come",
            where=f"{host}:{port}",
            fix="see its log; run again",
        ) from error
    return Roll(dist.PrefixStore(f"finetune/{name}", store), members, keeper)


def _lead(store: dist.Store, world_size: int, timeout_seconds: float) -> tuple[str, tuple[Member, ...]]:
    """Name this start, tell each rank, and let all go once each has answered: one of an earlier start never does."""
    name, deadline, pause = uuid.uuid4().hex[:12], time.monotonic() + timeout_seconds, 0.005
    told: dict[int, dict[str, object]] = {}
    answered: set[int] = set()
    while len(answered) < world_size:
        for rank in sorted(set(range(world_size)) - answered):
            if not store.check([f"{_PREFIX}/{rank}"]):
                continue
            here = json.loads(store.get(f"{_PREFIX}/{rank}"))
            if told.get(rank) != here:
                told[rank] = here
                store.set(f"{_PREFIX}/seen{rank}", json.dumps({"name": name, "nonce": here["nonce"]}))
            if rank == 0 or store.check([f"{_PREFIX}/{name}/{here['nonce']}"]):
                answered.add(rank)
        if len(answered) == world_size:
            break
        if time.monotonic() > deadline:
            error = _missing(sorted(set(range(world_size)) - answered), timeout_seconds)
            store.set(f"{_PREFIX}/{name}/go", json.dumps({"missing": error.what, "fix": error.fix}))
            time.sleep(1 if keeps_store(0) else 0)
            raise error
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)
    described = [{key: told[rank][key] for key in Member.__dataclass_fields__} for rank in range(world_size)]
    store.set(f"{_PREFIX}/{name}/go", json.dumps({"members": described}))
    return name, tuple(Member(**member) for member in described)  # type: ignore[arg-type]


def _answer(store: dist.Store, rank: int, nonce: str, timeout_seconds: float) -> tuple[str, tuple[Member, ...]]:
    deadline, pause, name = time.monotonic() + timeout_seconds, 0.005, None
    while True:
        if store.check([f"{_PREFIX}/seen{rank}"]):
            seen = json.loads(store.get(f"{_PREFIX}/seen{rank}"))
            if seen["nonce"] == nonce and seen["name"] != name:
                name = seen["name"]
                store.set(f"{_PREFIX}/{name}/{nonce}", "")
        if name is not None and store.check([f"{_PREFIX}/{name}/go"]):
            word = json.loads(store.get(f"{_PREFIX}/{name}/go"))
            if "missing" in word:
                raise ResourceError(word["missing"], fix=word["fix"])
            return name, tuple(Member(**member) for member in word["members"])
        if time.monotonic() > deadline:
            raise _missing([0], timeout_seconds)
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)


_PLACE = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "SLURM_STEP_ID")
"""Who said that there are so many ranks, and where they meet."""


def _missing(ranks: list[int], seconds: float) -> ResourceError:
    names = " and ".join(f"rank {rank}" for rank in ranks)
    return ResourceError(
        f"{names} didn't come to the start within {seconds:g} s",
        where=", ".join(f"{key}={os.environ[key]}" for key in _PLACE if key in os.environ) or None,
        fix="see whether as many processes run on each node as the launcher was told, and what they print",
    )


def address_towards(host: str, port: int = 9) -> str:
    """This machine's own address on the route to ``host``; nothing is sent."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_for(members: tuple[Member, ...], rank: int) -> str | None:
    """The network interface through which ``rank`` meets the others; None where it can't be told (not Linux).

    Gloo would take the one that this host's own name resolves to: the loopback, or none, on many machines. A master
    whose name leads itself to its loopback takes the route to another node.
    """
    if not sys.platform.startswith("linux"):
        return None
    mine = members[rank]
    address = mine.address
    if _is_loopback(address):
        outside = [member.address for member in members if not _is_loopback(member.address)]
        if outside:
            address = address_towards(outside[0])
    return _interface_of(address)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _interface_of(address: str) -> str | None:
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address.split("%")[0]).hex()
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            if digits == wanted:
                return name
        return None
    if _is_loopback(address):
        # All of 127.0.0.0/8 is there, not only the one address that the interface tells.
        return "lo"
    import fcntl

    siocgifaddr = 0x8915  # linux/sockios.h
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
