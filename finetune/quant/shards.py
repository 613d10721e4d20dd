"""Join tensors of several safetensors files into the shards of a model folder, byte by byte, none held in memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.files import write_file, write_json
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.source import INDEX_NAME, SINGLE_NAME

_COPY_BYTES = 2**24
_WIDTH = {"64": 8, "32": 4, "16": 2}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place: ``num_bytes`` at ``offset`` of ``file``."""

    name: str
    dtype: str
    """As safetensors writes it: F32, BF16, I8, …"""
    shape: list[int]
    file: Path
    offset: int
    num_bytes: int

    def renamed(self, name: str) -> StoredTensor:
        return replace(self, name=name)


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """Where each tensor of a safetensors file lies."""
    with file.open("rb") as stream:
        (header_size,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(header_size))
    header.pop("__metadata__", None)
    base = 8 + header_size
    return {
        name: StoredTensor(
            name=name,
            dtype=entry["dtype"],
            shape=entry["shape"],
            file=file,
            offset=base + entry["data_offsets"][0],
            num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }


def write_shards(tensors: Sequence[StoredTensor], folder: Path, *, max_shard_size_bytes: int) -> int:
    """Write ``tensors``, in this order, to model.safetensors or to shards with an index; returns their bytes.

    A shard holds at most ``max_shard_size_bytes`` of tensors, or a single larger one.
    """
    shards: list[list[StoredTensor]] = [[]]
    for tensor in tensors:
        filled = sum(other.num_bytes for other in shards[-1])
        if shards[-1] and filled + tensor.num_bytes > max_shard_size_bytes:
            shards.append([])
        shards[-1].append(tensor)
    total = sum(tensor.num_bytes for tensor in tensors)
    if len(shards) == 1:
        _write_shard(shards[0], folder / SINGLE_NAME)
        return total
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(shard, folder / name)
        weight_map.update({tensor.name: name for tensor in shard})
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return total


def _write_shard(tensors: Sequence[StoredTensor], path: Path) -> None:
    # Wide types first, so that each tensor starts at a multiple of its element's size.
    ordered = sorted(tensors, key=lambda tensor: (-_WIDTH.get(tensor.dtype[-2:], 1), tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in ordered:
        span = [offset, offset + tensor.num_bytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": span}
        offset += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for tensor in ordered:
                with tensor.file.open("rb") as stream:
                    stream.seek(tensor.offset)
                    left = tensor.num_bytes
                    while left:
                        piece = stream.read(min(left, _COPY_BYTES))
                        assert piece, f"{tensor.file} ends inside {tensor.name}"
                        out.write(piece)
                        left -= len(piece)

    write_file(path, write)


def write_model_config(decoder: StreamedDecoder, folder: Path, *, quantization_config: dict[str, Any]) -> None:
    """The source's config.json, with how its layers are quantized."""
    config = json.loads((decoder.folder / "config.json").read_text(encoding="utf-8"))
    if "dtype" not in config and "torch_dtype" not in config:
        config["dtype"] = str(decoder.dtype).removeprefix("torch.")
    write_json(folder / "config.json", {**config, "quantization_config": quantization_config})
