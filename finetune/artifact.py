"""Artifact: a stage's folder with a manifest that says what it is, from what it was made, and what is in it.

``manifest.json`` is written last, so a folder without one is unfinished work. It holds

    format   1
    kind     the stage's kind, for example ``sft``
    name     the stage's name in its recipe
    fingerprint  hash of everything that decides the result: settings, seed, parents' fingerprints, data files
    recipe_sha256  hash of the resolved recipe that made it
    parents  {stage name: fingerprint}
    files    {relative path: {"size", "sha256", "mtime_ns"}}
    seconds, metrics, versions, settings
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError
from finetune.files import sha256_file, write_json

BEFORE_NAME = "started-before.json"
"""In a stage's folder while accepted changes aren't taken yet: what it was begun with before them."""
MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1
RECORD_NAME = "finetune.json"
"""Size and sha256 of each file of a model folder that stands by itself, and the verb that wrote it."""
RECORD_FORMAT = 1


@dataclass(frozen=True)
class FileRecord:
    size: int
    sha256: str
    mtime_ns: int


@dataclass(frozen=True)
class Manifest:
    kind: str
    name: str
    fingerprint: str
    recipe_sha256: str
    parents: dict[str, str]
    files: dict[str, FileRecord]
    seconds: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def record_files(folder: Path, *, exclude: tuple[str, ...] = (MANIFEST_NAME,)) -> dict[str, FileRecord]:
    """Hash every file below ``folder``; keys are POSIX paths relative to it."""
    records = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name in exclude:
            continue
        stat = path.stat()
        records[name] = FileRecord(size=stat.st_size, sha256=sha256_file(path), mtime_ns=stat.st_mtime_ns)
    return records


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / MANIFEST_NAME, {"format": MANIFEST_FORMAT, **asdict(manifest)})


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest; None where there is none yet. Raises CheckpointError when it can't be read."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.pop("format") != MANIFEST_FORMAT:
            raise ValueError("unknown format")
        raw["files"] = {name: FileRecord(**record) for name, record in raw["files"].items()}
        return Manifest(**raw)
    except (ValueError, KeyError, TypeError) as cause:
        raise CheckpointError(
            "the manifest can't be read", where=path, fix="remove this folder and run the stage again"
        ) from cause


def write_record(folder: Path, *, made_by: str, version: str, exclude: tuple[str, ...] = ()) -> None:
    """Write ``finetune.json`` over every file of ``folder`` but ``exclude``; ``made_by`` is the verb."""
    records = record_files(folder, exclude=(RECORD_NAME, MANIFEST_NAME, *exclude))
    files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in records.items()}
    record = {"format": RECORD_FORMAT, "finetune_version": version, "made_by": made_by, "files": files}
    write_json(folder / RECORD_NAME, record)


def record_made_by(folder: Path) -> str | None:
    """The verb that wrote the folder's ``finetune.json``; None where there is none that can be read."""
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record.get("made_by", "export") if isinstance(record, dict) else None


def check_files(folder: Path, files: dict[str, FileRecord], *, trust_mtime: bool = True) -> None:
    """Raise CheckpointError naming the first file that is missing or isn't what the manifest says.

    With ``trust_mtime`` a file of the recorded size and modification time isn't hashed again (as git's index does):
    a second run over tens of gigabytes then costs milliseconds. ``finetune verify`` hashes everything.
    """
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError("a file is missing", where=path, fix="run the stage again")
        stat = path.stat()
        if stat.st_size != record.size:
            raise CheckpointError(
                f"a file has {stat.st_size} bytes, its manifest says {record.size}",
                where=path,
                fix="run the stage again",
            )
        if trust_mtime and stat.st_mtime_ns == record.mtime_ns:
            continue
        if sha256_file(path) != record.sha256:
            raise CheckpointError("a file's content differs from its manifest", where=path, fix="run the stage again")
