"""What is in a folder's model.gguf: whether it is whole, finite, and says the same as config.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from finetune.errors import CheckpointError
from finetune.model.gguf import ARCHITECTURES, GGUF_NAME, gguf_package, hyperparameters, read_gguf
from finetune.model.load import load_config

_PIECE_ELEMENTS = 2**22
FIX = "quantize the model again; model.gguf and config.json must belong to one model"


def gguf_tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{llama.cpp's tensor name: (type, shape)}. Raises CheckpointError for a file that is damaged."""
    reader = read_gguf(folder / GGUF_NAME)
    return {
        tensor.name: (tensor.tensor_type.name, tuple(int(size) for size in reversed(tensor.shape)))
        for tensor in reader.tensors
    }


def check_gguf_finite(folder: Path) -> None:
    """Raise CheckpointError naming the first tensor with NaN or infinity, in its blocks' scales too."""
    package = gguf_package()
    for tensor in read_gguf(folder / GGUF_NAME).tensors:
        rows = tensor.data.reshape(-1, tensor.data.shape[-1])
        step = max(1, _PIECE_ELEMENTS // rows.shape[1])
        for start in range(0, len(rows), step):
            values = package.dequantize(rows[start : start + step], tensor.tensor_type)
            if not np.isfinite(values.sum(dtype=np.float64)):
                raise CheckpointError(
                    f"the tensor {tensor.name} holds NaN or infinity", where=folder / GGUF_NAME, fix=FIX
                )


def check_gguf_metadata(folder: Path) -> None:
    """Raise CheckpointError where the file describes another model than config.json.

    llama.cpp goes by the one, ``verify`` by the other.
    """
    config = load_config(folder)
    reader = read_gguf(folder / GGUF_NAME)
    architecture = reader.get_field("general.architecture")
    found = architecture.contents() if architecture is not None else None
    kind = ARCHITECTURES.get(config.model_type)
    if kind is None or found != kind.name:
        raise CheckpointError(
            f"model.gguf holds the architecture {found}, config.json says {config.model_type}",
            where=folder / GGUF_NAME,
            fix=FIX,
        )
    for key, expected in hyperparameters(config).items():
        field = reader.get_field(f"{kind.name}.{key}")
        value: Any = field.contents() if field is not None else None
        if not _equal(value, expected):
            raise CheckpointError(
                f"{kind.name}.{key} is {value}, config.json asks for {expected}", where=folder / GGUF_NAME, fix=FIX
            )


def _equal(value: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(value, float):
        return math.isclose(value, expected, rel_tol=1e-6)
    return bool(value == expected)
