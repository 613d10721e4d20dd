"""The compressed-tensors format, which plain transformers and vLLM load: ``pack-quantized`` and ``int-quantized``.

pack-quantized: ``weight_packed`` int32 (O, ceil(I * bits / 32)), codes moved to 0.. and laid from the lowest bits of
each word up; ``weight_scale`` (O, G) in the model's dtype; ``weight_shape`` int64 [O, I]; asymmetric
``weight_zero_point`` int32 (ceil(O * bits / 32), G), packed down the columns.
int-quantized: ``weight`` int8 (O, I) and ``weight_scale`` (O, 1); ``input_scale`` (1,) where it is static.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.errors import MissingDependencyError, RecipeError
from finetune.model.packed import pack_words, unpack_words
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.layer_patterns import exact_patterns
from finetune.quant.methods import QuantizedWeight
from finetune.quant.plain_load import check_plain_load, kept_names
from finetune.quant.scheme import QuantScheme
from finetune.quant.shards import StoredTensor, write_model_config, write_shards
from finetune.quant.writers import WRITERS


def pack_codes(codes_OI: Tensor, num_bits: int) -> Tensor:
    """int8 codes → int32 words (O, ceil(I * num_bits / 32)); a last word is filled with zero bits."""
    return pack_words(codes_OI.to(torch.int32) + 2 ** (num_bits - 1), num_bits)


def unpack_codes(words_OW: Tensor, num_bits: int, in_features: int) -> Tensor:
    """The inverse of ``pack_codes``: int8 codes (O, in_features)."""
    return (unpack_words(words_OW, num_bits, in_features) - 2 ** (num_bits - 1)).to(torch.int8)


def packing(scheme: QuantScheme) -> str:
    """The format inside compressed-tensors."""
    return "pack-quantized" if scheme.activations is None else "int-quantized"


class CompressedTensorsWriter:
    def check(self, decoder: StreamedDecoder, schemes: Mapping[str, QuantScheme]) -> None:
        check_plain_load(decoder, schemes)
        distinct = set(schemes.values())
        if any(scheme.weights.num_bits not in (2, 4, 8) for scheme in distinct):
            _require_dense_packing()
        if all(scheme.weights.symmetric for scheme in distinct):
            return
        if len(distinct) > 1:
            raise RecipeError(
                "asymmetric weights beside another scheme can't be stored as compressed-tensors: transformers loads "
                "packed zero points only by dequantizing every layer, and does that by the first scheme alone",
                where="overrides",
                fix="use one scheme for all layers, or `symmetric: true`; `format: gptq` holds several asymmetric ones",
            )
        _require_dequantizing_load()

    def scale_dtype(self, scheme: QuantScheme, model_dtype: torch.dtype) -> torch.dtype:
        return model_dtype

    def tensors(self, layer: str, weight: QuantizedWeight, scheme: QuantScheme) -> dict[str, Tensor]:
        tensors = {f"{layer}.weight_scale": weight.scale.contiguous()}
        if packing(scheme) == "int-quantized":
            tensors[f"{layer}.weight"] = weight.codes.contiguous()
        else:
            tensors[f"{layer}.weight_packed"] = pack_codes(weight.codes, scheme.weights.num_bits)
            tensors[f"{layer}.weight_shape"] = torch.tensor(weight.codes.shape)
        if weight.zero_point is not None:
            words_GW = pack_codes(weight.zero_point.T, scheme.weights.num_bits)
            tensors[f"{layer}.weight_zero_point"] = words_GW.T.contiguous()
        if weight.input_scale is not None:
            # Layers that read one input share the tensor, which safetensors doesn't save twice.
            tensors[f"{layer}.input_scale"] = weight.input_scale.clone()
        return tensors

    def read(self, layer: str, tensors: dict[str, Tensor], scheme: QuantScheme) -> QuantizedWeight:
        scale_OG = tensors[f"{layer}.weight_scale"]
        if packing(scheme) == "int-quantized":
            return QuantizedWeight(
                tensors[f"{layer}.weight"], scale_OG, input_scale=tensors.get(f"{layer}.input_scale")
            )
        num_bits = scheme.weights.num_bits
        out_features, in_features = tensors[f"{layer}.weight_shape"].tolist()
        zero_point_OG = None
        if not scheme.weights.symmetric:
            words_WG = tensors[f"{layer}.weight_zero_point"]
            zero_point_OG = unpack_codes(words_WG.T, num_bits, out_features).T.contiguous()
        codes_OI = unpack_codes(tensors[f"{layer}.weight_packed"], num_bits, in_features)
        return QuantizedWeight(codes_OI, scale_OG, zero_point_OG)

    def tensor_names(self, layer: str, scheme: QuantScheme) -> list[str]:
        parts = ["weight", "weight_scale"]
        if packing(scheme) == "pack-quantized":
            parts = ["weight_packed", "weight_scale", "weight_shape"]
        if not scheme.weights.symmetric:
            parts.append("weight_zero_point")
        if scheme.activations is not None and not scheme.activations.dynamic:
            parts.append("input_scale")
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
        config = self.quantization_config(schemes, kept_names(decoder, kept))
        write_model_config(decoder, folder, quantization_config=config)
        return total

    def quantization_config(self, schemes: Mapping[str, QuantScheme], kept: list[str]) -> dict[str, Any]:
        """One config group a scheme. One scheme for all has the target ``Linear``, several name their layers."""
        import compressed_tensors
        from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus

        layers: dict[QuantScheme, list[str]] = {}
        for name, scheme in schemes.items():
            layers.setdefault(scheme, []).append(name)
        groups = {
            f"group_{index}": QuantizationScheme(
                targets=["Linear"] if len(layers) == 1 else [f"re:{pattern}" for pattern in exact_patterns(names)],
                weights=_weight_args(scheme),
                input_activations=_activation_args(scheme),
                format=packing(scheme),
            )
            for index, (scheme, names) in enumerate(layers.items())
        }
        formats = {packing(scheme) for scheme in layers}
        config = QuantizationConfig(
            config_groups=groups,
            # Without this status the file loads without an error, as if its codes were float weights.
            quantization_status=QuantizationStatus.COMPRESSED,
            format=formats.pop() if len(formats) == 1 else "mixed-precision",
            ignore=kept,
        )
        written = {"version": compressed_tensors.__version__, **config.model_dump(mode="json")}
        if not all(scheme.weights.symmetric for scheme in layers):
            # Without it transformers makes room for zero points that aren't packed, and refuses packed ones.
            written["dequantize"] = True
        return written


def _weight_args(scheme: QuantScheme) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(
        num_bits=scheme.weights.num_bits,
        type="int",
        symmetric=scheme.weights.symmetric,
        strategy=scheme.weights.strategy,
        group_size=scheme.weights.group_size,
        dynamic=False,
    )


def _activation_args(scheme: QuantScheme) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    if scheme.activations is None:
        return None
    return QuantizationArgs(
        num_bits=scheme.activations.num_bits,
        type="int",
        symmetric=scheme.activations.symmetric,
        strategy=scheme.activations.strategy,
        dynamic=scheme.activations.dynamic,
    )


def _require_dense_packing() -> None:
    """Earlier versions of compressed-tensors leave the bits that don't hold a whole code unused."""
    import compressed_tensors
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes_OI = torch.arange(32, dtype=torch.int8).remainder(8).sub(4).unsqueeze(0)
    if not torch.equal(pack_to_int32(codes_OI, 3), pack_codes(codes_OI, 3)):
        raise MissingDependencyError(
            f"compressed-tensors {compressed_tensors.__version__} packs 3-bit weights another way than later versions",
            fix="pip install --upgrade compressed-tensors",
        )


def _require_dequantizing_load() -> None:
    import transformers

    if "dequantize" not in inspect.signature(transformers.CompressedTensorsConfig.__init__).parameters:
        raise MissingDependencyError(
            f"transformers {transformers.__version__} can't load packed zero points, which asymmetric weights have",
            fix="pip install --upgrade transformers, or set `symmetric: true` or `format: gptq`",
        )


WRITERS.register("compressed-tensors")(CompressedTensorsWriter())
