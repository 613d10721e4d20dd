"""Whether a config's ``quantization_config`` says what the weight files hold.

compressed-tensors believes the config: with ``quantization_status`` lost it prepares float weights, finds none, and
transformers runs a model of random ones, with a warning at most.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from finetune.errors import CheckpointError
from finetune.export.gguf_weights import check_gguf_metadata
from finetune.export.weights import TensorHeader
from finetune.model import gptq
from finetune.model.gguf import is_gguf_folder

PACKED_FORMATS = {"pack-quantized"}
PLAIN_FORMATS = {"int-quantized", "naive-quantized", "float-quantized"}
FIX = "quantize the model again; don't edit quantization_config by hand"
_QUANTIZED_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "input_scale", "qweight", "SCB", "absmax")


def check_quantization(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> str | None:
    """The quantization method, None for a model in floats. Raises CheckpointError naming what doesn't fit."""
    if is_gguf_folder(folder):
        check_gguf_metadata(folder)
        return "gguf"
    where = folder / "config.json"
    quantization = config.get("quantization_config")
    if quantization is None:
        quantized = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in _QUANTIZED_PARTS}
        if quantized:
            raise CheckpointError(
                f"the weights of {min(quantized)} are quantized, but there is no quantization_config",
                where=where,
                fix=FIX,
            )
        return None
    if not isinstance(quantization, dict):
        raise CheckpointError("quantization_config isn't an object", where=where, fix=FIX)
    method = str(quantization.get("quant_method"))
    if method == "compressed-tensors":
        _check_compressed_tensors(folder, quantization, tensors)
    elif method == "gptq":
        _check_gptq(folder, quantization, tensors)
    return method


def _check_compressed_tensors(
    folder: Path, quantization: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> None:
    where = folder / "config.json"
    status = quantization.get("quantization_status")
    if status != "compressed":
        raise CheckpointError(
            f"quantization_status is {status or 'missing'}, must be `compressed`: transformers would load "
            "wrong weights without an error",
            where=where,
            fix='put back `"quantization_status": "compressed"`, or quantize the model again',
        )
    groups = quantization.get("config_groups") or {}
    if not groups:
        raise CheckpointError("quantization_config has no config_groups", where=where, fix=FIX)
    modules = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in _QUANTIZED_PARTS}
    modules |= {name.removesuffix(".weight") for name, header in tensors.items() if header.dtype == "I8"}
    if not modules:
        raise CheckpointError("quantization_config is there, but no tensor is quantized", where=where, fix=FIX)
    for module in sorted(modules):
        group = _group_of(module, groups.values())
        # Without a group, or in a format of compressed-tensors that isn't ours, the load and the probe decide.
        format_name = None if group is None else group.get("format") or quantization.get("format")
        if group is not None and format_name in PACKED_FORMATS | PLAIN_FORMATS:
            _check_module(folder, module, tensors, group=group, format_name=str(format_name))
            _check_scale(folder, module, tensors, group["weights"])
            if "weight_zero_point" in _needed(group, str(format_name)) and format_name in PACKED_FORMATS:
                _require_dequantize(where, quantization)


def _group_of(module: str, groups: Any) -> Mapping[str, Any] | None:
    """The group whose targets name this module: by its full name, else by a pattern, else by its class."""
    targets = {target: group for group in groups for target in group["targets"]}
    if module in targets:
        found: Mapping[str, Any] = targets[module]
        return found
    for target in sorted(targets):
        if target.startswith("re:") and re.match(target.removeprefix("re:"), module):
            return targets[target]  # type: ignore[no-any-return]
    return next(
        (group for target, group in targets.items() if not target.startswith("re:") and "." not in target), None
    )


def _needed(group: Mapping[str, Any], format_name: str) -> list[str]:
    parts = ["weight_packed", "weight_shape"] if format_name in PACKED_FORMATS else ["weight"]
    parts.append("weight_scale")
    if not group["weights"].get("symmetric", True):
        parts.append("weight_zero_point")
    inputs = group.get("input_activations")
    if inputs and not inputs.get("dynamic"):
        parts.append("input_scale")
    return parts


def _require_dequantize(where: Path, quantization: Mapping[str, Any]) -> None:
    if not quantization.get("dequantize"):
        raise CheckpointError(
            "the zero points are packed, which transformers loads only where quantization_config has `dequantize`",
            where=where,
            fix='put back `"dequantize": true`, or quantize the model again',
        )


def _check_module(
    folder: Path, module: str, tensors: Mapping[str, TensorHeader], *, group: Mapping[str, Any], format_name: str
) -> None:
    plain, packed = tensors.get(f"{module}.weight"), tensors.get(f"{module}.weight_packed")
    if (packed and format_name in PLAIN_FORMATS) or (plain and plain.dtype not in ("I8", "F8_E4M3")):
        found = "packed" if packed else f"of dtype {plain.dtype}" if plain else ""
        raise CheckpointError(
            f"the format is {format_name}, but the weight of {module} is {found}",
            where=folder / "config.json",
            fix=FIX,
        )
    for part in _needed(group, format_name):
        if f"{module}.{part}" not in tensors:
            _missing(folder, f"{module}.{part}", tensors)


def _missing(folder: Path, name: str, tensors: Mapping[str, TensorHeader]) -> None:
    """Raise CheckpointError; the file is one that holds another tensor of the same layer."""
    prefix = name.rpartition(".")[0] + "."
    file = next((header.file for other, header in tensors.items() if other.startswith(prefix)), "")
    raise CheckpointError(f"the tensor {name} is missing", where=folder / file, fix=FIX)


def _check_scale(folder: Path, module: str, tensors: Mapping[str, TensorHeader], weights: Mapping[str, Any]) -> None:
    """One scale (and zero point) a group of ``group_size`` inputs, or one an output channel."""
    num_outputs, num_inputs = _shape_of(folder, module, tensors)
    if weights.get("strategy") == "group":
        num_groups = -(-num_inputs // weights["group_size"])
    elif weights.get("strategy") == "channel":
        num_groups = 1
    else:
        return
    expected = {"weight_scale": (num_outputs, num_groups)}
    if f"{module}.weight_packed" in tensors:
        num_bits = weights["num_bits"]
        expected["weight_packed"] = (num_outputs, -(-num_inputs * num_bits // 32))
        expected["weight_zero_point"] = (-(-num_outputs * num_bits // 32), num_groups)
    else:
        expected["weight_zero_point"] = expected["weight_scale"]
    for part, shape in expected.items():
        tensor = tensors.get(f"{module}.{part}")
        if tensor is not None and tensor.shape != shape:
            raise CheckpointError(
                f"{module}.{part} has the shape {tensor.shape}, quantization_config asks for {shape}",
                where=folder / tensor.file,
                fix=FIX,
            )


def _shape_of(folder: Path, module: str, tensors: Mapping[str, TensorHeader]) -> tuple[int, int]:
    """(outputs, inputs). A header tells a packed width to within one word only, so ``weight_shape`` is read."""
    plain = tensors.get(f"{module}.weight")
    if plain is not None:
        return plain.shape[0], plain.shape[1]
    name = f"{module}.weight_shape"
    with safe_open(folder / tensors[name].file, framework="pt") as opened:
        num_outputs, num_inputs = opened.get_tensor(name).tolist()
    return num_outputs, num_inputs


def _check_gptq(folder: Path, quantization: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> None:
    where = folder / "config.json"
    layers = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in gptq.PARTS}
    if not layers:
        raise CheckpointError("quantization_config is there, but no tensor is quantized", where=where, fix=FIX)
    for layer in sorted(layers):
        for part in gptq.PARTS:
            if f"{layer}.{part}" not in tensors:
                _missing(folder, f"{layer}.{part}", tensors)
        args = gptq.gptq_args(quantization, layer, where=where)
        if args is None:
            raise CheckpointError(
                f"`dynamic` leaves {layer} in floats, but its weight is quantized", where=where, fix=FIX
            )
        shapes = {part: tensors[f"{layer}.{part}"].shape for part in gptq.PARTS}
        for part, expected in gptq.expected_shapes(shapes, args).items():
            if shapes[part] != expected:
                raise CheckpointError(
                    f"{layer}.{part} has the shape {shapes[part]}, quantization_config asks for {expected}",
                    where=folder / tensors[f"{layer}.{part}"].file,
                    fix=FIX,
                )
