"""QuantScheme: what is stored for a quantized layer, as data. How the numbers are found is a method's business."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Strategy = Literal["group", "channel"]
WeightType = Literal["int", "nf4", "fp4", "llm_int8", "q4_k"]


@dataclass(frozen=True)
class WeightArgs:
    """Weights of a layer, stored as codes of ``num_bits`` with one scale a group of input features (or a row).

    Codes of type ``int`` are signed whole numbers: weight = (code - zero_point) * scale, the zero point 0 where
    ``symmetric``. The other types have a rule of their own, see ``finetune.quant.block_types``.
    """

    num_bits: int
    symmetric: bool
    strategy: Strategy
    group_size: int | None
    """Input features that share a scale; None with strategy ``channel``, where a whole row shares it."""
    type: WeightType = "int"

    @property
    def code_min(self) -> int:
        return -(2 ** (self.num_bits - 1)) if self.type == "int" else 0

    @property
    def code_max(self) -> int:
        return 2 ** (self.num_bits - 1) - 1 if self.type == "int" else 2**self.num_bits - 1

    def num_groups(self, in_features: int) -> int:
        return 1 if self.group_size is None else in_features // self.group_size


@dataclass(frozen=True)
class ActivationArgs:
    """Inputs of a layer, rounded to integers with a symmetric scale: one a token, found at run time, or one a layer."""

    num_bits: int
    symmetric: bool = True
    strategy: Literal["token", "tensor"] = "token"
    dynamic: bool = True
    """Whether the scale is found at run time; else calibration finds it and it is stored."""


@dataclass(frozen=True)
class QuantScheme:
    name: str
    weights: WeightArgs
    activations: ActivationArgs | None
    formats: tuple[str, ...]
    """The storage formats (names of ``finetune.quant.writers``) that hold it, the default first."""
    methods: tuple[str, ...] | None = None
    """The methods that can find its codes, the default first; None: every one."""


def _int(num_bits: int, group_size: int | None) -> WeightArgs:
    return WeightArgs(num_bits, True, "channel" if group_size is None else "group", group_size)


_PACKED = ("compressed-tensors", "gptq", "gguf")

SCHEMES = {
    scheme.name: scheme
    for scheme in (
        QuantScheme("w4a16", _int(4, 128), None, _PACKED),
        QuantScheme("w8a16", _int(8, None), None, _PACKED),
        QuantScheme("w3a16", _int(3, 128), None, ("compressed-tensors", "gptq")),
        QuantScheme("w2a16", _int(2, 64), None, ("compressed-tensors", "gptq")),
        QuantScheme("w8a8", _int(8, None), ActivationArgs(8), ("compressed-tensors",)),
        QuantScheme(
            "w8a8_static",
            _int(8, None),
            ActivationArgs(8, strategy="tensor", dynamic=False),
            ("compressed-tensors",),
        ),
        QuantScheme("nf4", WeightArgs(4, True, "group", 64, "nf4"), None, ("bitsandbytes",), ("rtn",)),
        QuantScheme("fp4", WeightArgs(4, True, "group", 64, "fp4"), None, ("bitsandbytes",), ("rtn",)),
        QuantScheme("llm_int8", WeightArgs(8, True, "channel", None, "llm_int8"), None, ("bitsandbytes",), ("rtn",)),
        QuantScheme("q4_k", WeightArgs(4, True, "group", 32, "q4_k"), None, ("gguf",), ("rtn",)),
    )
}


def scheme_with(name: str, *, group_size: int | None, symmetric: bool = True) -> QuantScheme:
    """The named scheme with its weights grouped by ``group_size`` (None: one scale a row)."""
    scheme = SCHEMES[name]
    strategy: Strategy = "channel" if group_size is None else "group"
    weights = replace(scheme.weights, strategy=strategy, group_size=group_size, symmetric=symmetric)
    return replace(scheme, weights=weights)
