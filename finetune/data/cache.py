"""Prepared rows on disk, kept under the hash of all that decides them: made once, then opened by every run and rank.

    <cache>/tokens/<key>/rows.arrow    the rows, see ``stored.py``
    <cache>/tokens/<key>/entry.json    what they were made from and by, their counts, size and hash, and its own hash
    <cache>/tokens/<key>.lock          held by the process that makes or checks the entry
    <cache>/files/<path's hash>.json   the hash of a data file, by its size and time

<cache> is ``FINETUNE_CACHE``, or ``~/.cache/finetune``. All of it may be deleted at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from finetune.data.encoding import Encoding
from finetune.data.settings import DatasetSettings
from finetune.data.stored import RowWriter, StoredRows
from finetune.files import published_folder, require_folder, sha256_file, sha256_json, write_json

CACHE_VARIABLE = "FINETUNE_CACHE"
ROWS_NAME, ENTRY_NAME = "rows.arrow", "entry.json"
_READS_NO_ROWS = frozenset(
    {"cache.py", "holdout.py", "loader.py", "order.py", "packing.py"}
    | {"batch.py", "prompts.py", "streaming.py", "text.py"}
)
"""Files of this package that don't decide what a row becomes."""
_PACKAGES = ("transformers", "tokenizers", "jinja2", "datasets")
_NOT_DECIDING = {"path", "weight"}
"""Keys of a source that don't change its rows; its files count by their content, wherever they lie."""
_YOUNG_NS = 2_000_000_000
"""A file that was written so lately might be written again within its clock's tick: its hash isn't kept."""
_POLL_SECONDS = 0.2


def cache_folder() -> Path:
    """``FINETUNE_CACHE``, else ``finetune`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "finetune"


class DamagedEntryError(Exception):
    """An entry isn't as it was written."""


def open_or_build(
    identity: dict[str, Any],
    files: Sequence[str],
    build: Callable[[RowWriter], dict[str, int]],
    *,
    say: Callable[[str], None],
) -> tuple[Path, StoredRows, dict[str, int]]:
    """(entry's folder, rows, counts) of what ``identity`` describes, made by ``build`` where they aren't there yet.

    ``build`` fills a writer and returns the counts. One process builds while others wait for it; what it leaves is
    whole or absent. An entry that is damaged is told to ``say`` and made again. Raises ResourceError where the
    cache's folder can't be written to, and what ``build`` raises.
    """
    root = cache_folder()
    require_folder(root / "tokens", where=f"the token cache ({CACHE_VARIABLE})")
    folder = root / "tokens" / sha256_json(identity)[:32]
    with _held(folder.with_name(folder.name + ".lock"), say=say):
        if folder.exists():
            try:
                return folder, *open_entry(folder, files, verify=True)
            except DamagedEntryError as damage:
                say(f"the prepared rows in {folder} are damaged ({damage}): they are prepared again")
                shutil.rmtree(folder)
        with published_folder(folder) as temporary:
            writer = RowWriter(temporary / ROWS_NAME, files)
            started = time.perf_counter()
            counts = build(writer)
            writer.close()
            seconds = time.perf_counter() - started
            path = temporary / ROWS_NAME
            entry = {
                "counts": counts,
                "seconds": seconds,
                "num_rows": writer.num_rows,
                "largest_token": writer.largest_token,
                "digest": writer.digest,
                "size_bytes": path.stat().st_size,
                "xxh3": _checksum(path),
                "identity": identity,
            }
            entry = json.loads(json.dumps(entry))  # as it will be read
            write_json(temporary / ENTRY_NAME, {**entry, "sha256": sha256_json(entry)})
        return folder, *open_entry(folder, files)


def open_entry(folder: Path, files: Sequence[str], *, verify: bool = False) -> tuple[StoredRows, dict[str, int]]:
    """(rows, counts) of an entry; ``verify`` reads all of it to compare its hash, else its size alone is."""
    path = folder / ROWS_NAME
    try:
        entry = json.loads((folder / ENTRY_NAME).read_text(encoding="utf-8"))
        if sha256_json({key: value for key, value in entry.items() if key != "sha256"}) != entry["sha256"]:
            raise DamagedEntryError(f"{ENTRY_NAME} isn't what was written")
        size = path.stat().st_size
        if size != entry["size_bytes"]:
            raise DamagedEntryError(f"{ROWS_NAME} has {size} bytes of {entry['size_bytes']}")
        if verify and _checksum(path) != entry["xxh3"]:
            raise DamagedEntryError(f"{ROWS_NAME} isn't what was written")
        rows = StoredRows(path, files=files, digest=entry["digest"], largest_token=entry["largest_token"])
        if len(rows) != entry["num_rows"]:
            raise DamagedEntryError(f"{ROWS_NAME} holds {len(rows)} rows of {entry['num_rows']}")
        return rows, entry["counts"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as cause:
        raise DamagedEntryError(f"{type(cause).__name__}: {cause}") from cause


def _checksum(path: Path) -> str:
    """Against damage, not against malice: ten times as fast as sha256, so a hit waits for the disk alone."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while part := stream.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


@contextmanager
def _held(path: Path, *, say: Callable[[str], None]) -> Iterator[None]:
    """Hold ``path`` for this process alone, however long another one has it. The kernel lets go of a dead one's."""
    with path.open("a+") as stream:
        told = False
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    say("another process prepares the same rows: waiting for it")
                    told = True
                time.sleep(_POLL_SECONDS)
        yield


# What decides the rows.


def identity_of(sources: Sequence[DatasetSettings], tokenizer: Any, encoding: Encoding) -> dict[str, Any]:
    """All that decides the rows of ``sources``, as plain values: two that are equal mean equal rows."""
    return {
        "sources": [_source_identity(source) for source in sources],
        "tokenizer": tokenizer_identity(tokenizer),
        "encoding": encoding.described(),
        "code": _code_identity(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def stream_identity(sources: Sequence[DatasetSettings], tokenizer: Any, encoding: Encoding) -> dict[str, Any]:
    """What can be said without reading the files: two that are equal should mean equal rows."""
    shown = []
    for source in sources:
        paths = [Path(name) for name in source.data_files()]
        sizes = [[path.name, path.stat().st_size if path.is_file() else 0] for path in paths]
        options = {key: value for key, value in source.resolved().items() if key not in _NOT_DECIDING}
        shown.append({**options, "files": sizes, **({} if sizes else {"path": source.path})})
    return {"sources": shown, "tokenizer": tokenizer_identity(tokenizer), "encoding": encoding.described()}


def _source_identity(source: DatasetSettings) -> dict[str, Any]:
    options = {key: value for key, value in source.resolved().items() if key not in _NOT_DECIDING}
    files = [{"suffixes": Path(name).suffixes, "sha256": _file_hash(Path(name))} for name in source.data_files()]
    if files:
        return {**options, "files": files}
    from finetune.data.hub import split_fingerprint

    path = str(source.path)
    assert source.split is not None
    fingerprint = split_fingerprint(path, split=source.split, name=source.name, revision=source.revision)
    return {**options, "path": path, "fingerprint": fingerprint}


def _file_hash(path: Path) -> str:
    """The file's sha256; "" where there is none, which reading it will say. Kept by path, size and time."""
    if not path.is_file():
        return ""
    stat, resolved = path.stat(), str(path.resolve())
    note = cache_folder() / "files" / (hashlib.sha256(resolved.encode()).hexdigest()[:32] + ".json")
    stamp = {"path": resolved, "size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if {key: known[key] for key in stamp} == stamp:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not hashed yet, or a note that was cut short: only slower
    digest = sha256_file(path)
    if time.time_ns() - stat.st_mtime_ns > _YOUNG_NS:
        require_folder(note.parent, where=f"the token cache ({CACHE_VARIABLE})")
        write_json(note, {**stamp, "sha256": digest})
    return digest


def tokenizer_identity(tokenizer: Any) -> dict[str, Any]:
    """What a tokenizer makes of texts and conversations: its vocabulary and rules, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = backend.to_str()
        # Before its added tokens stand its truncation and padding, which each call sets anew.
        rules = rules[max(0, rules.find('"added_tokens"')) :]
    else:
        rules = json.dumps(sorted(tokenizer.get_vocab().items()))
    added = {str(token_id): repr(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
    return {
        "class": type(tokenizer).__name__,
        "rules": hashlib.sha256(rules.encode("utf-8", "surrogatepass")).hexdigest(),
        "added_tokens": sha256_json(added),
        "ids": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id],
        "special_tokens": sha256_json(tokenizer.special_tokens_map),  # a template may write any of them
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        "chat_template": sha256_json(tokenizer.chat_template),
    }


@cache
def _code_identity() -> str:
    """The hash of the code that reads and encodes rows: no version to forget to raise."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name not in _READS_NO_ROWS:
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
