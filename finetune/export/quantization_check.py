"""Whether a config's ``quantization_config`` says what the weight files hold.

compressed-tensors believes the config: with ``quantization_status`` lost it prepares float weights, finds none, and
transformers runs a model of random ones, with a warning at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError
from finetune.export.weights import TensorHeader

PACKED_FORMATS = {"pack-quantized"}
PLAIN_FORMATS = {"int-quantized", "naive-quantized", "float-quantized"}
FIX = "quantize the model again; don't edit quantization_config by hand"


def check_quantization(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> str | None:
    """The quantization method, None for a model in floats. Raises CheckpointError naming what doesn't fit."""
    where = folder / "config.json"
    packed = {name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")}
    scaled = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
    quantization = config.get("quantization_config")
    if quantization is None:
        if packed | scaled:
            raise CheckpointError(
                f"the weights of {min(packed | scaled)} are quantized, but there is no quantization_config",
                where=where,
                fix=FIX,
            )
        return None
    method = quantization.get("quant_method")
    if method != "compressed-tensors":
        return str(method)
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
    if not scaled:
        raise CheckpointError("quantization_config is there, but no tensor is quantized", where=where, fix=FIX)
    formats = {group.get("format") or quantization.get("format") for group in groups.values()}
    unknown = formats - PACKED_FORMATS - PLAIN_FORMATS
    if unknown:
        # A format of compressed-tensors that isn't ours: the load and the probe decide.
        return str(method)
    for module in sorted(scaled | packed):
        _check_module(folder, module, tensors, packed_expected=formats <= PACKED_FORMATS, formats=formats)
        if len(groups) == 1:
            _check_scale(folder, module, tensors, next(iter(groups.values()))["weights"])
    return str(method)


def _check_module(
    folder: Path, module: str, tensors: Mapping[str, TensorHeader], *, packed_expected: bool, formats: set[str]
) -> None:
    plain, packed = tensors.get(f"{module}.weight"), tensors.get(f"{module}.weight_packed")
    scale = tensors.get(f"{module}.weight_scale")
    described = ", ".join(sorted(formats))
    if (packed and formats <= PLAIN_FORMATS) or (plain and plain.dtype not in ("I8", "F8_E4M3")):
        found = "packed" if packed else f"of dtype {plain.dtype}" if plain else ""
        raise CheckpointError(
            f"the format is {described}, but the weight of {module} is {found}",
            where=folder / "config.json",
            fix=FIX,
        )
    needed = ("weight_packed", "weight_shape", "weight_scale") if packed_expected else ("weight_scale",)
    missing = [name for name in needed if f"{module}.{name}" not in tensors]
    if not plain and not packed:
        missing.append("weight")
    if missing:
        file = (scale or packed or plain or next(iter(tensors.values()))).file
        raise CheckpointError(f"the tensor {module}.{missing[0]} is missing", where=folder / file, fix=FIX)


def _check_scale(folder: Path, module: str, tensors: Mapping[str, TensorHeader], weights: Mapping[str, Any]) -> None:
    """One scale a group of ``group_size`` inputs, or one an output channel."""
    scale = tensors[f"{module}.weight_scale"]
    packed, plain = tensors.get(f"{module}.weight_packed"), tensors.get(f"{module}.weight")
    stored = packed or plain
    assert stored is not None
    num_outputs = stored.shape[0]
    # Packing pads the last word, so a packed width is only known to within one word of values.
    num_inputs = stored.shape[1] * 32 // weights["num_bits"] if packed else stored.shape[1]
    if weights.get("strategy") == "group":
        expected = (num_outputs, -(-num_inputs // weights["group_size"]))
    elif weights.get("strategy") == "channel":
        expected = (num_outputs, 1)
    else:
        return
    if scale.shape != expected:
        raise CheckpointError(
            f"{module}.weight_scale has the shape {scale.shape}, quantization_config asks for {expected}",
            where=folder / scale.file,
            fix=FIX,
        )
