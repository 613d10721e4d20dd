"""The figures of several models side by side, as text."""

from __future__ import annotations

from collections.abc import Mapping

from finetune.text_table import aligned, figure

COLUMNS = {
    "perplexity": ("perplexity", ".3f"),
    "perplexity_ratio": ("ratio", ".4f"),
    "kl": ("KL (nats/token)", ".5f"),
    "top1_agreement": ("top-1 agreement", ".2%"),
    "exact_match": ("exact match", ".1%"),
    "size_bytes": ("size (MB)", ".1f"),
}
"""What is shown of ``evaluate_models``'s figures: heading and format."""


def table_rows(results: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Heading and one row a model, of the figures that at least one model has; an absent one is left blank."""
    shown = [key for key in COLUMNS if any(key in figures for figures in results.values())]
    rows = [["model", *(COLUMNS[key][0] for key in shown)]]
    for name, figures in results.items():
        cells = []
        for key in shown:
            value = figures.get(key)
            scaled = value / 1e6 if key == "size_bytes" and value is not None else value
            cells.append("" if scaled is None else figure(scaled, COLUMNS[key][1]))
        rows.append([name, *cells])
    return rows


def format_table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Plain text, one line a model, numbers aligned to the right."""
    return aligned(table_rows(results))
