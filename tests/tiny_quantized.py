"""Tiny quantized folders made by compressed-tensors itself, so that the reading side is tested on what others write."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tiny_quantized(source: Path, out: Path, *, scheme: str, group_size: int = 32, max_shard_size: str = "5GB") -> Path:
    """Quantize the Linear layers of ``source`` but the head, round to nearest: scheme ``w4a16``, ``w8a16`` or ``w8a8``.

    ``out`` gets a probe of the float32 logits of the model with fake-quantized weights and float activations.
    """
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finetune.model.probe import probe_input_ids, write_probe

    num_bits = 4 if scheme == "w4a16" else 8
    weights: dict[str, Any] = {"num_bits": num_bits, "type": "int", "symmetric": True, "strategy": "channel"}
    if scheme == "w4a16":
        weights |= {"strategy": "group", "group_size": group_size}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if scheme == "w8a8":
        group["input_activations"] = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"], quantization_status="frozen")
    stored_dtype = AutoModelForCausalLM.from_pretrained(source, dtype="auto").dtype
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    apply_quantization_config(model, config, show_progress=False)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                rows = module.weight.unflatten(1, (-1, group_size if scheme == "w4a16" else module.weight.shape[1]))
                scale = rows.abs().amax(dim=-1) / (2 ** (num_bits - 1) - 1)
                # The scale as it will be stored, so that the probe and the file agree.
                module.weight_scale.data = scale.to(stored_dtype).float()
        ids = probe_input_ids(model.config.vocab_size)
        applied = [module.quantization_scheme for module in model.modules() if hasattr(module, "weight_scale")]
        activations = [one.input_activations for one in applied]
        for one in applied:
            one.input_activations = None
        logits_TV = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        for one, arguments in zip(applied, activations, strict=True):
            one.input_activations = arguments
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if parameter.is_floating_point() and "inv_freq" not in name:
            parameter.data = parameter.data.to(stored_dtype)
    model.config.dtype = stored_dtype
    model.save_pretrained(out, max_shard_size=max_shard_size)
    compressor.update_config(str(out))
    AutoTokenizer.from_pretrained(source).save_pretrained(out)
    write_probe(out, ids, logits_TV, float_activations=scheme == "w8a8")
    return out
