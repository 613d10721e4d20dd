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
from finetune.export.loaders import loader_of
from finetune.model.load import load_config
from finetune.model.probe import check_probe, probe_input_ids, read_probe


def check_load(folder: Path) -> dict[str, Any]:
    """Load ``folder`` on the CPU and run it: with plain transformers, or as ``loaders.LOADERS`` has it.

    Loaded first as it is stored, which must give finite logits; then, where the probe was computed otherwise, as the
    probe was: in float32, whose logits tell far smaller faults than bfloat16 ones, and with activations left in floats
    where the scheme quantizes them. Returns {"loader" (its name), "dtype" (as stored), "probe": figures of
    ``check_probe``, None without}.
    Raises CheckpointError for a folder that doesn't load whole, logits that aren't finite or differ from the probe.
    """
    probe = read_probe(folder)
    config = load_config(folder)
    input_ids = probe.input_ids if probe else probe_input_ids(config.get_text_config().vocab_size)
    loader = loader_of(config)
    model: Any = loader.load(folder, "auto")
    stored_dtype = model.dtype
    logits_TV = _logits(folder, model, input_ids)
    report: dict[str, Any] = {
        "loader": loader.name,
        "dtype": str(stored_dtype).removeprefix("torch."),
        "probe": None,
    }
    if probe is None:
        return report
    probe_dtype = getattr(torch, probe.dtype)
    rounds_activations = quantizes_activations(config)
    if rounds_activations and not probe.float_activations:
        report["probe"] = _require_agreement(folder, logits_TV, quantized_activations=True)
        return report
    if loader.rounds or rounds_activations or probe_dtype != stored_dtype:
        del model
        model = loader.load(folder, probe_dtype)
        if rounds_activations:
            _leave_activations(model)
        logits_TV = _logits(folder, model, input_ids)
    report["probe"] = _require_agreement(folder, logits_TV)
    return report


def quantizes_activations(config: Any) -> bool:
    """Whether a config's quantization scheme rounds the inputs of some layer."""
    quantization = getattr(config, "quantization_config", None) or {}
    groups = quantization.get("config_groups") or {} if isinstance(quantization, dict) else {}
    return any(group.get("input_activations") for group in groups.values())


def _leave_activations(model: torch.nn.Module) -> None:
    """Switch compressed-tensors' rounding off; what is left to round in a loaded model is activations.

    Loading with ``dequantize=True`` would leave them too, but computes the weights in the scales' bfloat16.
    """
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            setattr(module, "quantization_enabled", False)  # noqa: B010 (mypy takes it for a Module's child)


@torch.inference_mode()
def _logits(folder: Path, model: Any, input_ids: list[int]) -> torch.Tensor:
    logits_TV: torch.Tensor = model(input_ids=torch.tensor([input_ids]), use_cache=False).logits[0]
    if not torch.isfinite(logits_TV).all():
        raise CheckpointError("the loaded model's logits aren't finite", where=folder, fix="make the model again")
    return logits_TV


def _require_agreement(folder: Path, logits_TV: torch.Tensor, *, quantized_activations: bool = False) -> dict[str, Any]:
    figures = check_probe(folder, logits_TV, quantized_activations=quantized_activations)
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
