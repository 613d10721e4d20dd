"""A meeting of all ranks that can't hang: who doesn't come is named, and one rank's error is raised on every rank.

Collectives give neither: a rank that never enters one leaves the others waiting for the process group's own timeout,
and then says nothing of who was missing. A meeting goes over the group's key-value store, whatever its backend, so it
costs no device memory. Each rank leaves one JSON value there; rank 0 reads them all and leaves its decision.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

import finetune.errors
from finetune.errors import FinetuneError, ResourceError

_LONGEST_POLL_SECONDS = 0.05
_LOST_PEER_SECONDS = 10.0
"""How long the others are waited for once this rank has failed: they have failed too, or are about to."""


def rank_and_world_size() -> tuple[int, int]:
    """(0, 1) in a process without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if _distributed() else (0, 1)


def meet(
    point: str,
    work: Callable[[], Any],
    *,
    decide: Callable[[Sequence[Any]], Any] = lambda values: None,
    timeout_seconds: float,
) -> Any:
    """Do ``work`` on every rank, ``decide`` on rank 0 from all their JSON values (in rank order), give all its result.

    ``point`` says what is done here, for messages, and must be the same on all ranks. An error of ``work`` or
    ``decide`` is raised on every rank (a FinetuneError as itself, another as ResourceError that names it and its rank;
    the rank where it arose raises its own). Raises ResourceError that names the ranks that don't come within
    ``timeout_seconds`` of the first wait for them.
    """
    if not _distributed():
        return decide([work()])
    rank, world_size = rank_and_world_size()
    store = dist.distributed_c10d._get_default_store()
    failure: Exception | None = None
    message: dict[str, Any] = {"point": point}
    try:
        message["value"] = work()
    except Exception as error:
        failure, message["error"] = error, _describe(error, rank)
    try:
        # Counted in the store and per rank, so the process keeps no state of its own; equal on ranks in step.
        meeting = store.add(f"finetune/meeting/{rank}", 1)
        prefix = f"finetune/meeting/{meeting}"
        store.set(f"{prefix}/rank{rank}", json.dumps(message))
        if rank == 0:
            limit = min(timeout_seconds, _LOST_PEER_SECONDS) if failure else timeout_seconds
            verdict, refusal = _verdict(store, prefix, point, world_size, decide, limit)
            failure = failure or refusal
            store.set(f"{prefix}/verdict", json.dumps(verdict))
            if "error" in verdict:
                # This process may end next, and with it a store that it keeps: let the others read first.
                present = [other for other in range(1, world_size) if other not in verdict.get("lost", ())]
                _wait_for(store, [f"{prefix}/read{other}" for other in present], _LOST_PEER_SECONDS / 2)
            for other in range(world_size):
                store.delete_key(f"{prefix}/rank{other}")
            # All ranks are here, so all have read the verdict of the meeting before.
            store.delete_key(f"finetune/meeting/{meeting - 1}/verdict")
        else:
            # Rank 0 gives up first, and then says which of the others is missing.
            limit = timeout_seconds + _LOST_PEER_SECONDS / 2
            if not _wait_for(store, [f"{prefix}/verdict"], limit):
                raise _lost([0], point, limit) from failure
            verdict = json.loads(store.get(f"{prefix}/verdict"))
            if "error" in verdict:
                store.set(f"{prefix}/read{rank}", "")
    except (dist.DistNetworkError, ConnectionError) as error:
        raise ResourceError(
            "rank 0, which keeps the ranks' shared store, was lost", where=point, fix="see that rank's log; run again"
        ) from (failure or error)
    if failure is not None and not verdict.get("lost"):
        raise failure
    if "error" in verdict:
        raise _rebuild(verdict["error"]) from failure
    return verdict["value"]


def _verdict(
    store: dist.Store,
    prefix: str,
    point: str,
    world_size: int,
    decide: Callable[[Sequence[Any]], Any],
    timeout_seconds: float,
) -> tuple[dict[str, Any], Exception | None]:
    """What rank 0 tells all, and the error that ``decide`` itself raised."""
    keys = [f"{prefix}/rank{other}" for other in range(world_size)]
    if not _wait_for(store, keys, timeout_seconds):
        missing = [other for other in range(world_size) if not store.check([keys[other]])]
        return {"error": _describe(_lost(missing, point, timeout_seconds), 0), "lost": missing}, None
    messages = [json.loads(store.get(key)) for key in keys]
    for other, message in enumerate(messages):
        if message["point"] != point:
            error = ResourceError(
                f"rank {other} is about to {message['point']} while rank 0 is about to {point}",
                fix="a bug: all ranks must do the same in the same order",
            )
            return {"error": _describe(error, 0)}, None
    for message in messages:
        if "error" in message:
            return {"error": message["error"]}, None
    try:
        return {"value": decide([message["value"] for message in messages])}, None
    except Exception as error:
        return {"error": _describe(error, 0)}, error


def _wait_for(store: dist.Store, keys: list[str], timeout_seconds: float) -> bool:
    """Whether all ``keys`` were set in time. (``Store.wait`` can't be interrupted and warns on a timeout.)"""
    deadline = time.monotonic() + timeout_seconds
    pause = 0.001
    while keys and not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)
    return True


def _lost(ranks: list[int], point: str, timeout_seconds: float) -> ResourceError:
    names = " and ".join(f"rank {rank}" for rank in ranks)
    return ResourceError(
        f"{names} didn't come to {point} within {timeout_seconds:g} s",
        fix=f"see the log of {names}: it died, hangs, or went another way",
    )


def _describe(error: Exception, rank: int) -> dict[str, Any]:
    if isinstance(error, FinetuneError):
        return {"kind": type(error).__name__, "what": error.what, "where": error.where, "fix": error.fix}
    return {"kind": "ResourceError", "what": f"rank {rank} failed: {type(error).__name__}: {error}"}


def _rebuild(described: dict[str, Any]) -> FinetuneError:
    kind: type[FinetuneError] = getattr(finetune.errors, described["kind"])
    return kind(described["what"], where=described.get("where"), fix=described.get("fix"))


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
