"""What a committed checkpoint says of itself, and the check that it is still so.

``manifest.json`` is written last into ``step-N.tmp``, so a folder without one was never finished. It holds

    format       1
    step         the number of optimizer steps that the state has seen
    world_size   how many ranks wrote it
    versions     {"finetune", "torch", "python"}
    extra        what the training loop needs besides tensors: data position, settings
    files        {relative path: {"size", "sha256", "mtime_ns"}}
    sha256       hash of all the above, so that a damaged manifest is seen too
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import finetune
from finetune.artifact import MANIFEST_NAME, FileRecord
from finetune.errors import CheckpointError
from finetune.files import sha256_file, sha256_json, write_json

FORMAT = 1
_FIX = "remove this checkpoint; an earlier one, or another copy of it, must serve"


@dataclass(frozen=True)
class CheckpointManifest:
    step: int
    world_size: int
    extra: dict[str, Any]
    files: dict[str, FileRecord]
    versions: dict[str, str]


def current_versions() -> dict[str, str]:
    return {
        "finetune": finetune.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def record_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Size, hash and modification time of ``names`` in ``folder``, several files at a time (hashing frees the GIL)."""

    def record(name: str) -> FileRecord:
        stat = (folder / name).stat()
        return FileRecord(size=stat.st_size, sha256=sha256_file(folder / name), mtime_ns=stat.st_mtime_ns)

    names = sorted(names)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(record, names), strict=True))


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    value: dict[str, Any] = {"format": FORMAT, **asdict(manifest)}
    write_json(folder / MANIFEST_NAME, {**value, "sha256": sha256_json(json.loads(json.dumps(value)))})


def read_manifest(folder: Path) -> CheckpointManifest:
    """Raises CheckpointError when there is none, or it isn't what was written."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise CheckpointError("the checkpoint has no manifest: its saving was not finished", where=path, fix=_FIX)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value.pop("sha256") != sha256_json(value):
            raise CheckpointError("the manifest's content differs from its hash", where=path, fix=_FIX)
        if value.pop("format") != FORMAT:
            raise CheckpointError("the manifest is of a format that this version can't read", where=path, fix=_FIX)
        value["files"] = {name: FileRecord(**record) for name, record in value["files"].items()}
        return CheckpointManifest(**value)
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise CheckpointError("the manifest can't be read", where=path, fix=_FIX) from cause


def verify_checkpoint(folder: Path, *, trust_mtime: bool = False) -> CheckpointManifest:
    """The manifest of ``folder``, after a check that each file is there, as long as it says and with its sha256.

    With ``trust_mtime`` a file of the recorded size and modification time isn't hashed again. Raises CheckpointError
    that names the first file that is missing or differs.
    """
    manifest = read_manifest(folder)
    to_hash = []
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError("a file of the checkpoint is missing", where=path, fix=_FIX)
        stat = path.stat()
        if stat.st_size != expected.size:
            raise CheckpointError(
                f"a file of the checkpoint has {stat.st_size} bytes, its manifest says {expected.size}",
                where=path,
                fix=_FIX,
            )
        if not (trust_mtime and stat.st_mtime_ns == expected.mtime_ns):
            to_hash.append(name)
    for name, found in record_files(folder, to_hash).items():
        if found.sha256 != manifest.files[name].sha256:
            raise CheckpointError(
                "a file's content differs from the sha256 in its manifest", where=folder / name, fix=_FIX
            )
    return manifest
