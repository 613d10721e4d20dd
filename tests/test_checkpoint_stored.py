"""The layout file lets no code in, and the proof that a tensor is covered exactly once finds every hole and overlap."""

from __future__ import annotations

import itertools
import math
import pickle
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune.checkpoint.bands import read_tensor
from finetune.checkpoint.commit import (
    Skipped,
    find_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from finetune.checkpoint.manifest import verify_checkpoint
from finetune.checkpoint.stored import Piece, coverage_fault, read_metadata, stored_tensors
from finetune.errors import CheckpointError
from tests.checkpoint_ranks import example_tensors

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


@pytest.fixture
def model_files(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "verification.json").write_text("{}")
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path, model_files: Path) -> Path:
    return save(tmp_path / "run", 10, model_files)


def save(root: Path, step: int, model_files: Path) -> Path:
    state = example_tensors(seed=step)
    return save_checkpoint(root, step=step, state=state, extra={"step": step}, model_files=model_files)


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_tensor_is_read_back(checkpoint: Path) -> None:
    stored = stored_tensors(checkpoint)
    for name, tensor in example_tensors(seed=10).items():
        assert torch.equal(read_tensor(stored[name]), tensor)
        assert stored[name].dtype == tensor.dtype


def test_a_layout_file_with_code_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "was here",)

    for payload in (Evil(), {"a": Evil()}, print, torch.nn.Linear(1, 1)):
        (checkpoint / ".metadata").write_bytes(pickle.dumps(payload))
        with pytest.raises(CheckpointError, match="no place there") as caught:
            read_metadata(checkpoint)
        assert caught.value.where == str(checkpoint / ".metadata")
    assert not (tmp_path / "was here").exists()


def test_a_shard_with_code_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "was here",)

    stored = stored_tensors(checkpoint)["model.even.weight"]
    piece = stored.pieces[0]
    assert isinstance(piece, Piece)
    torch.save(Evil(), tmp_path / "evil")
    content = bytearray(piece.path.read_bytes())
    evil = (tmp_path / "evil").read_bytes()
    content[piece.start_bytes : piece.start_bytes + len(evil)] = evil
    piece.path.write_bytes(content)
    object.__setattr__(piece, "length_bytes", len(evil))
    with pytest.raises(CheckpointError, match="names getattr, which has no place there"):
        read_tensor(stored)
    assert not (tmp_path / "was here").exists()


def test_an_object_that_is_no_tensor_is_refused(checkpoint: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings(action="ignore"):
        dcp.save({"a": "text"}, checkpoint_id=checkpoint, no_dist=True)
    with pytest.raises(CheckpointError, match="isn't a tensor"):
        stored_tensors(checkpoint)


def test_a_truncated_layout_file_is_refused(checkpoint: Path) -> None:
    path = checkpoint / ".metadata"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="refused"):
        read_metadata(checkpoint)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "manifest.json", "model_files/config.json"])
@pytest.mark.parametrize("damage", ["deleted", "flipped", "shortened"])
def test_every_damaged_file_is_named(checkpoint: Path, name: str, damage: str) -> None:
    path = checkpoint / name
    if damage == "deleted":
        path.unlink()
    elif damage == "flipped":
        flip_byte(path)
    else:
        path.write_bytes(path.read_bytes()[:-2])
    for trust_mtime in (False, True):
        with pytest.raises(CheckpointError) as caught:
            verify_checkpoint(checkpoint, trust_mtime=trust_mtime)
        assert caught.value.where == str(path)


def test_a_flipped_byte_is_found_under_the_old_modification_time(checkpoint: Path) -> None:
    import os

    path = checkpoint / "__0_0.distcp"
    stat = path.stat()
    flip_byte(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    verify_checkpoint(checkpoint, trust_mtime=True)
    with pytest.raises(CheckpointError, match="sha256"):
        verify_checkpoint(checkpoint)


def test_only_the_small_files_of_the_model_are_copied(checkpoint: Path) -> None:
    names = sorted(path.name for path in (checkpoint / "model_files").iterdir())
    assert names == ["chat_template.jinja", "config.json"]


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path, model_files: Path) -> None:
    root = tmp_path / "run"
    for step in (5, 10, 20, 30):
        save(root, step, model_files)
    flip_byte(root / "step-00000030/__0_0.distcp")
    (root / "step-00000020/manifest.json").unlink()
    (root / "step-00000040.tmp").mkdir()
    (root / "step-notes").mkdir()
    skipped: list[Skipped] = []
    found = find_checkpoint(root, skipped=skipped)
    assert found is not None
    assert (found.path, found.step, found.extra) == (root / "step-00000010", 10, {"step": 10})
    assert [path.name for path, _ in skipped] == ["step-00000040.tmp", "step-00000030", "step-00000020"]
    for (_, reason), words in zip(skipped, ["interrupted", "__0_0.distcp", "not finished"], strict=True):
        assert words in reason


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "absent") is None


def test_pruning_counts_whole_checkpoints_alone(tmp_path: Path, model_files: Path) -> None:
    root = tmp_path / "run"
    for step in (5, 10, 20, 30):
        save(root, step, model_files)
    flip_byte(root / "step-00000030/__0_0.distcp")
    (root / "step-00000040.tmp").mkdir()
    shutil.copytree(root / "step-00000020", root / "step-00000020.old")
    removed = prune_checkpoints(root, keep=2)
    assert sorted(path.name for path in removed) == ["step-00000005", "step-00000020.old", "step-00000040.tmp"]
    left = sorted(path.name for path in root.glob("step-*"))
    assert left == ["step-00000010", "step-00000020", "step-00000030"]
    found = find_checkpoint(root)
    assert found is not None
    assert found.step == 20


def test_a_state_of_another_model_is_refused(checkpoint: Path) -> None:
    def changed(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
        state = {**example_tensors(), **changes}
        return {name: tensor for name, tensor in state.items() if tensor is not None}

    for state, words in (
        (changed(**{"model.more": torch.zeros(2)}), "lacks model.more"),
        (changed(**{"model.vector": None}), "holds what the model lacks: model.vector"),
        (changed(**{"model.vector": torch.zeros(63)}), r"model.vector is \[64\]"),
        (changed(**{"model.vector": torch.zeros(64).bfloat16()}), "torch.float32 in the checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(checkpoint, state)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], Boxes]:
    """A shape of up to three dimensions, cut by a grid."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    cuts = []
    for size in shape:
        inner = draw(st.sets(st.integers(1, size), max_size=2)) - {size}
        edges = [0, *sorted(inner), size]
        cuts.append([(start, end - start) for start, end in itertools.pairwise(edges)])
    boxes: Boxes = [((), ())]
    for spans in cuts:
        boxes = [((*o, start), (*s, size)) for o, s in boxes for start, size in spans]
    return shape, boxes


def count_covers(shape: tuple[int, ...], boxes: Boxes) -> np.ndarray:
    counts = np.zeros(shape, dtype=int)
    for offsets, sizes in boxes:
        counts[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    return counts


@given(partitions())
def test_a_partition_is_accepted(case: tuple[tuple[int, ...], Boxes]) -> None:
    shape, boxes = case
    assert coverage_fault(shape, boxes) is None


@given(partitions(), st.data())
def test_a_hole_or_an_overlap_is_found(case: tuple[tuple[int, ...], Boxes], data: st.DataObject) -> None:
    shape, boxes = case
    first, second = (data.draw(st.integers(0, len(boxes) - 1)) for _ in range(2))
    changed = list(boxes)
    # One box takes another's place (or is simply there twice, when the two are one).
    changed[first] = boxes[second] if first != second else boxes[first]
    if first == second:
        changed.append(boxes[first])
    assert (count_covers(shape, changed) != 1).any()
    assert coverage_fault(shape, changed) is not None


def test_faults_are_described() -> None:
    assert coverage_fault((4,), [((0,), (3,))]) == "1 of 4 elements are missing"
    assert "outside" in str(coverage_fault((4,), [((0,), (5,))]))
    assert "outside" in str(coverage_fault((4,), [((-1,), (4,))]))
    assert "dimensions" in str(coverage_fault((4, 1), [((0,), (4,))]))
    assert "[0] and [2] overlap" in str(coverage_fault((4,), [((0,), (3,)), ((2,), (1,))]))
    assert coverage_fault((), [((), ())]) is None
    assert coverage_fault((), []) == "1 of 1 elements are missing"
    assert "overlap" in str(coverage_fault((), [((), ()), ((), ())]))
    assert math.prod(()) == 1
