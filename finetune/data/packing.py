"""Best-fit-decreasing packing of rows into sequences of one length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


def pack_rows(lengths: Sequence[int] | np.ndarray, max_seq_length: int) -> list[list[int]]:
    """Group row indices so that each group's lengths add up to at most ``max_seq_length``. See ``pack_flat``."""
    rows, bounds = pack_flat(lengths, max_seq_length)
    return [pack.tolist() for pack in np.split(rows, bounds[1:-1])] if len(rows) else []


def pack_flat(lengths: Sequence[int] | np.ndarray, max_seq_length: int) -> tuple[np.ndarray, np.ndarray]:
    """(row indices int64 (N,), pack after pack; bounds int64 (P + 1,): pack p is ``rows[bounds[p]:bounds[p + 1]]``).

    Longest rows first, each into the fullest pack that still holds it (best fit decreasing, Johnson 1973); equally long
    rows in the order given, so the number of packs depends on the lengths alone and not on their order.
    ``lengths`` is (N,); each must be within ``max_seq_length``.

    Rows of one length are placed together: the fullest pack that takes one of length s takes as many as its room holds,
    since it stays the fullest. So the work grows with the number of lengths, not of rows: a million rows take 0.1 s.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    assert sizes.size == 0 or (int(sizes.max()) <= max_seq_length and int(sizes.min()) > 0), "a row must fit a pack"
    longest_first = np.argsort(-sizes, kind="stable")
    values, counts = np.unique(sizes, return_counts=True)
    pack_of = np.empty(sizes.size, dtype=np.int64)
    # Packs by the room they have left, as stacks of runs of them, and those rooms in order.
    packs_by_room: dict[int, list[np.ndarray]] = {}
    rooms: list[int] = []
    num_packs = done = 0

    def keep(packs: np.ndarray, room: int) -> None:
        if not room or not packs.size:
            return
        if room not in packs_by_room:
            packs_by_room[room] = []
            insort(rooms, room)
        packs_by_room[room].append(packs)

    for size, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left:
            at = bisect_left(rooms, size)
            if at == len(rooms):
                room = max_seq_length
                packs = np.arange(num_packs, num_packs - (-left // (room // size)))
                num_packs += packs.size
            else:
                room = rooms[at]
                packs = packs_by_room[room].pop()
                if not packs_by_room[room]:
                    del packs_by_room[room], rooms[at]
            each = room // size
            filled, rest = min(packs.size, left // each), 0
            if filled < packs.size:
                rest = min(left - filled * each, each - 1)
            placed = filled * each
            pack_of[done : done + placed] = np.repeat(packs[:filled], each)
            keep(packs[:filled], room - each * size)
            if rest:
                pack_of[done + placed : done + placed + rest] = packs[filled]
                keep(packs[filled : filled + 1], room - rest * size)
            keep(packs[filled + bool(rest) :], room)
            done += placed + rest
            left -= placed + rest
    # Stable: inside a pack the longest row stays first.
    rows = longest_first[np.argsort(pack_of, kind="stable")]
    bounds = np.zeros(num_packs + 1, dtype=np.int64)
    np.cumsum(np.bincount(pack_of, minlength=num_packs), out=bounds[1:])
    return rows, bounds
