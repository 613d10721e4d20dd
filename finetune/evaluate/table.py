"""The figures of several models side by side, as text."""

from __future__ import annotations

from collections.abc import Mapping

from finetune.text_table import aligned, figure_of

COLUMNS = {
    "perplexity": "perplexity",
    "perplexity_ratio": "ratio",
    "kl": "KL (nats/token)",
    "top1_agreement": "top-1 agreement",
    "exact_match": "exact match",
    "size_bytes": "size (MB)",
}
"""What is shown of ``evaluate_models``'s figures, and its heading."""


def table_rows(results: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Heading and one row a model, of the figures that at least one model has; an absent one is left blank."""
    shown = [key for key in COLUMNS if any(key in figures for figures in results.values())]
    rows = [["model", *(COLUMNS[key] for key in shown)]]
    for name, figures in results.items():
        rows.append([name, *(figure_of(key, figures.get(key)) for key in shown)])
    return rows


def format_table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Plain text, one line a model, numbers aligned to the right."""
    return aligned(table_rows(results))
