"""The GPTQ format (``finetune.model.gptq`` has its layout), which GPTQModel, vLLM, SGLang and ExLlama run.

Symmetric weights are written as ``checkpoint_format: gptq``, which every loader reads. Asymmetric ones as ``gptq_v2``:
GPTQModel, and with it transformers, refuses asymmetric ``gptq`` files that it didn't make itself, as old tools let the
stored zero - 1 run over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune import __version__
from finetune.errors import RecipeError
from finetune.model.gptq import PARTS, GptqArgs, pack_layer, unpack_layer
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.layer_patterns import exact_patterns
from finetune.quant.layers import FUSED, linear_names
from finetune.quant.methods import QuantizedWeight
from finetune.quant.scheme import QuantScheme
from finetune.quant.shards import StoredTensor, write_model_config, write_shards
from finetune.quant.writers import WRITERS

GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""What loaders have kernels for, besides one group a row."""
FUSED_NAMES = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
"""What vLLM calls the layer that it joins others to, by the first of them: it looks that name up in ``dynamic``."""


def args_of(scheme: QuantScheme) -> GptqArgs:
    weights = scheme.weights
    return GptqArgs(weights.num_bits, weights.group_size, zero_offset=1 if weights.symmetric else 0)


class GptqWriter:
    def check(self, decoder: StreamedDecoder, schemes: Mapping[str, QuantScheme]) -> None:
        if len({scheme.weights.symmetric for scheme in schemes.values()}) > 1:
            raise RecipeError(
                "symmetric and asymmetric layers can't be in one folder of the GPTQ format: one way of storing zero "
                "points holds for all of it",
                where="overrides",
                fix="set `symmetric` alike everywhere",
            )
        linears = linear_names(decoder.model)
        for name, scheme in schemes.items():
            weights = scheme.weights
            if weights.group_size not in (None, *GROUP_SIZES):
                raise RecipeError(
                    f"loaders of the GPTQ format know no group_size {weights.group_size}",
                    where=decoder.folder,
                    fix=f"use one of {', '.join(map(str, GROUP_SIZES))}, or null",
                )
            multiple = 32 // math.gcd(weights.num_bits, 32)
            sizes = (linears[name].in_features, linears[name].out_features)
            if any(size % multiple for size in sizes):
                raise RecipeError(
                    f"{name} has {sizes[0]} inputs and {sizes[1]} outputs; the GPTQ format holds "
                    f"{weights.num_bits}-bit weights only in multiples of {multiple}",
                    where=decoder.folder,
                    fix="put the layer in `ignore`, or use `format: compressed-tensors`",
                )

    def scale_dtype(self, scheme: QuantScheme, model_dtype: torch.dtype) -> torch.dtype:
        return torch.float16

    def tensors(self, layer: str, weight: QuantizedWeight, scheme: QuantScheme) -> dict[str, Tensor]:
        middle = 2 ** (scheme.weights.num_bits - 1)
        codes_OI = weight.codes.to(torch.int32) + middle
        zeros_OG = torch.full(weight.scale.shape, middle, dtype=torch.int32)
        if weight.zero_point is not None:
            zeros_OG = weight.zero_point.to("cpu", torch.int32) + middle
        packed = pack_layer(codes_OI.cpu(), zeros_OG, weight.scale.cpu(), args_of(scheme))
        return {f"{layer}.{part}": tensor for part, tensor in packed.items()}

    def read(self, layer: str, tensors: dict[str, Tensor], scheme: QuantScheme) -> QuantizedWeight:
        stored = {part: tensors[f"{layer}.{part}"] for part in PARTS}
        codes_OI, zeros_OG, scale_OG = unpack_layer(stored, args_of(scheme))
        middle = 2 ** (scheme.weights.num_bits - 1)
        zero_point_OG = None if scheme.weights.symmetric else (zeros_OG - middle).to(torch.int8).contiguous()
        return QuantizedWeight((codes_OI - middle).to(torch.int8), scale_OG.contiguous(), zero_point_OG)

    def tensor_names(self, layer: str, scheme: QuantScheme) -> list[str]:
        return [f"{layer}.{part}" for part in PARTS]

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
        in_blocks = [name for name in kept if name.startswith(decoder.blocks_name + ".")]
        written = {
            name: decoder.names.written_name(f"{name}.weight").removesuffix(".weight")
            for name in (*schemes, *in_blocks)
        }
        write_model_config(decoder, folder, quantization_config=self.quantization_config(schemes, in_blocks, written))
        return total

    def quantization_config(
        self, schemes: Mapping[str, QuantScheme], kept: list[str], written: Mapping[str, str]
    ) -> dict[str, Any]:
        """The commonest scheme as the common one, the others and ``kept`` layers of the blocks in ``dynamic``.

        ``written``: what the files call each layer, where transformers' name is another; patterns match both.
        """

        def patterns(names: list[str]) -> list[str]:
            return exact_patterns(dict.fromkeys([*names, *_fused_names(names), *(written[name] for name in names)]))

        common = Counter(schemes.values()).most_common(1)[0][0]
        dynamic: dict[str, dict[str, Any]] = {}
        for pattern in patterns(kept):
            dynamic[f"-:^{pattern}"] = {}
        for scheme in dict.fromkeys(schemes.values()):
            if scheme != common:
                names = [name for name, other in schemes.items() if other == scheme]
                for pattern in patterns(names):
                    dynamic[f"+:^{pattern}"] = _config_values(scheme)
        return {
            "quant_method": "gptq",
            **_config_values(common),
            # Groups are neighbouring inputs, whatever order they were rounded in.
            "desc_act": False,
            "static_groups": True,
            "checkpoint_format": "gptq" if common.weights.symmetric else "gptq_v2",
            "pack_dtype": "int32",
            "lm_head": False,
            **({"dynamic": dynamic} if dynamic else {}),
            "meta": {"quantizer": [f"finetune:{__version__}"]},
        }


def _config_values(scheme: QuantScheme) -> dict[str, Any]:
    weights = scheme.weights
    return {
        "bits": weights.num_bits,
        "group_size": -1 if weights.group_size is None else weights.group_size,
        "sym": weights.symmetric,
    }


def _fused_names(names: list[str]) -> list[str]:
    known = set(names)
    fused = []
    for name in names:
        parent, _, last = name.rpartition(".")
        parts = next((parts for parts in FUSED if parts[0] == last), ())
        if last in FUSED_NAMES and all(f"{parent}.{part}" in known for part in parts):
            fused.append(f"{parent}.{FUSED_NAMES[last]}")
    return fused


WRITERS.register("gptq")(GptqWriter())
