"""A sharded checkpoint to a plain Hugging Face model, in memory that depends on neither its size nor its files'.

    layout ─► plan (each element covered exactly once) ─► read, cast, hash, write by bands ─► index ─► reopen, compare
       └───► hash every file of the checkpoint, meanwhile ─────────────────────────────────────────────┘

Nothing is published unless every file of the checkpoint is what its manifest says (a checkpoint of another tool: what
was read is as its crc32 say) and the result is what its configuration asks for.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tqdm import tqdm

from finetune.checkpoint.model_files import copy_model_files
from finetune.checkpoint.plan import OutputTensor, file_names, plan_model, require_dtype, split_files
from finetune.checkpoint.safetensors_stream import DTYPE_NAMES, FileWriter
from finetune.checkpoint.sources import Source, open_source
from finetune.errors import CheckpointError, FinetuneError, RecipeError, did_you_mean
from finetune.files import published_folder, require_free_bytes, write_json

INDEX_NAME = "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_SHARD_SIZE_BYTES = 5 * 10**9


def consolidate(
    checkpoint: Path,
    *,
    out: Path,
    dtype: str = "bfloat16",
    max_shard_size_bytes: int = DEFAULT_SHARD_SIZE_BYTES,
    model: Path | None = None,
) -> dict[str, Any]:
    """Write the model of ``checkpoint`` to the folder ``out``, replacing it as a whole.

    ``checkpoint`` is a ``step-N`` folder, a DeepSpeed checkpoint (ZeRO 0 to 3) or a DCP folder of another tool; for the
    last two ``model`` is the folder with the configuration and the tokenizer (default: the checkpoint's own, or the one
    above it). Floating-point parameters are cast to ``dtype``; buffers stay bit-identical. A tied parameter is written
    once. Returns {"kind", "step", "dtype", "num_tensors", "num_parameters", "bytes", "num_shards", "files":
    {name: sha256}, "seconds"}. Raises CheckpointError that names the file or the tensor when the checkpoint is damaged,
    its pickles name anything but tensors, or it isn't the model of its configuration; RecipeError for an unknown
    ``dtype``; ResourceError when the disk is too full.
    """
    started = time.perf_counter()
    if dtype not in DTYPES:
        raise RecipeError(f"a model can't be saved as `{dtype}`", fix=did_you_mean(dtype, DTYPES))
    source = open_source(checkpoint, model=model)
    with ThreadPoolExecutor(1) as beside:
        verified = beside.submit(source.verify)
        try:
            outputs, aliases = plan_model(source, dtype=DTYPES[dtype])
            require_dtype(source, DTYPES[dtype])
            require_free_bytes(out.parent, sum(output.num_bytes for output in outputs))
            with published_folder(out) as folder:
                copy_model_files(source.model_folder, folder)
                _set_config_dtype(folder / "config.json", dtype)
                files = write_tensors(source, outputs, folder, max_shard_size_bytes=max_shard_size_bytes)
                check_written(folder, outputs, aliases)
                verified.result()
        except FinetuneError:
            # A damaged file is the cause of whatever else is wrong.
            verified.result()
            raise
    return {
        "kind": source.kind,
        "step": source.step,
        "dtype": dtype,
        "num_tensors": len(outputs),
        "num_parameters": sum(output.stored.num_elements for output in outputs if output.dtype.is_floating_point),
        "bytes": sum(output.num_bytes for output in outputs),
        "num_shards": len(files),
        "files": files,
        "seconds": time.perf_counter() - started,
    }


def write_tensors(
    source: Source, outputs: Sequence[OutputTensor], folder: Path, *, max_shard_size_bytes: int
) -> dict[str, str]:
    """Write ``outputs`` as safetensors to ``folder``, the index last; return {file name: sha256}."""
    groups = split_files(outputs, max_shard_size_bytes)
    names = file_names(len(groups))
    total_bytes = sum(output.num_bytes for output in outputs)
    with tqdm(total=total_bytes, desc="consolidate", unit="B", unit_scale=True, disable=None) as bar:
        progress: Callable[[int], object] = bar.update
        writer = FileWriter(check_crc32=not source.has_hashes, progress=progress)
        hashes = writer.write({folder / name: group for name, group in zip(names, groups, strict=True)})
    if len(groups) > 1:
        weight_map = {output.name: name for name, group in zip(names, groups, strict=True) for output in group}
        write_json(folder / INDEX_NAME, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    return {path.name: sha256 for path, sha256 in hashes.items()}


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
                shape, dtype = part.get_shape(), _TYPES.get(part.get_dtype())
                if (shape, dtype) != expected[name] or math.prod(shape) == 0:
                    raise CheckpointError(f"{name} was written as {shape} {dtype}", where=path)
    missing = expected.keys() - written.keys()
    if missing:
        raise CheckpointError(f"{sorted(missing)[0]} wasn't written", where=folder)


_TYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


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
