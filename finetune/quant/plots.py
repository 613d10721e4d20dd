"""The pictures of a quantization report and of a sweep. matplotlib is imported late: most commands never draw."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Told apart with any colour vision (Okabe and Ito, 2008); markers tell them apart in grey, too."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GREY = "#555555"


def plot_report(report: Mapping[str, Any], path: Path) -> None:
    """Each layer's error by its kind, and the hidden states' error, through the depth; the model's figures above."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    measured = bool(report["blocks"])
    figure = Figure(figsize=(9.5, 7.2 if measured else 4.8), dpi=110, layout="constrained")
    figure.suptitle(_title(report), x=0.01, ha="left", fontsize=12.5, linespacing=1.5)
    axes = figure.subplots(2 if measured else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 2][: 1 + measured])
    upper = axes[0][0]
    for index, (kind, points) in enumerate(errors_by_kind(report["layers"]).items()):
        blocks, errors = zip(*sorted(points.items()), strict=True)
        upper.plot(blocks, errors, label=kind, linewidth=1.2, markersize=4.5, **_style(index))
    _dress(upper, "Error of each layer's output", "squared, relative to the output")
    # An error of exactly 0 has no place on a logarithmic axis; matplotlib leaves such points out.
    upper.legend(loc="upper left", bbox_to_anchor=(1.005, 1.02), frameon=False, fontsize=9)
    if measured:
        lower = axes[1][0]
        hidden_errors = [entry["hidden_error"] for entry in report["blocks"]]
        lower.plot(range(len(hidden_errors)), hidden_errors, linewidth=1.2, markersize=4.5, **_style(0))
        _dress(lower, "Error of the hidden states behind each block", "squared, relative, mean over tokens")
    bottom = axes[-1][0]
    bottom.set_xlabel("block")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, format="png", metadata={"Software": None})


def plot_sweep(sweep: Mapping[str, Any], path: Path) -> None:
    """KL and perplexity of each scheme against what its weights take."""
    from matplotlib.figure import Figure

    variants: Sequence[Mapping[str, Any]] = sweep["variants"]
    figure = Figure(figsize=(9.5, 4.6), dpi=110, layout="constrained")
    text = "held-out text" if variants[0]["held_out"] else "the text calibrated on"
    figure.suptitle(f"{sweep['model']}: size against quality, method {sweep['method']}, on {text}", fontsize=12.5)
    left, right = figure.subplots(1, 2)
    for axes, key, heading in ((left, "kl", "KL (nats a token)"), (right, "perplexity", "Perplexity")):
        for index, variant in enumerate(variants):
            size, value = variant["output_bytes"] / 1e6, variant[key]
            axes.plot(size, value, markersize=8, **_style(index))
            label = f"{variant['name']}\n{variant['bits_per_weight']:.2f} bits"
            axes.annotate(label, (size, value), xytext=(8, 4), textcoords="offset points", fontsize=8.5, color=GREY)
        axes.set_title(heading, loc="left", fontsize=11)
        axes.set_xlabel("weight files (MB)")
        axes.grid(True, alpha=0.25)
        axes.margins(x=0.22, y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    right.axhline(variants[0]["unquantized_perplexity"], color=GREY, linestyle="--", linewidth=1)
    right.annotate(
        f"unquantized, {sweep['source_bytes'] / 1e6:,.1f} MB",
        (0.99, variants[0]["unquantized_perplexity"]),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
        color=GREY,
    )
    figure.savefig(path, format="png", metadata={"Software": None})


def errors_by_kind(layers: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """{kind: {block: relative error}}; layers that differ by a second number only (experts) give their mean."""
    found: dict[str, dict[int, list[float]]] = {}
    for entry in layers:
        match = re.search(r"\.(\d+)\.(.+)$", entry["layer"])
        block, rest = (int(match[1]), match[2]) if match else (0, entry["layer"])
        kind = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", rest)
        found.setdefault(kind, {}).setdefault(block, []).append(entry["relative_error"])
    last_parts = [kind.rpartition(".")[2] for kind in found]
    return {
        (last if last_parts.count(last) == 1 else kind): {block: sum(e) / len(e) for block, e in errors.items()}
        for (kind, errors), last in zip(found.items(), last_parts, strict=True)
    }


def _style(index: int) -> dict[str, Any]:
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}


def _dress(axes: Any, title: str, unit: str) -> None:
    axes.set_yscale("log")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(unit, fontsize=9, color=GREY)
    axes.grid(True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _title(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    group = f"groups of {settings['group_size']}" if settings["group_size"] else "one scale a channel"
    others = ", some layers otherwise" if settings["overrides"] else ""
    first = f"{settings['scheme']} ({group}{others}), {settings['method']}, {report['format']}"
    sizes = (
        f"{report['source_bytes'] / 1e6:,.1f} MB to {report['output_bytes'] / 1e6:,.1f} MB, "
        f"{report['bits_per_weight']:.2f} bits a weight in {report['num_layers']} layers"
    )
    figures = report["end_to_end"]
    if figures is None or not math.isfinite(figures["kl"]):
        return f"{first}\n{sizes}"
    text = "held-out text" if figures["held_out"] else "text calibrated on"
    return (
        f"{first}\n{sizes}\nPerplexity {figures['unquantized_perplexity']:.3f} to {figures['perplexity']:.3f} "
        f"(x{figures['perplexity_ratio']:.4f}), KL {figures['kl']:.4f} nats a token, "
        f"top-1 agreement {figures['top1_agreement']:.1%} on {text}"
    )
