"""Best-fit-decreasing packing of rows into sequences of one length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


def pack_rows(lengths: Sequence[int] | np.ndarray, max_seq_length: int) -> list[list[int]]:
    """Group row indices so that each group's lengths add up to at most ``max_seq_length``.

    Longest rows first, each into the fullest pack that still holds it (best fit decreasing, Johnson 1973); equally long
    rows in the order given, so the number of packs depends on the lengths alone and not on their order.
    ``lengths`` is (N,); each must be within ``max_seq_length``.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    assert sizes.size == 0 or int(sizes.max()) <= max_seq_length, "a row is longer than a pack"
    packs: list[list[int]] = []
    # Packs by the room they have left, and those rooms in order: at most max_seq_length of them, however many packs.
    packs_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for row in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[row])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            room, pack = max_seq_length, len(packs)
            packs.append([row])
        else:
            room = rooms[at]
            pack = packs_by_room[room].pop()
            packs[pack].append(row)
            if not packs_by_room[room]:
                del packs_by_room[room], rooms[at]
        left = room - size
        if left:
            if left not in packs_by_room:
                packs_by_room[left] = []
                insort(rooms, left)
            packs_by_room[left].append(pack)
    return packs
