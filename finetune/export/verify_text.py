"""What ``verify_folder`` found, as a terminal shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def format_verification(report: Mapping[str, Any]) -> str:
    """A line a fact; what would be wrong with the folder has been raised as an error before."""
    load = report["load"]
    size = f"{report['num_tensors']:,} tensors, {report['weights_bytes'] / 1e6:,.1f} MB"
    hashed = report["hashed_files"]
    facts = {
        "folder": report["folder"],
        "weights": f"{size}, all finite",
        "quantization": report["quantization"] or "none",
        "hashes": f"{hashed} files are as they were recorded" if hashed else "none were recorded",
        "chat template": "yes" if report["chat_template"] else "no",
        "loaded": f"in a fresh process by {load['loader']}, stored in {load['dtype']}",
        "logits": _logits(load["probe"]),
    }
    lines = [f"{name + ':':<15}{words}" for name, words in facts.items()]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in report["warnings"])])


def _logits(probe: Mapping[str, Any] | None) -> str:
    if probe is None:
        return "finite; nothing is there to compare them with"
    return (
        f"as the model's maker computed them: {probe['rms_difference']:.2g} of their spread away "
        f"({probe['rms_tolerance']:g} is allowed), {probe['worst_position_difference']:.2g} at the worst position "
        f"({probe['worst_position_tolerance']:g})"
    )
