"""Layers that read one input and have one scheme, quantized as one matrix: its rows don't see each other.

Several ranks share out the matrices, or the rows of one, and give one another what they found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from finetune.errors import CheckpointError
from finetune.quant.activations import HessianSum, static_scale
from finetune.quant.drift import make_up
from finetune.quant.methods import METHODS, QuantizedWeight
from finetune.quant.ranks import Ranks, deal
from finetune.quant.scales import relative_error, weight_values

if TYPE_CHECKING:
    from finetune.quant.stream import BlockQuantizer

Found = tuple[QuantizedWeight, float]
"""Some rows of a matrix, and the seconds they took."""


def quantize_groups(
    quantizer: BlockQuantizer,
    index: int,
    groups: Sequence[list[str]],
    inputs: Mapping[str, HessianSum] | None,
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, QuantizedWeight], list[dict[str, Any]]]:
    """The layers of ``groups`` of block ``index``, quantized, and the report's entry of each.

    ``inputs`` has what the first layer of a group reads, None with a method that uses none; ``tensors`` the weights.
    Every rank returns the same, but for errors of layers, which only the first computes.
    """
    ranks = quantizer.ranks
    shapes = [(sum(len(tensors[f"{name}.weight"]) for name in group), _width(group, tensors)) for group in groups]
    dealt = deal(shapes, ranks.size)
    mine: dict[int, Found] = {}
    targets: dict[int, Tensor] = {}
    for position, group in enumerate(groups):
        sums = None if inputs is None else inputs[group[0]]
        if ranks.is_first or any(rank == ranks.rank for rank, _ in dealt[position]):
            targets[position] = _weights_to_round(quantizer, index, group, sums, tensors)
        for rank, rows in dealt[position]:
            if rank == ranks.rank:
                mine[position] = _quantized_rows(quantizer, index, group, targets[position][rows], sums)
        if not ranks.is_first:
            targets.clear()
    quantized: dict[str, QuantizedWeight] = {}
    report: list[dict[str, Any]] = []
    for position, group in enumerate(groups):
        sums = None if inputs is None else inputs[group[0]]
        parts = [_exchanged(ranks, mine.get(position), rank) for rank, _ in dealt[position]]
        result, seconds = _joined(parts)
        scheme = quantizer.scheme_of(index, group[0])
        if scheme.activations is not None and not scheme.activations.dynamic:
            assert sums is not None, "the settings ask for calibration data"
            scale = static_scale(sums.largest, scheme.activations, quantizer.scale_dtypes[scheme])
            result = replace(result, input_scale=scale)
        hessian_II = None if sums is None or not ranks.is_first else sums.mean()
        sizes = [len(tensors[f"{name}.weight"]) for name in group]
        zero_points = [None] * len(sizes) if result.zero_point is None else result.zero_point.split(sizes)
        wholes = targets[position].split(sizes) if ranks.is_first else [torch.empty(0)] * len(sizes)
        splits = zip(group, wholes, result.codes.split(sizes), result.scale.split(sizes), zero_points, strict=True)
        for name, target_OI, codes_OI, scale_OG, zero_point_OG in splits:
            quantized[name] = replace(result, codes=codes_OI, scale=scale_OG, zero_point=zero_point_OG)
            error = math.nan
            if ranks.is_first:
                error = relative_error(target_OI, weight_values(quantized[name], torch.float32), hessian_II)
            report.append(
                {
                    "layer": f"{quantizer.decoder.block_name(index)}.{name}",
                    "scheme": scheme.name,
                    "relative_error": error,
                    "damp": result.damp,
                    "clip": result.clip,
                    "seconds": round(seconds / len(group), 3),
                }
            )
    return quantized, report


def _width(group: Sequence[str], tensors: Mapping[str, Tensor]) -> int:
    return tensors[f"{group[0]}.weight"].shape[1]


def _weights_to_round(
    quantizer: BlockQuantizer,
    index: int,
    group: Sequence[str],
    inputs: HessianSum | None,
    tensors: Mapping[str, Tensor],
) -> Tensor:
    """weight_OI of all layers of ``group``, float32 on the device."""
    weights = {name: tensors[f"{name}.weight"].to(quantizer.decoder.device, torch.float32) for name in group}
    for name, weight_OI in weights.items():
        _check_weight(quantizer, f"{quantizer.decoder.block_name(index)}.{name}", weight_OI)
    weight_OI = torch.cat(list(weights.values()))
    drift_II = None if inputs is None else inputs.mean_drift()
    if inputs is None or drift_II is None:
        return weight_OI
    return make_up(weight_OI, inputs.mean(), drift_II, num_tokens=inputs.num_tokens)


def _quantized_rows(
    quantizer: BlockQuantizer, index: int, group: Sequence[str], weight_OI: Tensor, inputs: HessianSum | None
) -> Found:
    started = time.perf_counter()
    scheme = quantizer.scheme_of(index, group[0])
    result = METHODS[quantizer.method].quantize(
        weight_OI,
        None if inputs is None else inputs.mean(),
        weights=scheme.weights,
        scale_dtype=quantizer.scale_dtypes[scheme],
        damp=quantizer.damp,
        act_order=quantizer.act_order,
    )
    return result, time.perf_counter() - started


def _check_weight(quantizer: BlockQuantizer, layer: str, weight_OI: Tensor) -> None:
    if not torch.isfinite(weight_OI).all():
        raise CheckpointError(
            f"the weight of {layer} holds NaN or infinity",
            where=quantizer.decoder.folder,
            fix="fetch the model again, or train it again from a good checkpoint",
        )
    scheme = quantizer.schemes[layer]
    scale_dtype = quantizer.scale_dtypes[scheme]
    if weight_OI.abs().max() > torch.finfo(scale_dtype).max * scheme.weights.code_max / 2:
        raise CheckpointError(
            f"the weight of {layer} reaches {weight_OI.abs().max():.3g}: its scale doesn't fit into "
            f"{str(scale_dtype).removeprefix('torch.')}",
            where=quantizer.decoder.folder,
            fix="put the layer in `ignore`, or choose a format that keeps scales in the model's dtype",
        )


def _exchanged(ranks: Ranks, found: Found | None, source: int) -> Found:
    """What rank ``source`` found, on every rank."""
    if ranks.size == 1:
        assert found is not None
        return found
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    if found is not None and ranks.rank == source:
        weight, rest["seconds"] = found
        tensors = {"codes": weight.codes, "scale": weight.scale}
        if weight.zero_point is not None:
            tensors["zero_point"] = weight.zero_point
        rest |= {"type": weight.type, "damp": weight.damp, "clip": weight.clip}
    tensors, rest = ranks.broadcast_tensors(tensors, rest, source)
    seconds = rest.pop("seconds")
    values: dict[str, Any] = {**rest, **tensors}
    return QuantizedWeight(**values), seconds


def _joined(parts: Sequence[Found]) -> Found:
    """Rows put together again; figures of clipping are means over them, the time is that of the slowest."""
    if len(parts) == 1:
        return parts[0]
    weights = [weight for weight, _ in parts]
    num_rows = [len(weight.codes) for weight in weights]
    first, zero_points = weights[0], [weight.zero_point for weight in weights if weight.zero_point is not None]
    clip = {
        key: sum(weight.clip[key] * count for weight, count in zip(weights, num_rows, strict=True)) / sum(num_rows)
        for key in first.clip
    }
    joined = replace(
        first,
        codes=torch.cat([weight.codes for weight in weights]),
        scale=torch.cat([weight.scale for weight in weights]),
        zero_point=torch.cat(zero_points) if zero_points else None,
        clip=clip,
    )
    return joined, max(seconds for _, seconds in parts)
