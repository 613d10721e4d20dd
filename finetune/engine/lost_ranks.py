"""Who was lost: every rank beats in the group's store, so that a rank that died or hangs is named and none waits on.

A collective that is broken or overdue says nothing of the rank that is to blame. Two signs tell. A rank's heart beats
in a thread of its own: a process that is stopped or gone has none. And each beat carries how many collectives the rank
has entered: of ranks that all stand still, those that have entered fewest are the ones the others wait for. This needs
nothing of the training loop and holds for gloo and NCCL, whose own timeout would abort the process namelessly.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

import finetune.errors
from finetune.engine.guardian import Guardian
from finetune.engine.roll_call import Member, Roll, keeps_store
from finetune.errors import FinetuneError, InterruptedRunError, ResourceError

_INTERVAL_SECONDS = 1.0
_INTERVALS_OF_SILENCE = 4
"""After a broken collective: a heart that misses so many beats has stopped."""
_STOPPED_SHARE, _LATE_SHARE = 0.8, 0.9
"""Shares of the timeout after which a silent and a late rank are named: before the collectives give up namelessly."""
_BYE = "bye"


class Watch:
    """Beats for this rank and watches over the others, from ``start`` to ``close``.

    ``on_lost`` is called in a thread of its own with the error that names the lost rank, and must end the process: the
    main thread may be deep in a collective that can't be interrupted.
    """

    def __init__(
        self, roll: Roll, rank: int, *, timeout_seconds: float, on_lost: Callable[[ResourceError], None]
    ) -> None:
        self._members, self._keeper, self._rank = roll.members, roll.keeper, rank
        # Its own connection: the main thread may hold the other one for long.
        self._store: dist.Store = roll.store.clone()  # type: ignore[attr-defined]
        self._timeout = timeout_seconds
        self._interval = min(_INTERVAL_SECONDS, timeout_seconds / 20)
        self._on_lost = on_lost
        # Where all ranks are siblings one of them kills the one that hangs, see kill_sibling.
        several_hosts = len({member.host for member in roll.members}) > 1
        self._guardian = Guardian(os.getpid(), timeout_seconds * _LATE_SHARE) if several_hosts else None
        self._ended = threading.Event()
        self._explains = False
        """Whether the main thread says by itself who was lost."""
        self._lock, self._losing = threading.Lock(), threading.Lock()
        now = time.monotonic()
        self._answered = now
        self._beats: dict[int, tuple[str, float]] = {member.rank: ("", now) for member in roll.members}
        """Each rank's last beat and when it was first seen."""
        self._entered: dict[int, tuple[int, float]] = {member.rank: (-1, now) for member in roll.members}
        """How many collectives each rank has entered, and since when."""

    def start(self) -> None:
        self._store.set(f"beat/{self._rank}", "0 0")
        for target in (self._beat, self._guard):
            threading.Thread(target=target, name=f"finetune-{target.__name__}", daemon=True).start()

    def close(self) -> None:
        """Leave in peace: nobody misses this rank from now on."""
        self._ended.set()
        if self._guardian is not None:
            self._guardian.close()
        if not self._lock.acquire(timeout=10 * self._interval):
            return  # the other thread waits for a store that doesn't answer
        try:
            self._store.set(f"beat/{self._rank}", _BYE)
            if keeps_store(self._rank):
                # The store ends with this process, and what the others still do with it would fail.
                self._wait_for_farewells(30 * self._interval)
        except (dist.DistError, RuntimeError):
            return  # the keeper of the store has left before: it waits for all, so this one was counted out
        finally:
            self._lock.release()

    def _wait_for_farewells(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            words = self._words()
            left = [
                member.rank in words or self._read_beats([member.rank])[member.rank] == _BYE for member in self._members
            ]
            if all(left):
                return
            time.sleep(0.05)

    # What the two threads do.

    def _beat(self) -> None:
        watched = [member.rank for member in self._members] if self._rank == 0 else [0]
        count = 0
        while not self._ended.wait(self._interval):
            count += 1
            entered = _collectives_entered()
            try:
                with self._lock:
                    if self._ended.is_set():
                        return
                    self._store.set(f"beat/{self._rank}", f"{count} {entered}")
                    beats = self._read_beats(watched)
                    verdict = self._store.get("verdict").decode() if self._store.check(["verdict"]) else None
            except (dist.DistError, RuntimeError):
                self._lose(self._lost_keeper("was lost"))
                return
            self._answered = time.monotonic()
            self._note(beats)
            if verdict is None and (lost := self._judge()):
                ranks, how = lost
                verdict = json.dumps({"ranks": ranks, **describe(self._lost(ranks, how))})
                with self._lock:
                    self._store.set("verdict", verdict)
                if keeps_store(self._rank):
                    time.sleep(3 * self._interval)  # let the others read it before this process ends, and the store
            if verdict is not None:
                word = json.loads(verdict)
                self._lose(rebuild(word), ranks=word["ranks"])
                return

    def _guard(self) -> None:
        """Beat for the guardian; and the store's keeper may be stopped: then a call to it never returns."""
        while not self._ended.wait(self._interval):
            if self._guardian is not None:
                self._guardian.beat()
            if time.monotonic() - self._answered > self._timeout * _STOPPED_SHARE:
                # Even while the main thread explains: it waits for the same store.
                self._explains = False
                error = self._lost_keeper("doesn't answer any more: it hangs or was stopped")
                self._lose(error, ranks=[0] if self._keeper == "rank 0" else [])
                return

    def _lose(self, error: FinetuneError, ranks: Sequence[int] = ()) -> None:
        """End this process with ``error``, and before it ``ranks``, which hang, where they are within reach."""
        if self._ended.is_set() or self._explains or not self._losing.acquire(blocking=False):
            return
        assert isinstance(error, ResourceError)
        for rank in ranks:
            kill_sibling(self._members[rank])
        self._on_lost(error)

    # What they know.

    def _read_beats(self, ranks: Sequence[int]) -> dict[int, str]:
        keys = [f"beat/{rank}" for rank in ranks]
        if not self._store.check(keys):
            return dict.fromkeys(ranks, "")
        return {rank: value.decode() for rank, value in zip(ranks, self._store.multi_get(keys), strict=True)}

    def _note(self, beats: dict[int, str]) -> None:
        now = time.monotonic()
        for rank, beat in beats.items():
            if self._beats[rank][0] != beat:
                self._beats[rank] = (beat, now)
            if beat and beat != _BYE and self._entered[rank][0] != (entered := int(beat.split()[1])):
                self._entered[rank] = (entered, now)

    def _judge(self) -> tuple[list[int], str] | None:
        """The lost ranks, and what shows it."""
        now = time.monotonic()
        here = {rank: seen for rank, (beat, seen) in self._beats.items() if beat != _BYE}
        watched = here if self._rank == 0 else {rank: seen for rank, seen in here.items() if rank == 0}
        limit = self._timeout * _STOPPED_SHARE
        stopped = [rank for rank, seen in watched.items() if rank != self._rank and now - seen > limit]
        if stopped:
            return stopped, f"gave no sign of life for {limit:g} s: it was stopped, or its machine was lost"
        limit = self._timeout * _LATE_SHARE
        if self._rank != 0 or len(here) < len(self._members):
            return None
        if any(now - since < limit for _, since in self._entered.values()):
            return None
        last = max(entered for entered, _ in self._entered.values())
        late = [rank for rank, (entered, _) in self._entered.items() if entered < last]
        if late:
            return late, f"didn't come to where the others have waited for {limit:g} s: it runs, but hangs"
        return None

    def _lost(self, ranks: Sequence[int], how: str) -> ResourceError:
        names = " and ".join(str(self._members[rank]) for rank in sorted(ranks))
        return ResourceError(f"{names} {how}", fix="see its log and its machine; the same command goes on where it was")

    def _lost_keeper(self, how: str) -> ResourceError:
        keeper = str(self._members[0]) if self._keeper == "rank 0" else self._keeper
        return ResourceError(
            f"{keeper}, which keeps the ranks' store, {how}",
            fix="see its log and its machine; the same command goes on where it was",
        )

    # What the main thread asks once something has failed.

    def explain(self, error: BaseException) -> BaseException:
        """What to raise in place of ``error``: the error of the rank that failed first, or who was lost.

        Tells the other ranks of ``error`` where it is this rank's own.
        """
        self._explains = True
        if threading.current_thread() is threading.main_thread():
            # A launcher that has seen the lost rank end tells this one to end, too; it does, in a few seconds.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        broken, interrupted = is_broken_collective(error), isinstance(error, KeyboardInterrupt)
        try:
            if not broken and not interrupted:
                if isinstance(error, Exception):
                    self._leave_word({"error": describe(error, self._members[self._rank])})
                return error
            self._leave_word({"interrupted": interrupted})
            found = self._find_cause(interrupted=interrupted)
        except (dist.DistError, RuntimeError):
            found = self._lost_keeper("was lost")
        if found is not None:
            return found
        if interrupted:
            return error
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return ResourceError(
            f"the connection between the ranks broke, on rank {self._rank}: {first_line}",
            fix="see the ranks' logs and the network; the same command goes on where it was",
        )

    def _leave_word(self, word: dict[str, Any]) -> None:
        with self._lock:
            self._store.set(f"word/{self._rank}", json.dumps(word))

    def _words(self) -> dict[int, dict[str, Any]]:
        present = [member.rank for member in self._members if self._store.check([f"word/{member.rank}"])]
        return {rank: json.loads(self._store.get(f"word/{rank}")) for rank in present}

    def _find_cause(self, *, interrupted: bool) -> FinetuneError | None:
        others = [member.rank for member in self._members if member.rank != self._rank]
        start = time.monotonic()
        first: dict[int, str] = {}
        while True:
            with self._lock:
                words, beats = self._words(), self._read_beats(others)
                verdict = self._store.get("verdict").decode() if self._store.check(["verdict"]) else None
            for _, word in sorted(words.items()):
                if "error" in word:
                    return rebuild(word["error"])
            if verdict is not None:
                return rebuild(json.loads(verdict))
            silent = [rank for rank in others if rank not in words and beats[rank] != _BYE]
            if not silent:
                if not interrupted and any(word["interrupted"] for word in words.values()):
                    return InterruptedRunError("another rank was interrupted", fix="the same command goes on")
                return None
            first = first or beats
            if time.monotonic() - start > _INTERVALS_OF_SILENCE * self._interval:
                dead = [rank for rank in silent if beats[rank] == first[rank]]
                if dead:
                    return self._lost(dead, "was lost: it died, or its machine did")
                if interrupted:
                    return None
                return self._lost(silent, f"didn't come within {self._timeout:g} s: it runs, but hangs or works on")
            time.sleep(self._interval / 10)


def kill_sibling(member: Member) -> None:
    """End a lost rank that the same launcher started here: one that hangs would not end when it is asked to.

    Nothing is done to a process that isn't this one's sibling, which on this machine its rank's is.
    """
    if member.host != socket.gethostname() or member.pid == os.getpid():
        return
    try:
        parent = int(Path(f"/proc/{member.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        if parent == os.getppid():
            os.kill(member.pid, signal.SIGKILL)
    except OSError:
        return  # it is gone, or another's


def _collectives_entered() -> int:
    """How many collectives this rank has entered in the group of all ranks, over its backends."""
    if not dist.is_initialized() or dist.group.WORLD is None:
        return 0
    try:
        backends = {id(found): found for found in map(dist.group.WORLD._get_backend, dist.group.WORLD._device_types)}
        return sum(backend._get_sequence_number_for_group() for backend in backends.values())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0  # the group is being taken down


def is_broken_collective(error: BaseException) -> bool:
    """Whether ``error``, or what it came of, is a collective that failed since another rank did."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and "gloo" in str(seen).lower()):
            return True
        seen = seen.__cause__
    return False


def describe(error: BaseException, member: Member | None = None) -> dict[str, Any]:
    if isinstance(error, FinetuneError):
        return {"kind": type(error).__name__, "what": error.what, "where": error.where, "fix": error.fix}
    what = f"{member} failed: {type(error).__name__}: {error}"
    return {"kind": "ResourceError", "what": what, "where": None, "fix": "a bug of ours: its traceback is in its log"}


def rebuild(described: dict[str, Any]) -> FinetuneError:
    kind: type[FinetuneError] = getattr(finetune.errors, described["kind"])
    return kind(described["what"], where=described["where"], fix=described["fix"])
