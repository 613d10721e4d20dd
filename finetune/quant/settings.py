"""The ``quantize:`` section of a recipe."""

from __future__ import annotations

import pkgutil
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from finetune.config.section import Section
from finetune.config.size import parse_size
from finetune.data.settings import DatasetSettings
from finetune.errors import RecipeError, did_you_mean
from finetune.quant import methods
from finetune.quant.scheme import SCHEMES


class CalibrationSettings(Section):
    data: list[DatasetSettings] = Field(min_length=1)
    """Where the calibration text comes from; conversations are rendered by the model's own chat template."""
    num_samples: int = Field(128, gt=0)
    """Sequences of ``max_seq_length`` tokens; rows are joined, so a short row costs nothing and none is dropped."""
    max_seq_length: int = Field(512, gt=0)
    micro_batch_size: int = Field(8, gt=0)
    """Sequences in one forward; changes memory and speed."""


class QuantizeSettings(Section):
    scheme: str = "w4a16"
    """What is stored: w4a16 (int4 weights), w8a16 (int8 weights), w8a8 (int8 weights, int8 inputs a token)."""
    method: str = "gptq"
    """How the codes are found: gptq (needs calibration) or rtn (round to nearest, needs none)."""
    group_size: int | None = Field(None, gt=0)
    """Input features that share a scale. Default 128 for w4a16; null, one scale an output channel, for 8 bits."""
    symmetric: bool = True
    """Without a zero point. Asymmetric weights are refused: plain transformers can't load them."""
    ignore: list[str] = Field(["lm_head"])
    """Linear layers kept as they are: a full name, its last part, a name above it, a glob, or ``re:`` a pattern."""
    calibration: CalibrationSettings | None = None
    damp: float = Field(0.01, gt=0, le=1)
    """Added to the Hessian's diagonal, as a fraction of its mean; raised (and reported) when that isn't enough."""
    act_order: bool = True
    """Quantize the columns of the largest inputs first; costs nothing at inference."""
    true_sequential: bool = True
    """Within a block, let a layer's Hessian see the block's earlier layers already quantized."""
    smoothing: Annotated[float, Field(ge=0, le=1)] | Literal["search"] | None = "search"
    """For int8 inputs, with calibration: how much of an input's outliers moves into the weights; null moves nothing,
    ``search`` chooses for each input."""
    max_shard_size: str = "5GB"
    """Size limit of one weight file of the result."""

    @property
    def max_shard_size_bytes(self) -> int:
        return parse_size(self.max_shard_size, where="max_shard_size")

    @model_validator(mode="before")
    @classmethod
    def _default_group_size(cls, value: Any) -> Any:
        if isinstance(value, dict) and "group_size" not in value:
            scheme = SCHEMES.get(value.get("scheme", "w4a16"))
            return {**value, "group_size": scheme.weights.group_size if scheme else None}
        return value

    @field_validator("scheme")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if value not in SCHEMES:
            raise ValueError(did_you_mean(value, SCHEMES))
        return value

    @field_validator("method")
    @classmethod
    def _known_method(cls, value: str) -> str:
        names = [module.name for module in pkgutil.iter_modules(methods.__path__)]
        if value not in names:
            raise ValueError(did_you_mean(value, names))
        return value

    @field_validator("symmetric")
    @classmethod
    def _no_zero_points(cls, value: bool) -> bool:
        if not value:
            raise ValueError(
                "asymmetric weights are refused, because plain transformers can't load their packed zero points "
                "(they don't fit the shape that compressed-tensors prepares); leave `symmetric` true"
            )
        return value

    @field_validator("max_shard_size")
    @classmethod
    def _is_size(cls, value: str) -> str:
        try:
            parse_size(value, where="max_shard_size")
        except RecipeError as cause:
            raise ValueError(f"{cause.what}; {cause.fix}") from None
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.scheme == "w8a8" and self.group_size is not None:
            raise ValueError("w8a8 has one scale an output channel: int8 kernels take no group_size; leave it out")
        if self.method != "rtn" and self.calibration is None:
            raise ValueError(f"method {self.method} needs `calibration:` data; add it, or use `method: rtn`")
        return self
