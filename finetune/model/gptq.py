"""The GPTQ format of AutoGPTQ and GPTQModel: how a layer lies in its tensors, and its weights in floats.

For a Linear of O outputs and I inputs in G groups: ``qweight`` int32 (I * bits / 32, O) holds codes 0 .. 2**bits - 1
packed down the columns, ``qzeros`` int32 (G, O * bits / 32) zero points packed along the rows, ``scales`` float16
(G, O), ``g_idx`` int32 (I) each input's group. weight = (code - zero) * scale. ``checkpoint_format: gptq`` stores
zero - 1, and ``gptq_v2`` zero itself. Transformers needs the package gptqmodel to load it; this needs no kernel.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from finetune.errors import CheckpointError
from finetune.model.packed import num_words, pack_words, unpack_words

PARTS = ("qweight", "qzeros", "scales", "g_idx")
FIX = "fetch or make the model again"


@dataclass(frozen=True)
class GptqArgs:
    """What a ``quantization_config`` says of one layer."""

    num_bits: int
    group_size: int | None
    """None: one group."""
    zero_offset: int
    """What is added to a stored zero point."""

    def num_groups(self, in_features: int) -> int:
        return 1 if self.group_size is None else -(-in_features // self.group_size)


def gptq_args(quantization: Mapping[str, Any], layer: str, *, where: Path) -> GptqArgs | None:
    """The arguments of the layer of this full name; None where ``dynamic`` leaves it in floats.

    The first pattern of ``dynamic`` that matches from the name's start on decides: after ``-:`` the layer isn't
    quantized, after ``+:`` (or nothing) the entry's values replace the common ones. Raises CheckpointError at ``where``
    for a configuration that isn't one of the GPTQ format.
    """
    values = dict(quantization)
    try:
        for pattern, changes in (quantization.get("dynamic") or {}).items():
            if re.match(pattern.removeprefix("-:").removeprefix("+:"), layer):
                if pattern.startswith("-:"):
                    return None
                values |= changes
                break
        num_bits, group_size = values["bits"], values.get("group_size", 128)
        if num_bits not in (2, 3, 4, 8):
            raise ValueError(f"weights of {num_bits} bits")
        group_size = None if group_size in (-1, None) else int(group_size)
        offset = {"gptq": 1, "gptq_v2": 0}[values.get("checkpoint_format") or "gptq"]
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as cause:
        raise CheckpointError(
            f"quantization_config can't be read: {type(cause).__name__}: {cause}", where=where, fix=FIX
        ) from cause
    return GptqArgs(num_bits, group_size, zero_offset=offset)


def expected_shapes(shapes: Mapping[str, tuple[int, ...]], args: GptqArgs) -> dict[str, tuple[int, ...]]:
    """What ``args`` ask for, of a layer whose inputs ``g_idx`` counts and whose outputs ``qweight`` does."""
    num_inputs, num_outputs = shapes["g_idx"][0], shapes["qweight"][1]
    num_groups = args.num_groups(num_inputs)
    return {
        "qweight": (num_words(num_inputs, args.num_bits), num_outputs),
        "qzeros": (num_groups, num_words(num_outputs, args.num_bits)),
        "scales": (num_groups, num_outputs),
    }


def pack_layer(codes_OI: Tensor, zeros_OG: Tensor, scale_OG: Tensor, args: GptqArgs) -> dict[str, Tensor]:
    """The tensors of a layer whose groups are neighbouring inputs; codes and zeros are whole numbers from 0 on."""
    num_inputs = codes_OI.shape[1]
    group_size = args.group_size or num_inputs
    return {
        "qweight": pack_words(codes_OI, args.num_bits).T.contiguous(),
        "qzeros": pack_words((zeros_OG.T - args.zero_offset) & (2**args.num_bits - 1), args.num_bits),
        "scales": scale_OG.T.to(torch.float16).contiguous(),
        "g_idx": torch.arange(num_inputs, dtype=torch.int32) // group_size,
    }


def unpack_layer(tensors: Mapping[str, Tensor], args: GptqArgs) -> tuple[Tensor, Tensor, Tensor]:
    """(codes_OI int32, zeros_OG int32, scale_OG float16), the inverse of ``pack_layer``."""
    num_inputs, num_outputs = len(tensors["g_idx"]), tensors["qweight"].shape[1]
    codes_OI = unpack_words(tensors["qweight"].T, args.num_bits, num_inputs)
    zeros_GO = unpack_words(tensors["qzeros"], args.num_bits, num_outputs) + args.zero_offset
    # A zero point of 0 is stored as all ones, from which 1 more runs over.
    return codes_OI, (zeros_GO & (2**args.num_bits - 1)).T, tensors["scales"].T


def dequantized(tensors: Mapping[str, Tensor], args: GptqArgs) -> Tensor:
    """weight_OI in float32; where a zero point isn't the middle one rounded to the scales' dtype, as kernels do it."""
    codes_OI, zeros_OG, scale_OG = unpack_layer(tensors, args)
    group_I = tensors["g_idx"].long()
    if (zeros_OG == 2 ** (args.num_bits - 1)).all():
        scale_OG = scale_OG.float()
    steps_OI = (codes_OI - zeros_OG[:, group_I]).to(scale_OG.dtype)
    return (steps_OI * scale_OG[:, group_I]).float()


def float_weights(
    folder: Path, quantization: Mapping[str, Any], *, dtype: torch.dtype, transposed: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Every tensor of the folder by its name, a quantized layer's ``weight`` in the place of its parts, in ``dtype``.

    ``transposed``: the modules (Conv1D) whose weight is (I, O). Groups of any order (``desc_act``), both checkpoint
    formats and ``dynamic`` are read. Raises CheckpointError naming the tensor that is missing, or of another shape than
    ``quantization`` says.
    """
    file_of = _file_of(folder)
    layers = {name.rpartition(".")[0] for name in file_of if name.rpartition(".")[2] in PARTS}
    values = {}
    for layer in sorted(layers):
        parts = {}
        for part in PARTS:
            name = f"{layer}.{part}"
            if name not in file_of:
                raise CheckpointError(f"the tensor {name} is missing", where=folder, fix=FIX)
            parts[part] = _load(folder / file_of.pop(name), name)
        args = gptq_args(quantization, layer, where=folder / "config.json")
        if args is None:
            raise CheckpointError(
                f"quantization_config leaves {layer} in floats, but its weight is quantized",
                where=folder / "config.json",
                fix=FIX,
            )
        _check_shapes(folder, layer, parts, args)
        weight_OI = dequantized(parts, args).to(dtype)
        turned = any(f".{module}".endswith(f".{layer}") for module in transposed)
        values[f"{layer}.weight"] = weight_OI.T.contiguous() if turned else weight_OI
    for name, file in file_of.items():
        value = _load(folder / file, name)
        values[name] = value.to(dtype) if value.is_floating_point() else value
    return values


def _file_of(folder: Path) -> dict[str, str]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if index.is_file():
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        with safe_open(single, framework="pt") as stored:
            return dict.fromkeys(stored.keys(), single.name)
    except (SafetensorError, OSError, ValueError, KeyError) as cause:
        raise CheckpointError(f"the weights can't be read: {cause}", where=folder, fix=FIX) from cause


def _load(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, framework="pt") as stored:
            tensor: Tensor = stored.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as cause:
        raise CheckpointError(f"{name} can't be read: {cause}", where=path, fix=FIX) from cause


def _check_shapes(folder: Path, layer: str, parts: Mapping[str, Tensor], args: GptqArgs) -> None:
    shapes = {part: tuple(tensor.shape) for part, tensor in parts.items()}
    for part, expected in expected_shapes(shapes, args).items():
        if shapes[part] != expected:
            raise CheckpointError(
                f"{layer}.{part} has the shape {shapes[part]}, quantization_config asks for {expected}",
                where=folder,
                fix=FIX,
            )
    num_groups = shapes["scales"][0]
    if not 0 <= int(parts["g_idx"].min()) <= int(parts["g_idx"].max()) < num_groups:
        raise CheckpointError(f"{layer}.g_idx names groups that aren't there", where=folder, fix=FIX)
