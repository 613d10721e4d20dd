"""Files that are either whole or absent: atomic writes, published folders, hashes, free space."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune.errors import ResourceError


def fsync_path(path: Path) -> None:
    """Flush a file or a folder entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    for entry in sorted(folder.rglob("*")):
        fsync_path(entry)
    fsync_path(folder)


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, flush it, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        write(temporary)
        fsync_path(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def write_text(path: Path, text: str) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_file(path, write)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=False, ensure_ascii=False) + "\n")


@contextmanager
def published_folder(path: Path) -> Iterator[Path]:
    """Yield an empty ``path.tmp`` to fill; on success flush it and rename it to ``path``, replacing what was there.

    On an error the temporary folder is left out of the way (removed) and whatever stood at ``path`` stays as it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        fsync_tree(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    replace_folder(temporary, path)


def replace_folder(source: Path, path: Path) -> None:
    """Rename folder ``source`` to ``path``; an older ``path`` is moved aside first and removed last."""
    old = path.with_name(path.name + ".old")
    if path.exists():
        if old.exists():
            shutil.rmtree(old)
        os.rename(path, old)
    os.rename(source, path)
    fsync_path(path.parent)
    if old.exists():
        shutil.rmtree(old)


def sha256_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """The hash of a JSON value, independent of key order and spacing."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def require_folder(folder: Path, *, where: str) -> None:
    """Raise ResourceError where ``folder``, which is made, can't be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as cause:
        raise ResourceError(
            f"`{folder}` can't be written to: {cause.strerror}", where=where, fix="name a folder on a local disk"
        ) from cause


def require_free_bytes(folder: Path, needed_bytes: int) -> None:
    """Raise ResourceError when the disk that holds ``folder`` has less than ``needed_bytes`` left."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise ResourceError(
            f"{needed_bytes / 2**20:,.0f} MiB of disk are needed, {free_bytes / 2**20:,.0f} MiB are free",
            where=folder,
            fix="free some disk, or write to another disk",
        )
