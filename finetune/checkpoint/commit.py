"""Save, find, load and prune sharded checkpoints: each is whole, or it isn't there.

    root/step-00000020/   .metadata, __R_0.distcp (one a rank), model_files/, manifest.json
    root/step-00000030.tmp/    being written; after a crash, left over
    root/latest                the name of the newest committed step, for people and scripts

The commit protocol: a fresh ``step-N.tmp`` → every rank writes its shard and hashes it → all meet → rank 0 writes the
manifest last → everything is flushed → one rename → ``latest`` is moved. Saving a step that is there already moves the
old folder to ``step-N.old`` for the moment between two renames; it is found again if the process dies just then.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from finetune.artifact import FileRecord
from finetune.checkpoint.manifest import (
    CheckpointManifest,
    current_versions,
    record_files,
    verify_checkpoint,
    write_manifest,
)
from finetune.checkpoint.model_files import MODEL_FILES, copy_model_files
from finetune.checkpoint.rendezvous import meet, rank_and_world_size
from finetune.checkpoint.stored import METADATA_NAME, LayoutReader, stored_tensors
from finetune.errors import CheckpointError, FinetuneError, ResourceError
from finetune.files import fsync_path, fsync_tree, replace_folder, require_free_bytes, write_text

LATEST_NAME = "latest"
_STEP = re.compile(r"step-(\d{8,})(\.old)?(\.tmp)?")
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Found:
    path: Path
    step: int
    extra: dict[str, Any]
    world_size: int
    """How many ranks wrote it; any number can load it."""


class Skipped(NamedTuple):
    path: Path
    reason: str


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def save_checkpoint(
    root: Path,
    *,
    step: int,
    state: Mapping[str, torch.Tensor],
    extra: dict[str, Any],
    model_files: Path,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Path:
    """Commit ``state`` as ``root/step-N`` and return that folder. Every rank calls it, with the same names.

    ``state`` maps names to tensors (taken once where all ranks hold them) or DTensors (each rank writes its shard).
    ``extra`` is JSON. The small files of the model folder ``model_files`` (configuration, tokenizer, chat template)
    are copied beside. An older checkpoint of the same step is replaced as a whole.
    Raises, on every rank, ResourceError that names a rank that doesn't come or is lost, or for a full disk.
    """
    rank, world_size = rank_and_world_size()
    final = root / step_name(step)
    temporary = root / f"{final.name}.tmp"

    def prepare() -> None:
        if rank == 0:
            if temporary.exists():
                shutil.rmtree(temporary)
            require_free_bytes(root, sum(value.numel() * value.element_size() for value in state.values()))
            temporary.mkdir(parents=True)

    def write_shard() -> dict[str, Any]:
        _dcp_save(dict(state), temporary)
        own = [path.name for path in temporary.glob(f"__{rank}_*")]
        return {name: asdict(record) for name, record in record_files(temporary, own).items()}

    def commit(shards: Any) -> None:
        files = {name: FileRecord(**record) for shard in shards for name, record in shard.items()}
        copied = copy_model_files(model_files, temporary / MODEL_FILES)
        files |= record_files(temporary, [METADATA_NAME, *(f"{MODEL_FILES}/{name}" for name in copied)])
        write_manifest(temporary, CheckpointManifest(step, world_size, extra, files, current_versions()))
        # The shards and the layout were flushed by their writers, the manifest as it was written.
        fsync_tree(temporary / MODEL_FILES)
        fsync_path(temporary)
        replace_folder(temporary, final)
        write_text(root / LATEST_NAME, final.name + "\n")

    meet(f"start saving step {step}", prepare, timeout_seconds=timeout_seconds)
    try:
        meet(f"commit step {step}", write_shard, decide=commit, timeout_seconds=timeout_seconds)
    except Exception:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _dcp_save(state: dict[str, Any], folder: Path) -> None:
    assert all(isinstance(value, torch.Tensor) for value in state.values()), "the state is flat and holds tensors alone"
    _, world_size = rank_and_world_size()
    # The shards are flushed by the rank that wrote them, so that this holds on a network file system too.
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _dcp_calls("save", folder):
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=world_size == 1)


def load_checkpoint(path: Path, state: Mapping[str, torch.Tensor], *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Fill ``state`` in place from the checkpoint ``path``. Every rank calls it; their number may be another than then.

    ``state`` names the same tensors as the checkpoint, of the same shapes and types; each may be a tensor or a
    DTensor, sharded in any way. Raises CheckpointError, on every rank, that names what is missing, left over or
    different, or the damaged file.
    """

    def check() -> str:
        if rank_and_world_size()[0] == 0:
            verify_checkpoint(path, trust_mtime=True)
        _check_names(path, state)
        return path.name

    def same(names: Any) -> None:
        if len(set(names)) > 1:
            raise CheckpointError(f"the ranks are about to load different checkpoints: {', '.join(names)}", where=path)

    meet("load a checkpoint", check, decide=same, timeout_seconds=timeout_seconds)
    _, world_size = rank_and_world_size()
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _dcp_calls("load", path), torch.no_grad():
        dcp.load(dict(state), storage_reader=LayoutReader(path), planner=planner, no_dist=world_size == 1)


def _check_names(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    stored = stored_tensors(path)
    for what, names in (
        ("lacks", state.keys() - stored.keys()),
        ("holds what the model lacks:", stored.keys() - state),
    ):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise CheckpointError(f"the checkpoint {what} {shown}", where=path, fix="it is of another model")
    for name, value in state.items():
        have, want = (stored[name].shape, stored[name].dtype), (tuple(value.shape), value.dtype)
        if have != want:
            raise CheckpointError(
                f"{name} is {list(have[0])} {have[1]} in the checkpoint, {list(want[0])} {want[1]} in the model",
                where=path,
                fix="it is of another model or precision",
            )


def find_checkpoint(root: Path, *, skipped: list[Skipped] | None = None) -> Found | None:
    """The newest checkpoint below ``root`` that is whole (sizes and hashes checked); None where there is none.

    What is newer but damaged or unfinished is passed over; ``skipped`` gets its path and the reason. One process does
    this alone, without communication; ranks that resume together call ``find_checkpoint_together``.
    """
    skipped = [] if skipped is None else skipped
    for path in _candidates(root):
        if path.suffix == ".tmp":
            skipped.append(Skipped(path, "its saving was interrupted before the commit"))
            continue
        try:
            manifest = verify_checkpoint(path)
        except CheckpointError as error:
            skipped.append(Skipped(path, error.what + (f" ({error.where})" if error.where else "")))
            continue
        return Found(path, manifest.step, manifest.extra, manifest.world_size)
    return None


def find_checkpoint_together(
    root: Path, *, skipped: list[Skipped] | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> Found | None:
    """As ``find_checkpoint``, but called by every rank: rank 0 looks and hashes, all get what it found."""

    def look() -> Any:
        if rank_and_world_size()[0] != 0:
            return None
        passed: list[Skipped] = []
        found = find_checkpoint(root, skipped=passed)
        as_json = None if found is None else {**asdict(found), "path": str(found.path)}
        return {"found": as_json, "skipped": [[str(path), reason] for path, reason in passed]}

    answer = meet("find a checkpoint", look, decide=lambda values: values[0], timeout_seconds=timeout_seconds)
    if skipped is not None:
        skipped.extend(Skipped(Path(path), reason) for path, reason in answer["skipped"])
    found = answer["found"]
    return None if found is None else Found(**{**found, "path": Path(found["path"])})


def prune_checkpoints(root: Path, keep: int) -> list[Path]:
    """Keep the ``keep`` newest whole checkpoints, remove what is older and what crashes left; return what went.

    A damaged checkpoint doesn't count, so it never pushes out a good one; one that is newer than the oldest kept stays
    for inspection. Only rank 0 acts. Files of unchanged size and modification time aren't hashed again.
    """
    assert keep >= 1, "without a checkpoint there is nothing to resume from"
    if rank_and_world_size()[0] != 0:
        return []
    for left_over in root.glob(f".{LATEST_NAME}.tmp*"):
        left_over.unlink(missing_ok=True)
    removed, kept = [], 0
    kept_steps: set[int] = set()
    for path in list(_candidates(root)):
        step = _step_of(path)
        superseded = path.suffix == ".old" and step in kept_steps
        if path.suffix != ".tmp" and kept < keep and not superseded:
            try:
                verify_checkpoint(path, trust_mtime=True)
            except CheckpointError:
                continue
            kept += 1
            kept_steps.add(step)
            continue
        if path.suffix != ".tmp":
            # A removal that is interrupted leaves what is plainly to be removed, not a damaged checkpoint.
            doomed = path.with_name(f"{path.name}.tmp")
            os.rename(path, doomed)
            fsync_path(root)
        else:
            doomed = path
        shutil.rmtree(doomed)
        removed.append(path)
    return removed


def remove_newer_checkpoints(root: Path, *, step: int) -> None:
    """Remove what is newer than ``step``: another count of steps, which the run no longer uses. Only rank 0 acts."""
    if rank_and_world_size()[0] == 0:
        for path in list(_candidates(root)):
            if _step_of(path) > step:
                shutil.rmtree(path)


def _step_of(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _candidates(root: Path) -> Iterator[Path]:
    """Folders of steps, newest first; of one step the unfinished, the committed, the one that was being replaced."""
    order = {".tmp": 0, "": 1, ".old": 2}
    folders = [path for path in root.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    yield from sorted(folders, key=lambda path: (-_step_of(path), order[path.suffix]))


@contextmanager
def _dcp_calls(verb: str, path: Path) -> Iterator[None]:
    """What DCP and the process group raise, as ours; without DCP's warning that there is no process group."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, FinetuneError):
            raise cause from error
        raise ResourceError(
            f"rank {rank} couldn't {verb} the checkpoint: {type(cause).__name__}: {cause}",
            where=path,
            fix="check the disk's free space and rights" if isinstance(cause, OSError) else None,
        ) from error
    except RuntimeError as error:
        raise ResourceError(
            f"the ranks couldn't {verb} the checkpoint together: {str(error).splitlines()[0]}",
            where=path,
            fix="a rank was lost: see the ranks' logs",
        ) from error
