"""Load a model folder as anyone would, and compare its logits with the folder's probe.

    python -m finetune.export.load_check FOLDER

``verify`` runs this in a fresh process, so that nothing that made the model can lend it a hand. It prints one JSON
object: the report, or {"error": {"what", "where", "fix"}} with exit code 4.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from finetune.errors import CheckpointError, FinetuneError
from finetune.model.load import load_config, load_model
from finetune.model.probe import check_probe, probe_input_ids, read_probe


def check_load(folder: Path) -> dict[str, Any]:
    """Load ``folder`` with plain transformers on the CPU and run it.

    Loaded first in the dtype it is stored in, then, where the probe was computed in another, in that one: float32
    logits tell far smaller faults than bfloat16 ones. Returns {"dtype", "probe": figures or None}.
    Raises CheckpointError for a folder that doesn't load whole, logits that aren't finite or differ from the probe.
    """
    probe = read_probe(folder)
    config = load_config(folder)
    input_ids = probe.input_ids if probe else probe_input_ids(config.get_text_config().vocab_size)
    model = load_model(folder, dtype="auto", device="cpu")  # type: ignore[arg-type]
    dtype = model.dtype
    report: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "probe": _compare(folder, model, input_ids, has_probe=probe is not None),
    }
    if probe and getattr(torch, probe.dtype) != dtype:
        del model
        model = load_model(folder, dtype=getattr(torch, probe.dtype), device="cpu")
        report["probe"] = _compare(folder, model, input_ids, has_probe=True)
    return report


@torch.inference_mode()
def _compare(folder: Path, model: Any, input_ids: list[int], *, has_probe: bool) -> dict[str, Any] | None:
    logits_TV = model(input_ids=torch.tensor([input_ids]), use_cache=False).logits[0]
    if not torch.isfinite(logits_TV).all():
        raise CheckpointError("the loaded model's logits aren't finite", where=folder, fix="make the model again")
    if not has_probe:
        return None
    figures = check_probe(folder, logits_TV)
    if not figures["agrees"]:
        raise CheckpointError(
            f"the loaded model isn't the one that was made: its logits ({str(logits_TV.dtype).removeprefix('torch.')}) "
            f"differ from verification.json by {figures['rms_difference']:.3g} of their spread "
            f"({figures['worst_position_difference']:.3g} at the worst position); "
            f"{figures['rms_tolerance']} ({figures['worst_position_tolerance']}) is allowed",
            where=folder,
            fix="the weights or config.json were changed or damaged after they were made: make the model again",
        )
    return figures


def main(arguments: list[str]) -> int:
    try:
        print(json.dumps(check_load(Path(arguments[0]))))
        return 0
    except FinetuneError as error:
        print(json.dumps({"error": {"what": error.what, "where": error.where, "fix": error.fix}}))
        return CheckpointError.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
