"""What is in a folder's safetensors files, read from their headers, and whether they are whole and fit together."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from finetune.errors import CheckpointError
from finetune.export.gguf_weights import check_gguf_finite, gguf_tensors
from finetune.model.gguf import GGUF_NAME, is_gguf_folder

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
REMAKE = "run the stage that made this folder again, or copy the file again"

FLOAT_DTYPES = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}


@dataclass(frozen=True)
class TensorHeader:
    dtype: str
    """As safetensors spells it: F32, BF16, I32, I8, …; or a GGUF block type: Q4_0, …"""
    shape: tuple[int, ...]
    file: str


def read_weights(folder: Path) -> dict[str, TensorHeader]:
    """{tensor name: header} of all weight files that transformers would load.

    Raises CheckpointError naming the file and the fault: none there, a shard missing, a header that can't be read, a
    file shorter or longer than its header says, a tensor in two shards, an index that disagrees with the shards.
    """
    if is_gguf_folder(folder):
        found = gguf_tensors(folder).items()
        return {name: TensorHeader(dtype=kind, shape=shape, file=GGUF_NAME) for name, (kind, shape) in found}
    index_path = folder / INDEX_NAME
    if not index_path.is_file():
        if not (folder / SINGLE_NAME).is_file():
            shards = sorted(path.name for path in folder.glob("*.safetensors"))
            what = f"{shards[0]} is there without its index" if shards else "there is no weight file"
            raise CheckpointError(what, where=folder, fix=f"the folder needs {SINGLE_NAME}, or shards and {INDEX_NAME}")
        return read_header(folder / SINGLE_NAME)
    if (folder / SINGLE_NAME).is_file():
        raise CheckpointError(
            f"{SINGLE_NAME} stands beside {INDEX_NAME}; transformers would ignore the shards",
            where=folder,
            fix="delete the one that is left over",
        )
    weight_map = _read_index(index_path)
    tensors: dict[str, TensorHeader] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise CheckpointError("a shard is missing", where=folder / shard, fix=REMAKE)
        for name, header in read_header(folder / shard).items():
            if name in tensors:
                raise CheckpointError(
                    f"the tensor {name} is in {tensors[name].file} too", where=folder / shard, fix=REMAKE
                )
            if weight_map.get(name) != shard:
                place = f"in {weight_map[name]}" if name in weight_map else "nowhere"
                raise CheckpointError(
                    f"the tensor {name} is in {shard}, the index has it {place}", where=index_path, fix=REMAKE
                )
            tensors[name] = header
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise CheckpointError(
            f"the tensor {missing[0]} is in the index but not in the shard",
            where=folder / weight_map[missing[0]],
            fix=REMAKE,
        )
    stray = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in set(weight_map.values()))
    if stray:
        raise CheckpointError("a weight file isn't in the index", where=folder / stray[0], fix="delete it")
    return tensors


def weight_files(folder: Path) -> list[str]:
    """Names of the index, where there is one, and of the weight files. Checks them as ``read_weights`` does."""
    files = sorted({header.file for header in read_weights(folder).values()})
    return [INDEX_NAME, *files] if (folder / INDEX_NAME).is_file() else files


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not weight_map or not all(isinstance(file, str) and "/" not in file for file in weight_map.values()):
            raise ValueError("its weight_map is empty or names no plain file")
        return dict(weight_map)
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise CheckpointError(f"the index can't be read: {cause}", where=path, fix=REMAKE) from cause


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file. Raises CheckpointError when it is cut short, too long or not one at all."""
    size = path.stat().st_size
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"it is cut short: {size} bytes don't hold its header")
            raw: dict[str, Any] = json.loads(stream.read(length))
        metadata = raw.pop("__metadata__", {})
        end = max((entry["data_offsets"][1] for entry in raw.values()), default=0)
        if 8 + length + end != size:
            word = "cut short" if size < 8 + length + end else "too long"
            raise ValueError(f"it is {word}: {size} bytes, its header says {8 + length + end}")
        if metadata.get("format", "pt") != "pt":
            raise ValueError(f"its format is {metadata['format']}, not pt")
        headers = {
            name: TensorHeader(dtype=entry["dtype"], shape=tuple(entry["shape"]), file=path.name)
            for name, entry in raw.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as cause:
        raise CheckpointError(f"the weight file can't be read: {cause}", where=path, fix=REMAKE) from cause
    empty = [name for name, header in headers.items() if 0 in header.shape]
    if empty:
        raise CheckpointError(f"the tensor {empty[0]} has no elements", where=path, fix=REMAKE)
    return headers


def check_finite(folder: Path, tensors: dict[str, TensorHeader]) -> None:
    """Raise CheckpointError naming the first float tensor that holds NaN or infinity. One is in memory at a time."""
    if is_gguf_folder(folder):
        check_gguf_finite(folder)
        return
    for file in sorted({header.file for header in tensors.values()}):
        with safe_open(folder / file, framework="pt") as opened:
            for name, header in tensors.items():
                if header.file != file or header.dtype not in FLOAT_DTYPES:
                    continue
                tensor = opened.get_tensor(name)
                if header.dtype.startswith("F8"):
                    tensor = tensor.float()
                # A float64 sum is finite only when every term is, and takes no array of flags.
                if not torch.isfinite(tensor.sum(dtype=torch.float64)):
                    raise CheckpointError(f"the tensor {name} holds NaN or infinity", where=folder / file, fix=REMAKE)


def tensors_equal(folder: Path, tensors: dict[str, TensorHeader], first: str, second: str) -> bool:
    loaded = []
    for name in (first, second):
        with safe_open(folder / tensors[name].file, framework="pt") as opened:
            loaded.append(opened.get_tensor(name))
    return torch.equal(loaded[0], loaded[1])
