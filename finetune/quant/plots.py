"""The pictures of a quantization report and of a sweep. matplotlib is imported late: most commands never draw."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.text_table import figure as digits

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Told apart with any colour vision (Okabe and Ito, 2008); markers tell them apart in grey, too."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GREY = "#555555"
BEATEN_ALPHA = 0.35
TITLE_POINTS = 11.5


def plot_report(report: Mapping[str, Any], path: Path) -> None:
    """Draw ``report_figure`` as PNG."""
    _save(report_figure(report), path)


def report_figure(report: Mapping[str, Any]) -> Any:
    """Each layer's error by its kind, and the hidden states' error, through the depth; the model's figures above."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    measured = bool(report["blocks"])
    figure = Figure(figsize=(9.5, 7.2 if measured else 4.8), dpi=110, layout="constrained")
    _headline(figure, _title(report))
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
    return figure


def plot_sweep(sweep: Mapping[str, Any], path: Path) -> None:
    """Draw ``sweep_figure`` as PNG."""
    _save(sweep_figure(sweep), path)


def sweep_figure(sweep: Mapping[str, Any]) -> Any:
    """KL and perplexity of each scheme against what its weights take.

    A line joins those than which no other is as small and better; the beaten ones are pale.
    """
    from matplotlib.figure import Figure

    variants: Sequence[Mapping[str, Any]] = sweep["variants"]
    figure = Figure(figsize=(10.5, 4.4), dpi=110, layout="constrained")
    text = "held-out text" if variants[0]["held_out"] else "the text calibrated on"
    _headline(figure, [f"{sweep['model']}: size against quality", f"by {sweep['method']}, measured on {text}"])
    left, right = figure.subplots(1, 2)
    for axes, key, heading in ((left, "kl", "KL divergence (nats a token)"), (right, "perplexity", "Perplexity")):
        front = unbeaten(variants, key)
        points = [(variant["output_bytes"] / 1e6, variant[key]) for variant in front]
        axes.plot(*zip(*points, strict=True), color=GREY, linewidth=1.8, zorder=1, label="best for its size")
        for index, variant in enumerate(variants):
            # Hollow, so that two of one size and quality both show.
            label = f"{variant['name']}, {variant['bits_per_weight']:.2f} bits a weight"
            style = {"linestyle": "none", "markersize": 9, "markerfacecolor": "none", "markeredgewidth": 2}
            alpha = 1.0 if variant in front else BEATEN_ALPHA
            axes.plot(variant["output_bytes"] / 1e6, variant[key], label=label, alpha=alpha, **style, **_style(index))
        axes.set_title(heading, loc="left", fontsize=11)
        axes.set_xlabel("weights (MB)")
        axes.grid(True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_yscale("log")
    unquantized = f"unquantized, {sweep['source_bytes'] / 1e6:,.1f} MB"
    right.axhline(variants[0]["unquantized_perplexity"], color=GREY, linestyle="--", linewidth=1, label=unquantized)
    right.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False, fontsize=9)
    return figure


def unbeaten(variants: Sequence[Mapping[str, Any]], key: str) -> list[Mapping[str, Any]]:
    """Those than which no other is as small and better, or smaller and as good, by size."""
    best: list[Mapping[str, Any]] = []
    for variant in sorted(variants, key=lambda variant: (variant["output_bytes"], variant[key])):
        if not best or variant[key] < best[-1][key]:
            best.append(variant)
    return best


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


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, format="png", metadata={"Software": None})


def _headline(figure: Any, lines: Sequence[str]) -> None:
    """A title above all, each line cut where the picture ends: a letter is about 0.6 of its size wide."""
    letters = int(0.95 * 72 * figure.get_figwidth() / (0.6 * TITLE_POINTS))
    wrapped = [part for line in lines for part in textwrap.wrap(line, letters)]
    figure.suptitle("\n".join(wrapped), x=0.01, ha="left", fontsize=TITLE_POINTS, linespacing=1.4)


def _style(index: int) -> dict[str, Any]:
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}


def _dress(axes: Any, title: str, unit: str) -> None:
    axes.set_yscale("log")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(unit, fontsize=9, color=GREY)
    axes.grid(True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _title(report: Mapping[str, Any]) -> list[str]:
    settings = report["settings"]
    group = f"groups of {settings['group_size']}" if settings["group_size"] else "one scale a channel"
    others = ", some layers otherwise" if settings["overrides"] else ""
    lines = [
        f"{settings['scheme']} ({group}{others}), {settings['method']}, {report['format']}",
        f"{report['source_bytes'] / 1e6:,.1f} MB to {report['output_bytes'] / 1e6:,.1f} MB, "
        f"{report['bits_per_weight']:.2f} bits a weight in {report['num_layers']} layers",
    ]
    figures = report["end_to_end"]
    if figures is None or not math.isfinite(figures["kl"]):
        return lines
    before, after = (digits(figures[key], ".3f") for key in ("unquantized_perplexity", "perplexity"))
    text = "held-out text" if figures["held_out"] else "text calibrated on"
    return [
        *lines,
        f"Perplexity {before} to {after} (x{digits(figures['perplexity_ratio'], '.4f')}) on {text}",
        f"KL {digits(figures['kl'], '.4f')} nats a token, top-1 agreement {figures['top1_agreement']:.1%}",
    ]
