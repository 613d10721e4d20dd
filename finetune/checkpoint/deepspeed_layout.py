"""Where a DeepSpeed checkpoint keeps each tensor. DeepSpeed itself isn't needed, and nothing of its files is run.

    latest                                      the name of the folder, such as global_step100
    global_step100/
      mp_rank_00_model_states.pt                stages 0-2: buffers, half-precision weights, names and shapes
      zero_pp_rank_R_mp_rank_00_model_states.pt stage 3: the same of rank R, its weights empty
      [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   the float32 masters (and the moments) of rank R

The masters are flat vectors. Stages 1 and 2: one a parameter group, cut in as many parts as there are ranks, whose
last lacks or holds a few elements of padding; the parameters follow each other in the order of ``param_shapes``, each
with ``param_alignment_paddings`` behind it. Stage 3: each parameter is cut in as many equal parts as there are ranks,
the last padded, and a rank's vectors hold its parts of all parameters one after the other. Frozen parameters have no
masters: they lie in ``module`` (stages 0-2) or, cut likewise, in ``frozen_param_fragments`` (stage 3).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint.stored import StoredTensor, coverage_fault
from finetune.checkpoint.torch_file import FIX, Extent, Inert, TorchFile
from finetune.errors import CheckpointError

INERT = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""All that DeepSpeed 0.19.8 name in these files."""

_RANK = re.compile(r"(?:[a-z]+\d*_)?zero_pp_rank_(\d+)_mp_rank_00_(optim|model)_states\.pt")
_MODEL_STATES = "mp_rank_00_model_states.pt"


@dataclasses.dataclass(frozen=True)
class DeepSpeedModel:
    """The model's tensors in a DeepSpeed checkpoint, by the names that the training script's model gave them."""

    parameters: dict[str, StoredTensor]
    buffers: dict[str, StoredTensor]
    stage: int
    step: int | None
    nameless_masters: bool
    """Stage 0 with half-precision weights: its float32 masters carry no names, so only the rounded weights serve."""


def find_deepspeed_folder(folder: Path) -> Path | None:
    """``folder`` or the one that its ``latest`` names, if that holds DeepSpeed's files."""
    latest = folder / "latest"
    if latest.is_file() and not _is_deepspeed(folder):
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
        if not tag or Path(tag).name != tag:
            return None
        if not (folder / tag).is_dir() and tag.startswith("global_step"):
            raise CheckpointError(f"`latest` names {tag}, which isn't there", where=latest, fix=FIX)
        folder = folder / tag
    return folder if _is_deepspeed(folder) else None


def _is_deepspeed(folder: Path) -> bool:
    return any(folder.glob("*_model_states.pt")) or any(folder.glob("*_optim_states.pt"))


def read_deepspeed(folder: Path) -> DeepSpeedModel:
    """The layout of ``folder`` (a ``global_stepN``); raises CheckpointError that names the file at fault."""
    _refuse_other_parallelism(folder)
    ranked: dict[str, dict[int, Path]] = {"optim": {}, "model": {}}
    for path in sorted(folder.iterdir()):
        match = _RANK.fullmatch(path.name)
        if match:
            other = ranked[match[2]].setdefault(int(match[1]), path)
            if other != path:
                raise CheckpointError(f"two files are of one rank: {other.name} too", where=path, fix=FIX)
    first = folder / _MODEL_STATES
    if not first.is_file():
        first = ranked["model"].get(0, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    states = _open(first)
    world_size = states.content.get("dp_world_size")
    if not isinstance(states.content.get("module"), dict) or not isinstance(world_size, int):
        raise CheckpointError("the file isn't DeepSpeed's model states", where=first, fix=FIX)
    sharded = _Sharded(folder, states, world_size)
    if states.content.get("param_shapes") is None:
        return sharded.read_stage_0()
    optimizers = [_open(path) for path in _every_rank(folder, ranked["optim"], world_size, "optim")]
    stage = _stage(optimizers[0])
    if stage in (1, 2):
        return sharded.read_stage_1_or_2(optimizers, stage)
    if stage == 3:
        others = _every_rank(folder, ranked["model"], world_size, "model")[1:]
        return sharded.read_stage_3(optimizers, [states, *(_open(path) for path in others)])
    raise CheckpointError(f"the file is of the unknown ZeRO stage {stage}", where=optimizers[0].path, fix=FIX)


def _refuse_other_parallelism(folder: Path) -> None:
    for pattern, what in (
        ("*mp_rank_01_*", "tensor or pipeline parallelism"),
        ("layer_*-model_*states.pt", "pipeline parallelism"),
        ("*expert_*", "mixture-of-experts parallelism"),
    ):
        found = sorted(folder.glob(pattern))
        if found:
            raise CheckpointError(
                f"a DeepSpeed checkpoint with {what} can't be read",
                where=found[0],
                fix="convert it with DeepSpeed's ds_to_universal.py, or save it without",
            )


def _open(path: Path) -> TorchFile:
    opened = TorchFile(path, inert=INERT)
    if not isinstance(opened.content, dict):
        raise CheckpointError("the file isn't DeepSpeed's", where=path, fix=FIX)
    return opened


def _every_rank(folder: Path, found: dict[int, Path], world_size: int, kind: str) -> list[Path]:
    for rank in range(world_size):
        if rank not in found:
            like = next(iter(found.values())).name if found else f"zero_pp_rank_0_mp_rank_00_{kind}_states.pt"
            name = re.sub(r"pp_rank_\d+_", f"pp_rank_{rank}_", like)
            raise CheckpointError(f"the file of rank {rank} of {world_size} is missing", where=folder / name, fix=FIX)
    for rank, path in found.items():
        if rank >= world_size:
            raise CheckpointError(
                f"a file of rank {rank} lies in a checkpoint of {world_size} ranks", where=path, fix="remove it"
            )
    return [found[rank] for rank in range(world_size)]


def _optimizer(opened: TorchFile) -> dict[str, Any]:
    value = opened.content.get("optimizer_state_dict")
    if not isinstance(value, dict):
        raise CheckpointError("the file isn't DeepSpeed's optimizer states", where=opened.path, fix=FIX)
    return value


def _stage(opened: TorchFile) -> int:
    stage = _optimizer(opened).get("zero_stage")
    return int(stage.arguments[0]) if isinstance(stage, Inert) else int(stage or 0)


class _Vector:
    """Consecutive parts of one long vector, in one or more files."""

    def __init__(self, parts: Sequence[tuple[TorchFile, Any]]) -> None:
        self._parts: list[tuple[Extent, int]] = []
        self.dtype = torch.float32
        self.num_elements = 0
        for opened, part in parts:
            if not isinstance(part, torch.Tensor) or part.dim() != 1:
                raise CheckpointError("a part of the weights isn't a flat tensor", where=opened.path, fix=FIX)
            self.dtype = part.dtype
            if part.numel():
                self._parts.append((opened.extent(part), part.element_size()))
                self.num_elements += part.numel()

    def take(self, start: int, count: int, *, to: int = 0) -> list[Extent]:
        """The elements from ``start`` on, as the boxes at ``to`` of a flat tensor; fewer where the vector ends."""
        taken = []
        begin = 0
        for extent, item_bytes in self._parts:
            size = extent.sizes[0]
            first, last = max(start, begin), min(start + count, begin + size)
            if first < last:
                taken.append(
                    dataclasses.replace(
                        extent,
                        start_bytes=extent.start_bytes + (first - begin) * item_bytes,
                        offsets=(to + first - start,),
                        sizes=(last - first,),
                    )
                )
            begin += size
        return taken


class _Sharded:
    def __init__(self, folder: Path, states: TorchFile, world_size: int) -> None:
        self.folder = folder
        self.states = states
        self.world_size = world_size
        self.parameters: dict[str, StoredTensor] = {}

    def read_stage_0(self) -> DeepSpeedModel:
        optimizer = self.states.content.get("optimizer")
        nameless = isinstance(optimizer, dict) and any(key.startswith("fp32_groups") for key in optimizer)
        return self._finish(stage=0, nameless_masters=nameless)

    def read_stage_1_or_2(self, optimizers: list[TorchFile], stage: int) -> DeepSpeedModel:
        paddings = _optimizer(optimizers[0]).get("param_alignment_paddings")
        for index, shapes in enumerate(self._param_shapes()):
            parts = []
            for opened in optimizers:
                self._check_count(opened)
                groups = _optimizer(opened).get("single_partition_of_fp32_groups")
                parts.append((opened, _item(opened, groups, index)))
            vector = _Vector(parts)
            behind = _item(optimizers[0], paddings, index) if paddings else [0] * len(shapes)
            if len(behind) != len(shapes):
                raise CheckpointError(
                    f"group {index} is of {len(behind)} parameters here, of {len(shapes)} in {self.states.path.name}",
                    where=optimizers[0].path,
                    fix=FIX,
                )
            position = 0
            for (name, shape), padding in zip(shapes.items(), behind, strict=True):
                self._add(name, shape, vector.dtype, vector.take(position, math.prod(shape)), optimizers[-1])
                position += math.prod(shape) + padding
            # Each part is a multiple of two elements, so that many may be left; DeepSpeed strips most of them.
            self._check_total(position, vector.num_elements, 2 * self.world_size, optimizers[-1])
        return self._finish(stage=stage)

    def read_stage_3(self, optimizers: list[TorchFile], states: list[TorchFile]) -> DeepSpeedModel:
        vectors = []
        for opened in optimizers:
            self._check_count(opened)
            groups = _optimizer(opened).get("fp32_flat_groups")
            if not isinstance(groups, list | tuple):
                raise CheckpointError("the file lacks its float32 weights", where=opened.path, fix=FIX)
            vectors.append(_Vector([(opened, group) for group in groups]))
        position = 0
        for shapes in self._param_shapes():
            for name, shape in shapes.items():
                position += self._join(name, shape, vectors, position, optimizers)
        for opened, vector in zip(optimizers, vectors, strict=True):
            self._check_total(position, vector.num_elements, 1, opened)
        for name, shape in (self.states.content.get("frozen_param_shapes") or {}).items():
            fragments = []
            for opened in states:
                fragment = (opened.content.get("frozen_param_fragments") or {}).get(name)
                fragments.append(_Vector([(opened, fragment)]))
            self._join(name, tuple(shape), fragments, 0, states)
        return self._finish(stage=3)

    def _join(
        self, name: str, shape: tuple[int, ...], vectors: list[_Vector], position: int, files: list[TorchFile]
    ) -> int:
        """Add a parameter that is cut in equal parts at ``position`` of each rank's vector; return a part's size."""
        total = math.prod(shape)
        part = -(-total // self.world_size)
        boxes = []
        for rank, vector in enumerate(vectors):
            wanted = min(part, total - rank * part)
            boxes += vector.take(position, max(0, wanted), to=rank * part)
            if position + part > vector.num_elements:
                raise CheckpointError(f"the file ends before its part of {name}", where=files[rank].path, fix=FIX)
        self._add(name, shape, vectors[0].dtype, boxes, files[-1])
        return part

    def _param_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        shapes = self.states.content["param_shapes"]
        if not isinstance(shapes, list) or not all(isinstance(group, dict) for group in shapes):
            raise CheckpointError("the file's `param_shapes` isn't a list of shapes", where=self.states.path, fix=FIX)
        return [{name: tuple(shape) for name, shape in group.items()} for group in shapes]

    def _check_count(self, opened: TorchFile) -> None:
        counts = _optimizer(opened).get("partition_count")
        for count in counts if isinstance(counts, list) else [counts]:
            if count != self.world_size:
                raise CheckpointError(
                    f"the file is one of {count} parts, the checkpoint is of {self.world_size} ranks",
                    where=opened.path,
                    fix=FIX,
                )

    def _check_total(self, used: int, have: int, slack: int, opened: TorchFile) -> None:
        if not used <= have < used + slack:
            raise CheckpointError(
                f"the parts hold {have:,} elements, the parameters' shapes add up to {used:,}",
                where=opened.path,
                fix=FIX,
            )

    def _add(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, boxes: list[Extent], opened: TorchFile
    ) -> None:
        fault = coverage_fault((math.prod(shape),), [(box.offsets, box.sizes) for box in boxes])
        if fault:
            raise CheckpointError(f"the parts of {name} don't make it up: {fault}", where=opened.path, fix=FIX)
        self.parameters[name] = StoredTensor(name, shape, dtype, tuple(boxes), flat=True)

    def _finish(self, *, stage: int, nameless_masters: bool = False) -> DeepSpeedModel:
        """Add what lies in ``module`` alone, and the second names of shared parameters."""
        content = self.states.content
        buffer_names = set(content.get("buffer_names") or ())
        buffers: dict[str, StoredTensor] = {}
        for name, tensor in content["module"].items():
            # Stage 3 leaves empty tensors here in the place of its parameters.
            if not isinstance(tensor, torch.Tensor) or not tensor.numel() or name in self.parameters:
                continue
            stored = StoredTensor(name, tuple(tensor.shape), tensor.dtype, (self.states.extent(tensor),))
            (buffers if name in buffer_names else self.parameters)[name] = stored
        for alias, name in (content.get("shared_params") or {}).items():
            if name in self.parameters:
                self.parameters[alias] = dataclasses.replace(self.parameters[name], name=alias)
        step = content.get("global_steps")
        return DeepSpeedModel(
            self.parameters, buffers, stage, step if isinstance(step, int) else None, nameless_masters
        )


def _item(opened: TorchFile, groups: Any, index: int) -> Any:
    if not isinstance(groups, list | tuple) or index >= len(groups):
        raise CheckpointError(f"the file lacks the weights of parameter group {index}", where=opened.path, fix=FIX)
    return groups[index]
