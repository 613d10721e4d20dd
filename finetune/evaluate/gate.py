"""The quality gate: which figures of which model are worse than the recipe allows."""

from __future__ import annotations

from collections.abc import Mapping

from finetune.errors import QualityGateError
from finetune.evaluate.settings import EvaluateSettings


def check_gate(
    results: Mapping[str, Mapping[str, float]], *, settings: EvaluateSettings, reference: str | None
) -> None:
    """Raise QualityGateError naming every model, figure and limit that doesn't hold.

    ``results`` are those of ``evaluate_models``. What compares with the reference isn't asked of the reference itself.
    """
    failures = []
    for name, figures in results.items():
        if settings.gate and name not in settings.gate:
            continue
        limits = [("exact_match", "at least", settings.min_exact_match)]
        if name != reference:
            limits += [
                ("kl", "at most", settings.max_kl),
                ("perplexity_ratio", "at most", settings.max_perplexity_ratio),
                ("exact_match_drop", "at most", settings.max_exact_match_drop),
            ]
        for figure, direction, limit in limits:
            if limit is None:
                continue
            value = figures[figure]
            # Counted shares such as 0.60 - 0.57 miss their own decimal value by a rounding error.
            holds = value <= limit + 1e-9 if direction == "at most" else value >= limit - 1e-9
            # `not holds` also catches a NaN.
            if not holds:
                failures.append(f"{name}: {figure} is {value:.4g}, must be {direction} {limit:.4g}")
    if failures:
        raise QualityGateError(
            "; ".join(failures),
            where="evaluate",
            fix="train longer, quantize less hard (more bits, smaller groups, more calibration), or move the limit",
        )
