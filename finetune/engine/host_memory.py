"""Keep the host's heap from filling up with holes where a rank shards on the cpu."""

from __future__ import annotations

import ctypes
import os
import sys

M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # malloc.h
LARGE_BYTES, KEPT_BYTES = 4 << 20, 1 << 30


def give_back_large_memory(large_bytes: int = LARGE_BYTES) -> None:
    """Let blocks from ``large_bytes`` on be pages of their own, which return to the system when they are freed.

    glibc moves its own threshold up to 32 MiB as such blocks are freed. FSDP2's gathered weights and reduced gradients
    then lie in one heap with the activations and are freed in another order: it grows, more with each micro-batch, and
    nobody can say how far. 2 ranks of a 70M model under stage 3 grow by 1,378 to 1,431 MiB, so by 1,076, of which 921
    are ever in use at once. The price is fresh pages at each use: 9.9 s of processor time against 9.0 for three steps
    of 2 x 256 tokens with loading and saving; forward and backward alone are more than a quarter longer there.
    (python bench/memory.py --ranks 2 --stages 3 --offloads none, and with --plain-heap.) A threshold that the user has
    set, MALLOC_MMAP_THRESHOLD_, stays; where the C library isn't glibc nothing is done.
    """
    _set(M_MMAP_THRESHOLD, large_bytes)


def keep_large_memory() -> None:
    """Let blocks below KEPT_BYTES be taken from the heap and go back to it; ``give_back_freed_memory`` empties it.

    Pages of its own are fresh at each use: quantizing a 135M model on two cores spent 90 of 227 processor seconds on
    them, with this 13 of 144 (147 and 95 s of wall time). As ``give_back_large_memory`` where it does nothing.
    """
    _set(M_MMAP_THRESHOLD, KEPT_BYTES)
    _set(M_TRIM_THRESHOLD, KEPT_BYTES)


def _set(parameter: int, value: int) -> None:
    if not sys.platform.startswith("linux") or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)


def give_back_freed_memory() -> None:
    """Return what is free in the heap to the system, also from between blocks that are in use.

    Streaming a model block by block frees as much as it takes, but in another order: by gptq a Llama 512 wide peaked at
    187 MB above the imports with 12 blocks, at 518 MB with 48, though tensors were 6 MiB between blocks; with this
    after each block at 228 and 253 MB. Where the C library isn't glibc nothing is done.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if malloc_trim is not None:
        malloc_trim(0)
