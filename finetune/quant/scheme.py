"""QuantScheme: what is stored for a quantized layer, as data. How the numbers are found is a method's business."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Strategy = Literal["group", "channel"]


@dataclass(frozen=True)
class WeightArgs:
    """Weights of a Linear, stored as ``num_bits`` integers with one scale a group of input features (or a row)."""

    num_bits: int
    symmetric: bool
    strategy: Strategy
    group_size: int | None
    """Input features that share a scale; None with strategy ``channel``, where a whole row shares it."""

    @property
    def code_min(self) -> int:
        return -(2 ** (self.num_bits - 1))

    @property
    def code_max(self) -> int:
        return 2 ** (self.num_bits - 1) - 1

    def num_groups(self, in_features: int) -> int:
        return 1 if self.group_size is None else in_features // self.group_size


@dataclass(frozen=True)
class ActivationArgs:
    """Inputs of a Linear, rounded at run time with one symmetric scale a token, found from that token."""

    num_bits: int
    symmetric: bool = True
    strategy: Literal["token"] = "token"
    dynamic: bool = True


@dataclass(frozen=True)
class QuantScheme:
    name: str
    weights: WeightArgs
    activations: ActivationArgs | None
    format: str
    """The storage format inside compressed-tensors: ``pack-quantized`` or ``int-quantized``."""


SCHEMES = {
    "w4a16": QuantScheme("w4a16", WeightArgs(4, True, "group", 128), None, "pack-quantized"),
    "w8a16": QuantScheme("w8a16", WeightArgs(8, True, "channel", None), None, "pack-quantized"),
    "w8a8": QuantScheme("w8a8", WeightArgs(8, True, "channel", None), ActivationArgs(8), "int-quantized"),
}


def scheme_with(name: str, *, group_size: int | None) -> QuantScheme:
    """The named scheme with its weights grouped by ``group_size`` (None: one scale a row)."""
    scheme = SCHEMES[name]
    strategy: Strategy = "channel" if group_size is None else "group"
    return replace(scheme, weights=replace(scheme.weights, strategy=strategy, group_size=group_size))
