"""Fill parameters from safetensors: each process reads only the rows that it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from finetune.errors import CheckpointError


def load_tensors(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a model folder into ``targets`` ({name in the files: tensor to fill}), in their dtype.

    A DTensor gets its own rows only, so no process holds more than its part. Raises CheckpointError for a name or file
    that is missing, or a shape that differs.
    """
    places = tensor_files(folder)
    missing = sorted(set(targets) - set(places))
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise CheckpointError(
            f"the weight files hold no {shown}",
            where=folder,
            fix="the weight files and config.json must belong to one model, stored under transformers' own names",
        )
    with ExitStack() as stack:
        files = {path: _open(path, stack) for path in sorted({places[name] for name in targets})}
        for name, target in targets.items():
            stored = files[places[name]].get_slice(name)
            if list(stored.get_shape()) != list(target.shape):
                raise CheckpointError(
                    f"{name} has shape {list(stored.get_shape())}, the configuration says {list(target.shape)}",
                    where=places[name],
                    fix="the weight files and config.json must belong to one model",
                )
            _fill(target, stored)


def _fill(target: Tensor, stored: Any) -> None:
    if not isinstance(target, DTensor):
        target.copy_(stored[:] if target.ndim else stored[...])
        return
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    if 0 not in shape:
        target.to_local().copy_(stored[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))])


def tensor_files(folder: Path) -> dict[str, Path]:
    """{tensor name: file} of a model folder's safetensors. Raises CheckpointError where one or all are missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as cause:
            raise CheckpointError(
                "the index of the weight files can't be read", where=index, fix="copy it anew"
            ) from cause
        places = {name: folder / file for name, file in weight_map.items()}
    elif (folder / "model.safetensors").is_file():
        path = folder / "model.safetensors"
        with ExitStack() as stack:
            places = dict.fromkeys(_open(path, stack).keys(), path)
    else:
        raise CheckpointError("there are no safetensors", where=folder, fix="give a folder with model.safetensors")
    for path in sorted(set(places.values())):
        if not path.is_file():
            raise CheckpointError("a weight file is missing", where=path, fix="copy it from where the model came from")
    return places


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except Exception as cause:
        raise CheckpointError(f"a weight file can't be read: {cause}", where=path, fix="copy it anew") from cause
