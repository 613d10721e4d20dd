"""A quantization report as a terminal shows it: what it cost, in a table, and where the rest lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.quant.report import PLOT_NAME, REPORT_NAME
from finetune.text_table import aligned, figure, figure_of


def format_report(report: Mapping[str, Any], folder: Path) -> str:
    """``report``: what ``quantization_report.json`` of ``folder`` holds."""
    settings, figures = report["settings"], report["end_to_end"]
    group = f"groups of {settings['group_size']}" if settings["group_size"] else "a scale a channel"
    lines = [
        f"{settings['scheme']} ({group}) by {settings['method']}, stored as {report['format']}: "
        f"{report['num_layers']} layers",
        "",
        aligned(_rows(report)),
        "",
    ]
    worst = max(report["layers"], key=lambda entry: entry["relative_error"])
    facts = {
        "measured on": _text(figures) if figures else "nothing (--calibration FILE gives text to measure on)",
        "worst layer": f"{worst['layer']}, relative error {worst['relative_error']:.2g} "
        f"(mean of all layers {report['relative_error']:.2g})",
        "seconds": figure(report["seconds"], ".1f"),
        "verified": _verified(report.get("verified")),
        "report": str(folder / REPORT_NAME),
        "plot": str(folder / PLOT_NAME),
    }
    return "\n".join([*lines, *(f"{name + ':':<13}{words}" for name, words in facts.items())])


def _rows(report: Mapping[str, Any]) -> list[list[str]]:
    rows = [
        ["", "unquantized", "quantized"],
        ["size (MB)", *(figure_of(key, report[key]) for key in ("source_bytes", "output_bytes"))],
        ["bits a weight", "", figure_of("bits_per_weight", report["bits_per_weight"])],
    ]
    figures = report["end_to_end"]
    if figures is not None:
        before, after = (figure_of("perplexity", figures[key]) for key in ("unquantized_perplexity", "perplexity"))
        rows += [
            ["perplexity", before, after],
            ["perplexity ratio", "", figure_of("perplexity_ratio", figures["perplexity_ratio"])],
            ["KL (nats/token)", "", figure_of("kl", figures["kl"])],
            ["top-1 agreement", "", figure_of("top1_agreement", figures["top1_agreement"])],
        ]
    return rows


def _text(figures: Mapping[str, Any]) -> str:
    which = "held out of the calibration text" if figures["held_out"] else "of the text calibrated on, which flatters"
    return f"{figures['num_tokens']:,} tokens {which}"


def _verified(verified: Mapping[str, Any] | None) -> str:
    if verified is None:
        return "no (--no-verify, or `verify: false`)"
    return f"a fresh process loaded it by {verified['loader']}, its logits are those that were computed"
