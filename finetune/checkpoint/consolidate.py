"""A sharded checkpoint to a plain Hugging Face model, one output file at a time.

    .metadata ─► plan (each element covered exactly once) ─► read, cast, write one file ─► … ─► index ─► reopen, compare

Peak memory is one output file and the largest piece of a tensor, whatever the model's size. Nothing is published
unless every file of the checkpoint is what its manifest says and the result is what its configuration asks for.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from finetune.checkpoint.manifest import verify_checkpoint
from finetune.checkpoint.model_files import MODEL_FILES, copy_model_files
from finetune.checkpoint.stored import StoredTensor, box_of, read_piece, read_tensor, stored_tensors
from finetune.errors import CheckpointError, RecipeError, did_you_mean
from finetune.files import published_folder, require_free_bytes, sha256_file, write_file, write_json
from finetune.model.load import meta_model
from finetune.model.tied import tied_parameter_names

INDEX_NAME = "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_SHARD_SIZE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the result: from where, as what, and which stored copies of it must be equal to it."""

    name: str
    stored: StoredTensor
    dtype: torch.dtype
    copies: tuple[StoredTensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.stored.num_elements * self.dtype.itemsize


def consolidate(
    checkpoint: Path,
    *,
    out: Path,
    dtype: str = "bfloat16",
    max_shard_size_bytes: int = DEFAULT_SHARD_SIZE_BYTES,
) -> dict[str, Any]:
    """Write the model of ``checkpoint`` (a ``step-N`` folder) to the folder ``out``, replacing it as a whole.

    Floating-point parameters are cast to ``dtype``; buffers stay bit-identical. A tied parameter is written once.
    Returns {"step", "dtype", "num_tensors", "num_parameters", "bytes", "num_shards", "files": {name: sha256},
    "seconds"}. Raises CheckpointError that names the file or the tensor when the checkpoint is damaged or isn't the
    model of its own configuration, RecipeError for an unknown ``dtype``, ResourceError when the disk is too full.
    """
    started = time.perf_counter()
    if dtype not in DTYPES:
        raise RecipeError(f"a model can't be saved as `{dtype}`", fix=did_you_mean(dtype, DTYPES))
    _require_step_folder(checkpoint)
    manifest = verify_checkpoint(checkpoint)
    outputs, aliases = plan_model(checkpoint, dtype=DTYPES[dtype])
    total_bytes = sum(output.num_bytes for output in outputs)
    require_free_bytes(out.parent, total_bytes)
    with published_folder(out) as folder:
        copy_model_files(checkpoint / MODEL_FILES, folder)
        _set_config_dtype(folder / "config.json", dtype)
        files = write_tensors(checkpoint, outputs, folder, max_shard_size_bytes=max_shard_size_bytes)
        check_written(folder, outputs, aliases)
    return {
        "step": manifest.step,
        "dtype": dtype,
        "num_tensors": len(outputs),
        "num_parameters": sum(output.stored.num_elements for output in outputs if output.dtype.is_floating_point),
        "bytes": total_bytes,
        "num_shards": len(files),
        "files": files,
        "seconds": time.perf_counter() - started,
    }


def _require_step_folder(checkpoint: Path) -> None:
    if not checkpoint.is_dir():
        raise CheckpointError("there is no such checkpoint", where=checkpoint, fix="give the path of a step-N folder")
    steps = sorted(path.name for path in checkpoint.glob("step-*"))
    if steps:
        raise CheckpointError(
            "this folder holds checkpoints, it isn't one", where=checkpoint, fix=f"give one of: {', '.join(steps)}"
        )


def plan_model(checkpoint: Path, *, dtype: torch.dtype) -> tuple[list[OutputTensor], dict[str, str]]:
    """Match what is stored with what the model of ``model_files/`` expects: (outputs in the model's order, aliases).

    Raises CheckpointError for a tensor that is missing, left over or of another shape.
    """
    stored = stored_tensors(checkpoint)
    # Only names and shapes matter here, and eager is what every model has.
    model = meta_model(checkpoint / MODEL_FILES, attn_implementation="eager")
    aliases = tied_parameter_names(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    expected = model.state_dict(keep_vars=True)
    outputs: list[OutputTensor] = []
    used: set[str] = set()
    for name, tensor in expected.items():
        if name in aliases:
            continue
        prefix = "model" if name in parameters else "buffer"
        names = [name, *(alias for alias, canonical in aliases.items() if canonical == name)]
        sources = [stored[f"{prefix}.{known}"] for known in names if f"{prefix}.{known}" in stored]
        used.update(source.name for source in sources)
        if not sources:
            raise CheckpointError(f"the checkpoint lacks {prefix}.{name}", where=checkpoint, fix=_OTHER_MODEL)
        for source in sources:
            if source.shape != tuple(tensor.shape):
                raise CheckpointError(
                    f"{source.name} is {list(source.shape)} in the checkpoint, {list(tensor.shape)} by its config.json",
                    where=checkpoint,
                    fix=_OTHER_MODEL,
                )
        first = sources[0]
        cast = prefix == "model" and first.dtype.is_floating_point
        outputs.append(OutputTensor(name, first, dtype if cast else first.dtype, tuple(sources[1:])))
    # Buffers that the model computes from its configuration have no place in the weight files.
    used.update(f"buffer.{name}" for name in buffers if name not in expected)
    for name in stored:
        if name.startswith(("model.", "buffer.")) and name not in used:
            raise CheckpointError(f"the checkpoint holds {name}", where=checkpoint, fix=_OTHER_MODEL)
    return outputs, aliases


_OTHER_MODEL = "its model_files/config.json is of another model"


def split_files(outputs: Sequence[OutputTensor], max_shard_size_bytes: int) -> list[list[OutputTensor]]:
    """Consecutive tensors in files of at most ``max_shard_size_bytes``; a larger tensor gets a file of its own."""
    groups: list[list[OutputTensor]] = []
    room = 0
    for output in outputs:
        if not groups or output.num_bytes > room:
            groups.append([])
            room = max_shard_size_bytes
        groups[-1].append(output)
        room -= output.num_bytes
    return groups


def write_tensors(
    checkpoint: Path, outputs: Sequence[OutputTensor], folder: Path, *, max_shard_size_bytes: int
) -> dict[str, str]:
    """Write ``outputs`` as safetensors to ``folder``, the index last; return {file name: sha256}."""
    groups = split_files(outputs, max_shard_size_bytes)
    hashes: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    with tqdm(total=len(outputs), desc="consolidate", unit="tensor", disable=None) as progress:
        for number, group in enumerate(groups, start=1):
            name = "model.safetensors"
            if len(groups) > 1:
                name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            tensors = {}
            for output in group:
                tensors[output.name] = _read_output(checkpoint, output)
                progress.update()
            write_file(folder / name, lambda path, ready=tensors: save_file(ready, path, metadata={"format": "pt"}))  # type: ignore[misc]
            hashes[name] = sha256_file(folder / name)
            weight_map.update(dict.fromkeys(tensors, name))
            # Before the next file's tensors are read, or two files' worth would be held.
            tensors.clear()
    if len(groups) > 1:
        total_size = sum(output.num_bytes for output in outputs)
        write_json(folder / INDEX_NAME, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
    return hashes


def _read_output(checkpoint: Path, output: OutputTensor) -> torch.Tensor:
    if output.copies:
        # Compared as stored, not as cast: masters that differ by less than the cast show that they aren't tied.
        whole = read_tensor(checkpoint, output.stored)
        for copy in output.copies:
            for piece in copy.pieces:
                if not torch.equal(read_piece(checkpoint, copy, piece), box_of(whole, piece)):
                    raise CheckpointError(
                        f"{copy.name} and {output.stored.name} are tied in config.json but differ",
                        where=checkpoint,
                        fix="set tie_word_embeddings to false, or train them tied",
                    )
        return whole.to(output.dtype)
    return read_tensor(checkpoint, output.stored, dtype=output.dtype)


def check_written(folder: Path, outputs: Sequence[OutputTensor], aliases: dict[str, str]) -> None:
    """Reopen the weight files of ``folder``: every expected name once, of its shape and type, and nothing else.

    ``aliases`` are the tied names that must not appear. Raises CheckpointError.
    """
    expected = {output.name: (list(output.stored.shape), output.dtype) for output in outputs}
    written: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            if (opened.metadata() or {}).get("format") != "pt":
                raise CheckpointError("the written file has no format", where=path)
            for name in opened.keys():  # noqa: SIM118 - a safe_open isn't a dict
                if name in written or name not in expected or name in aliases:
                    raise CheckpointError(f"the written file holds {name}, which has no place there", where=path)
                written[name] = path
                part = opened.get_slice(name)
                shape, dtype = part.get_shape(), _SAFETENSORS_DTYPES.get(part.get_dtype())
                if (shape, dtype) != expected[name] or math.prod(shape) == 0:
                    raise CheckpointError(f"{name} was written as {shape} {dtype}", where=path)
    missing = expected.keys() - written.keys()
    if missing:
        raise CheckpointError(f"{sorted(missing)[0]} wasn't written", where=folder)


_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _set_config_dtype(path: Path, dtype: str) -> None:
    """State the saved precision, in nested configurations too; older files call it ``torch_dtype``."""
    config = json.loads(path.read_text(encoding="utf-8"))

    def update(section: dict[str, Any], *, always: bool) -> None:
        stated = section.pop("torch_dtype", None) is not None or "dtype" in section
        if always or stated:
            section["dtype"] = dtype
        for value in section.values():
            if isinstance(value, dict):
                update(value, always=False)

    update(config, always=True)
    write_json(path, config)
