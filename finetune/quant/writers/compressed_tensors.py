"""The compressed-tensors format, which plain transformers and vLLM load: ``pack-quantized`` and ``int-quantized``.

pack-quantized: ``weight_packed`` int32 (O, ceil(I * bits / 32)), codes moved to 0.. and laid from the lowest bits of
each word up; ``weight_scale`` (O, G) in the model's dtype; ``weight_shape`` int64 [O, I].
int-quantized: ``weight`` int8 (O, I) and ``weight_scale`` (O, 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.errors import RecipeError
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.methods import QuantizedWeight
from finetune.quant.scheme import QuantScheme
from finetune.quant.shards import StoredTensor, write_model_config, write_shards
from finetune.quant.writers import WRITERS


def pack_codes(codes_OI: Tensor, num_bits: int) -> Tensor:
    """int8 codes → int32 words (O, ceil(I * num_bits / 32)), for 4 and 8 bits; a last word is filled with zero bits."""
    codes_OI = codes_OI.to(torch.int32) + 2 ** (num_bits - 1)
    per_word = 32 // num_bits
    codes_OI = torch.nn.functional.pad(codes_OI, (0, -codes_OI.shape[1] % per_word))
    words_OW = torch.zeros(codes_OI.shape[0], codes_OI.shape[1] // per_word, dtype=torch.int32, device=codes_OI.device)
    for position in range(per_word):
        words_OW |= codes_OI[:, position::per_word] << (position * num_bits)
    return words_OW


def unpack_codes(words_OW: Tensor, num_bits: int, in_features: int) -> Tensor:
    """The inverse of ``pack_codes``: int8 codes (O, in_features)."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    codes_OI = ((words_OW.unsqueeze(-1) >> shifts) & (2**num_bits - 1)).flatten(1)[:, :in_features]
    return (codes_OI - 2 ** (num_bits - 1)).to(torch.int8)


def packing(scheme: QuantScheme) -> str:
    """The format inside compressed-tensors."""
    return "pack-quantized" if scheme.activations is None else "int-quantized"


class CompressedTensorsWriter:
    def check(self, decoder: StreamedDecoder, schemes: Mapping[str, QuantScheme]) -> None:
        if not all(scheme.weights.symmetric for scheme in schemes.values()):
            raise RecipeError(
                "asymmetric weights can't be stored as compressed-tensors: plain transformers can't load their packed "
                "zero points (they don't fit the shape that compressed-tensors prepares)",
                fix="choose a symmetric scheme",
            )

    def scale_dtype(self, scheme: QuantScheme, model_dtype: torch.dtype) -> torch.dtype:
        return model_dtype

    def tensors(self, layer: str, weight: QuantizedWeight, scheme: QuantScheme) -> dict[str, Tensor]:
        scale_OG = weight.scale.contiguous()
        if packing(scheme) == "int-quantized":
            return {f"{layer}.weight": weight.codes.contiguous(), f"{layer}.weight_scale": scale_OG}
        return {
            f"{layer}.weight_packed": pack_codes(weight.codes, scheme.weights.num_bits),
            f"{layer}.weight_scale": scale_OG,
            f"{layer}.weight_shape": torch.tensor(weight.codes.shape),
        }

    def read(self, layer: str, tensors: dict[str, Tensor], scheme: QuantScheme) -> QuantizedWeight:
        scale_OG = tensors[f"{layer}.weight_scale"]
        if packing(scheme) == "int-quantized":
            return QuantizedWeight(tensors[f"{layer}.weight"], scale_OG)
        in_features = int(tensors[f"{layer}.weight_shape"][1])
        codes_OI = unpack_codes(tensors[f"{layer}.weight_packed"], scheme.weights.num_bits, in_features)
        return QuantizedWeight(codes_OI, scale_OG)

    def tensor_names(self, layer: str, scheme: QuantScheme) -> list[str]:
        parts = ["weight", "weight_scale"]
        if packing(scheme) == "pack-quantized":
            parts = ["weight_packed", "weight_scale", "weight_shape"]
        return [f"{layer}.{part}" for part in parts]

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
        total = write_shards(tensors, folder, max_shard_size_bytes=max_shard_size_bytes)
        config = self.quantization_config(next(iter(schemes.values())), kept)
        write_model_config(decoder, folder, quantization_config=config)
        return total

    def quantization_config(self, scheme: QuantScheme, ignore: list[str]) -> dict[str, Any]:
        import compressed_tensors
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationConfig,
            QuantizationScheme,
            QuantizationStatus,
        )

        weights = QuantizationArgs(
            num_bits=scheme.weights.num_bits,
            type="int",
            symmetric=scheme.weights.symmetric,
            strategy=scheme.weights.strategy,
            group_size=scheme.weights.group_size,
            dynamic=False,
        )
        activations = None
        if scheme.activations is not None:
            activations = QuantizationArgs(
                num_bits=scheme.activations.num_bits,
                type="int",
                symmetric=scheme.activations.symmetric,
                strategy=scheme.activations.strategy,
                dynamic=scheme.activations.dynamic,
            )
        group = QuantizationScheme(
            targets=["Linear"], weights=weights, input_activations=activations, format=packing(scheme)
        )
        config = QuantizationConfig(
            config_groups={"group_0": group},
            # Without this status the file loads without an error, as if its codes were float weights.
            quantization_status=QuantizationStatus.COMPRESSED,
            format=packing(scheme),
            ignore=ignore,
        )
        return {"version": compressed_tensors.__version__, **config.model_dump(mode="json")}


WRITERS.register("compressed-tensors")(CompressedTensorsWriter())
