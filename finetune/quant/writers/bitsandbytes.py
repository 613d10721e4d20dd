"""bitsandbytes' format, which plain transformers loads: what it would have written for the same model, bit by bit.

4 bits: ``weight`` uint8 (O * I / 2, 1), ``weight.absmax`` float32 (one a block of 64), ``weight.quant_map`` float32
(16,), and a JSON text as uint8, ``weight.quant_state.bitsandbytes__nf4``. 8 bits: ``weight`` int8 (O, I), ``SCB``
float32 (O,), ``weight_format``, a 0.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from finetune.errors import RecipeError
from finetune.model.bitsandbytes import bitsandbytes_package
from finetune.quant.bitsandbytes_types import BLOCK_SIZE, pack_nibbles, table_of, unpack_nibbles
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.layers import linear_names
from finetune.quant.methods import QuantizedWeight
from finetune.quant.scheme import QuantScheme
from finetune.quant.shards import StoredTensor, stored_tensors, write_model_config, write_shards
from finetune.quant.writers import WRITERS

_ROWS_OF_CPU_KERNEL = 32
"""Rows that bitsandbytes' kernel for processors with AVX512-BF16 computes at once; it has no rest."""
LLM_INT8_THRESHOLD = 6.0
"""Inputs at least this large stay in floats: transformers' default."""


class BitsAndBytesWriter:
    def check(self, decoder: StreamedDecoder, schemes: Mapping[str, QuantScheme]) -> None:
        from transformers.quantizers.quantizers_utils import should_convert_module

        bitsandbytes_package()
        names = sorted({scheme.name for scheme in schemes.values()})
        if len(names) > 1:
            raise RecipeError(
                f"bitsandbytes stores a model in one scheme, not in {' and '.join(names)}",
                fix="leave out `overrides`, or put these layers in `ignore`",
            )
        layers = linear_names(decoder.model)
        kept = [name for name in layers if name not in schemes]
        for name, module in layers.items():
            num_outputs, num_inputs = _size_of(module)
            if should_convert_module(name, kept) != (name in schemes):
                raise RecipeError(
                    f"transformers can't keep {', '.join(kept)} without {name}: bitsandbytes' list of layers to keep "
                    "is matched by the end of a name too",
                    fix=f"put {name} in `ignore` as well",
                )
            if name not in schemes or names == ["llm_int8"]:
                continue
            if num_inputs % BLOCK_SIZE or num_outputs % _ROWS_OF_CPU_KERNEL:
                raise RecipeError(
                    f"{name} has {num_inputs} inputs and {num_outputs} outputs: {names[0]} needs a multiple of "
                    f"{BLOCK_SIZE} and of {_ROWS_OF_CPU_KERNEL}, or bitsandbytes can't compute it on every device",
                    fix=f"put {name} in `ignore`",
                )

    def scale_dtype(self, scheme: QuantScheme, model_dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def tensors(self, layer: str, weight: QuantizedWeight, scheme: QuantScheme) -> dict[str, Tensor]:
        if scheme.weights.type == "llm_int8":
            return {
                f"{layer}.weight": weight.codes.contiguous(),
                f"{layer}.SCB": weight.scale.flatten(),
                f"{layer}.weight_format": torch.tensor(0, dtype=torch.uint8),
            }
        return {
            # In rows here, so that ``read`` knows its shape; ``publish`` makes it bitsandbytes' one column.
            f"{layer}.weight": pack_nibbles(weight.codes).view(len(weight.codes), -1),
            f"{layer}.weight.absmax": weight.scale.flatten(),
            f"{layer}.weight.quant_map": table_of(weight.type),
        }

    def read(self, layer: str, tensors: dict[str, Tensor], scheme: QuantScheme) -> QuantizedWeight:
        kind = scheme.weights.type
        stored = tensors[f"{layer}.weight"]
        if kind == "llm_int8":
            return QuantizedWeight(stored, tensors[f"{layer}.SCB"].unsqueeze(1), type=kind)
        codes_OI = unpack_nibbles(stored, torch.Size([len(stored), 2 * stored.shape[1]]))
        return QuantizedWeight(codes_OI, tensors[f"{layer}.weight.absmax"].view(len(stored), -1), type=kind)

    def tensor_names(self, layer: str, scheme: QuantScheme) -> list[str]:
        if scheme.weights.type == "llm_int8":
            return [f"{layer}.{part}" for part in ("weight", "SCB", "weight_format")]
        return [f"{layer}.{part}" for part in ("weight", "weight.absmax", "weight.quant_map")]

    def publish(
        self,
        folder: Path,
        tensors: Sequence[StoredTensor],
        *,
        decoder: StreamedDecoder,
        schemes: Mapping[str, QuantScheme],
        kept: list[str],
        max_shard_size_bytes: int,
    ) -> int:
        scheme = next(iter(schemes.values()))
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            if scheme.weights.type != "llm_int8":
                tensors = _with_states(tensors, schemes, decoder.dtype, Path(scratch) / "states.safetensors")
            total = write_shards(tensors, folder, max_shard_size_bytes=max_shard_size_bytes)
        config = quantization_config(scheme, decoder.dtype, kept)
        write_model_config(decoder, folder, quantization_config=config)
        return total


def _size_of(layer: torch.nn.Module) -> tuple[int, int]:
    """(out features, in features) of a Linear, or of GPT-2's Conv1D, which holds its weight the other way round."""
    num_outputs, num_inputs = layer.get_parameter("weight").shape
    return (num_outputs, num_inputs) if isinstance(layer, torch.nn.Linear) else (num_inputs, num_outputs)


def _with_states(
    tensors: Sequence[StoredTensor], schemes: Mapping[str, QuantScheme], dtype: torch.dtype, file: Path
) -> list[StoredTensor]:
    """``tensors`` in their final shapes, with the descriptions that bitsandbytes keeps beside its 4-bit weights."""
    weights = {f"{layer}.weight": scheme.weights.type for layer, scheme in schemes.items()}
    states = {}
    for tensor in tensors:
        if tensor.name in weights:
            kind = weights[tensor.name]
            shape = torch.Size([tensor.shape[0], 2 * tensor.shape[1]])
            state = bitsandbytes_package().functional.QuantState(
                torch.empty(0), shape=shape, code=torch.empty(0), blocksize=BLOCK_SIZE, quant_type=kind, dtype=dtype
            )
            key = f"quant_state.bitsandbytes__{kind}"
            states[f"{tensor.name}.{key}"] = state.as_dict(packed=True)[key]
    save_file(states, file)
    stored = stored_tensors(file)
    finished = []
    for tensor in tensors:
        if tensor.name in weights:
            tensor = replace(tensor, shape=[tensor.num_bytes, 1])
        finished.append(tensor)
        if tensor.name in weights:
            finished.append(stored[f"{tensor.name}.quant_state.bitsandbytes__{weights[tensor.name]}"])
    return finished


def quantization_config(scheme: QuantScheme, dtype: torch.dtype, kept: list[str]) -> dict[str, Any]:
    """As transformers writes it. 4-bit layers compute in the model's own ``dtype``."""
    from transformers import BitsAndBytesConfig

    if scheme.weights.type == "llm_int8":
        config = BitsAndBytesConfig(
            load_in_8bit=True, llm_int8_threshold=LLM_INT8_THRESHOLD, llm_int8_skip_modules=kept
        )
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=scheme.weights.type,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=kept,
        )
    described: dict[str, Any] = config.to_dict()
    return described


WRITERS.register("bitsandbytes")(BitsAndBytesWriter())
