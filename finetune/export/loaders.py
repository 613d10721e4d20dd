"""Who loads a model folder, by the ``quant_method`` of its config: one entry a method.

Plain transformers loads floats and every method that isn't in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from finetune.model.bitsandbytes import bitsandbytes_package
from finetune.model.load import load_model

Dtype = torch.dtype | Literal["auto"]


@dataclass(frozen=True)
class Loader:
    name: str
    """As ``verify`` reports it."""
    load: Callable[[Path, Dtype], Any]
    """``load(folder, dtype)``: the model on the CPU, in evaluation mode, computing in ``dtype`` ("auto": the stored
    one). Raises CheckpointError for a folder that isn't whole."""
    rounds: bool = False
    """Whether a load in the stored dtype computes more coarsely than that dtype says, so that the probe needs a load in
    its own dtype even where the two are the same."""


def _plain(folder: Path, dtype: Dtype) -> Any:
    return load_model(folder, dtype=dtype, device="cpu")


TRANSFORMERS = Loader("transformers", _plain)

LOADERS: dict[str, Loader] = {}


def _bitsandbytes(folder: Path, dtype: Dtype) -> Any:
    """As plain transformers does it with ``auto``; in a given dtype, computed from dequantized weights.

    bitsandbytes' own kernels round more than that dtype does (bfloat16 on processors with AVX512-BF16, inputs to int8
    under llm_int8), which would hide what is wrong with a weight.
    """
    model = load_model(folder, dtype=dtype, device="cpu")
    if dtype == "auto":
        return model
    package = bitsandbytes_package()
    for name, module in list(model.named_modules()):
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, package.nn.Linear4bit):
            weight.quant_state.dtype = dtype
            weight_OI = package.functional.dequantize_4bit(weight.data, weight.quant_state)
        elif isinstance(module, package.nn.Linear8bitLt):
            weight_OI = package.functional.int8_vectorwise_dequant(weight.data, weight.SCB)
        else:
            continue
        plain = torch.nn.Linear(module.in_features, module.out_features, device="meta")
        plain.weight = torch.nn.Parameter(weight_OI, requires_grad=False)
        plain.bias = module.bias
        model.set_submodule(name, plain)
    for parameter in model.parameters():  # transformers leaves those of a quantized model as they are stored
        parameter.data = parameter.data.to(dtype)
    return model.eval()


LOADERS["gptq"] = Loader("transformers, weights decoded by finetune", _plain)
LOADERS["bitsandbytes"] = Loader("transformers, bitsandbytes", _bitsandbytes, rounds=True)


def loader_of(config: Any) -> Loader:
    """The loader for a folder with this configuration (as ``load_config`` gives it)."""
    quantization = getattr(config, "quantization_config", None) or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return LOADERS.get(str(method), TRANSFORMERS)
