"""Figures and tables as plain text, for a terminal and for a model card."""

from __future__ import annotations

from collections.abc import Sequence


def figure(value: float, spec: str) -> str:
    """``value`` by a format spec such as ``.3f`` or ``.1%``, with digits that say something.

    With decimals up to 1,000, whole up to a million, then as a power of ten: 17.991; 49,152; 8.22e+307, which is the
    perplexity of a hopeless model.
    """
    if not spec.endswith("f") or not abs(value) >= 1e3:  # a NaN is shown as one
        return format(value, spec)
    return f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.2e}"


SPECS = {
    "perplexity": ".3f",
    "perplexity_ratio": ".4f",
    "kl": ".5f",
    "top1_agreement": ".2%",
    "exact_match": ".1%",
    "bits_per_weight": ".2f",
}
"""How each figure of a model is written."""


def figure_of(name: str, value: float | None) -> str:
    """The figure ``name`` of a model, blank where there is none; ``…_bytes`` in MB."""
    if value is None:
        return ""
    return figure(value / 1e6, ".1f") if name.endswith("_bytes") else figure(value, SPECS[name])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table of lines: the heading, a rule, and the rows; the first column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
