"""Who loads a model folder, by the ``quant_method`` of its config: one entry a method.

Plain transformers loads floats and every method that isn't in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from finetune.model.load import load_model

Dtype = torch.dtype | Literal["auto"]


@dataclass(frozen=True)
class Loader:
    name: str
    """As ``verify`` reports it."""
    load: Callable[[Path, Dtype], Any]
    """``load(folder, dtype)``: the model on the CPU, in evaluation mode, computing in ``dtype`` ("auto": the stored
    one). Raises CheckpointError for a folder that isn't whole."""


def _plain(folder: Path, dtype: Dtype) -> Any:
    return load_model(folder, dtype=dtype, device="cpu")


TRANSFORMERS = Loader("transformers", _plain)

LOADERS: dict[str, Loader] = {}


def loader_of(config: Any) -> Loader:
    """The loader for a folder with this configuration (as ``load_config`` gives it)."""
    quantization = getattr(config, "quantization_config", None) or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return LOADERS.get(str(method), TRANSFORMERS)
