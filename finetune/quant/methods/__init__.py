"""How codes and scales are found, one algorithm a file, named as in the recipe. Pure maths: no hooks, no files.

A method registers a ``QuantMethod``; nothing here imports torch, so that a recipe can be checked without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from finetune.config.registry import Registry
from finetune.quant.scheme import WeightType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class QuantizedWeight:
    """The stored form of a weight: ``(codes - zero_point) * scale``, each scale over its group of input features.

    Types other than ``int`` give codes and scale a meaning of their own, see ``finetune.quant.block_types``.
    """

    codes: Tensor
    """int8 (O, I), within the scheme's range."""
    scale: Tensor
    """(O, G), in the dtype in which it is stored; may be negative, never 0."""
    zero_point: Tensor | None = None
    """int8 (O, G), within the range of the codes; None for symmetric weights."""
    input_scale: Tensor | None = None
    """(1,), in the dtype in which it is stored: the scale of the layer's input where the scheme keeps a static one."""
    type: WeightType = "int"
    damp: float | None = None
    """Fraction of the mean of the Hessian's diagonal that was added to it; None where no Hessian was used."""
    clip: dict[str, float] = field(default_factory=dict)
    """``mean_ratio`` of the scales to the unclipped ones and ``clipped_fraction`` of groups with a smaller one."""


@dataclass(frozen=True)
class QuantMethod:
    needs_calibration: bool
    quantize: Callable[..., QuantizedWeight]
    """``quantize(weight_OI, hessian_II or None, *, weights: WeightArgs, scale_dtype, damp, act_order)``, float32."""
    scales_inputs: bool = False
    """Whether inputs that stay floats are scaled, as ``smoothing`` scales int8 ones."""
    makes_up_for_drift: bool = False
    """Whether the weights to round are those that make up for what earlier rounding did to the layer's inputs."""
    learns: bool = False
    """Whether ``learned_rounding`` goes on from the codes that ``quantize`` finds."""


METHODS: Registry[QuantMethod] = Registry("quantization method", package="finetune.quant.methods")
