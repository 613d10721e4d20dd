"""quantization_report.json: what was done to each layer, and what it cost the whole model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import QualityGateError
from finetune.files import write_json
from finetune.model.load import QUANTIZATION_PLOT, QUANTIZATION_REPORT
from finetune.quant.scheme import QuantScheme
from finetune.quant.shards import StoredTensor
from finetune.quant.writers import Writer

REPORT_NAME = QUANTIZATION_REPORT
PLOT_NAME = QUANTIZATION_PLOT


@dataclass(frozen=True)
class StoredSize:
    """What a quantized layer takes as it is stored, scales and all."""

    num_weights: int
    num_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / self.num_weights


def stored_sizes(
    tensors: Mapping[str, StoredTensor],
    schemes: Mapping[str, QuantScheme],
    shapes: Mapping[str, Sequence[int]],
    writer: Writer,
) -> dict[str, StoredSize]:
    """By the layers' full names; ``shapes``: (O, I) of their weights."""
    sizes = {}
    for layer, scheme in schemes.items():
        num_bytes = sum(tensors[name].num_bytes for name in writer.tensor_names(layer, scheme))
        sizes[layer] = StoredSize(shapes[layer][0] * shapes[layer][1], num_bytes)
    return sizes


def bits_per_weight(sizes: Mapping[str, StoredSize]) -> float:
    """Over all quantized layers."""
    return 8 * sum(size.num_bytes for size in sizes.values()) / sum(size.num_weights for size in sizes.values())


def describe_layers(
    entries: Sequence[Mapping[str, Any]],
    schemes: Mapping[str, QuantScheme],
    shapes: Mapping[str, Sequence[int]],
    sizes: Mapping[str, StoredSize],
) -> list[dict[str, Any]]:
    """The quantizer's entry of each layer, with what is stored for it."""
    described = []
    for entry in entries:
        layer = entry["layer"]
        weights = schemes[layer].weights
        stored = {
            "shape": list(shapes[layer]),
            "num_bits": weights.num_bits,
            "group_size": weights.group_size,
            "symmetric": weights.symmetric,
            "bits_per_weight": round(sizes[layer].bits_per_weight, 4),
        }
        described.append({"layer": layer, "scheme": entry["scheme"], **stored, **entry})
    return described


def check_limits(figures: Mapping[str, Any] | None, limits: Mapping[str, float | None], *, where: str) -> None:
    """Raise QualityGateError where one of the end-to-end ``figures`` is above its limit; a limit of None is none."""
    failures = []
    for key, limit in limits.items():
        if limit is None:
            continue
        assert figures is not None, "the caller refuses limits without text to measure on"
        if not figures[key] <= limit:  # a NaN fails, too
            failures.append(f"{key} is {figures[key]:.4g}, must be at most {limit:.4g}")
    if failures:
        raise QualityGateError(
            "; ".join(failures),
            where=where,
            fix="the model is there; more bits, smaller groups or more calibration text cost less, or move the limit",
        )


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a folder that has just been written."""
    report: dict[str, Any] = json.loads((folder / REPORT_NAME).read_text(encoding="utf-8"))
    return report


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """The report and its picture."""
    from finetune.quant.plots import plot_report

    write_json(folder / REPORT_NAME, report)
    plot_report(report, folder / PLOT_NAME)
