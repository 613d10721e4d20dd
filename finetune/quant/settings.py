"""The ``quantize:`` section of a recipe."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from finetune.config.section import Section
from finetune.config.size import parse_size
from finetune.data.settings import DatasetSettings
from finetune.errors import RecipeError, did_you_mean
from finetune.quant import methods
from finetune.quant.other_names import unknown_scheme_key
from finetune.quant.scheme import SCHEMES, QuantScheme, scheme_with

GGUF_GROUP_SIZE = 32
"""Weights of a block of llama.cpp's types Q4_0 and Q8_0."""


class CalibrationSettings(Section):
    data: list[DatasetSettings] = Field(default_factory=list)
    """Where the calibration text comes from; conversations are rendered by the model's own chat template. In a recipe,
    by default, what the model was trained on."""
    num_samples: int = Field(128, gt=0)
    """Sequences of ``max_seq_length`` tokens; rows are joined, so a short row costs nothing and none is dropped."""
    max_seq_length: int = Field(512, ge=2)
    """Tokens of one sequence. In a recipe that calibrates on the training data, at most that training's by default."""
    micro_batch_size: int = Field(8, gt=0)
    """Sequences in one forward; changes memory and speed."""


TUNING_STEPS = {"gptq": 7, "best": 64}
"""At most, of the methods that tune by default."""
TUNING_TOKENS, TUNING_EPOCHS = 2048, 2
"""Calibration tokens of a step, and how often steps by default take the same ones."""
TUNED_BITS = 4
"""Weights of more bits aren't tuned by default: a step of their scales' dtype is more than their rounding costs."""


class OverrideSettings(Section):
    """Layers that are stored otherwise than the rest; of several entries that name a layer, the last one counts."""

    layers: list[str] = Field(min_length=1)
    """As in ``ignore``."""
    scheme: str
    group_size: int | None = Field(None, gt=0)
    """Default: the scheme's own."""
    symmetric: bool = True

    @property
    def quant_scheme(self) -> QuantScheme:
        return scheme_with(self.scheme, group_size=self.group_size, symmetric=self.symmetric)

    @model_validator(mode="before")
    @classmethod
    def _default_group_size(cls, value: Any) -> Any:
        return _with_group_size(value, None)

    @field_validator("scheme")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if value not in SCHEMES:
            raise unknown_scheme_key(value, in_override=True)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _check_weights(self.scheme, self.group_size, symmetric=self.symmetric)
        return self


class QuantizeSettings(Section):
    calibration_is_complete: ClassVar[bool] = True
    """False where the data to calibrate on may be filled in later."""

    scheme: str = "w4a16"
    """What is stored: weights of 4, 3, 2 or 8 bits (w4a16, w3a16, w2a16, w8a16), int8 weights and inputs (w8a8 with a
    scale a token, w8a8_static with one a layer), bitsandbytes' nf4, fp4, llm_int8, or llama.cpp's q4_k."""
    format: str | None = None
    """How it is stored: compressed-tensors, gptq, gguf or bitsandbytes. Default: the scheme's first."""
    method: str = "gptq"
    """How the codes are found: gptq (needs calibration) or rtn (round to nearest, needs none). nf4, fp4, llm_int8 and
    q4_k have a rule of their own and know rtn only, which is their default."""
    group_size: int | None = Field(None, gt=0)
    """Input features that share a scale. Default 128 for w4a16; null, one scale an output channel, for 8 bits; 32 in
    the format gguf, which knows no other."""
    symmetric: bool = True
    """False: each group of weights has a zero point besides its scale."""
    overrides: list[OverrideSettings] = Field(default_factory=list)
    """Layers with another scheme. Layers that one kernel computes together (q, k and v; gate and up) must agree."""
    ignore: list[str] = Field(["lm_head"])
    """Linear layers kept as they are: full names of layers or of modules around them, the last parts of such names
    (``mlp``), globs, or ``re:`` and a pattern."""
    calibration: CalibrationSettings | None = None
    """Text for the methods and the int8 inputs that need some, and for the figures of the report."""
    damp: float = Field(0.01, gt=0, le=1)
    """Added to the Hessian's diagonal, as a fraction of its mean; raised (and reported) when that isn't enough."""
    act_order: bool = True
    """Quantize the columns of the largest inputs first; costs nothing at inference."""
    true_sequential: bool = True
    """Within a block, let a layer's Hessian see the block's earlier layers already quantized."""
    drift_correction: bool | None = None
    """With gptq and best: let each layer's weights make up for what the rounding before it did to its inputs. By
    default where the scheme's weights have 4 bits or fewer: what 8 bits do is too little to be told from chance."""
    smoothing: Annotated[float, Field(ge=0, le=1)] | Literal["search"] | None = "search"
    """For int8 inputs, with calibration: how much of an input's outliers moves into the weights; null moves nothing,
    ``search`` chooses for each input."""
    rounding_iterations: int = Field(200, ge=1)
    """Of the method learned, in each block."""
    tuning_steps: int | None = Field(None, ge=0)
    """Steps of 2,048 calibration tokens that tune scales and norms to the unquantized model's predictions, through the
    whole model; when the samples run out they are taken again. By default at most 7 of gptq and 64 of best, no more
    than take each sample twice, and none where no weights have 4 bits or fewer."""
    kv_cache: Literal["int8"] | None = None
    """Only null: no loader applies a scheme of int8 keys and values that a model folder names."""
    activation_memory: str = "4GiB"
    """Memory for the hidden states of the calibration tokens; what goes beyond lies on disk meanwhile, beside the
    result. Changes no bit of it."""
    num_processes: int = Field(1, ge=1)
    """Processes on this machine that share out the calibration samples, on cuda each on a GPU of its own. Their sums
    round otherwise than those of one: the result differs as little as that."""
    max_shard_size: str = "5GB"
    """Size limit of one weight file of the result."""
    verify: bool = True
    """Load the result in a fresh process and compare its logits before it gets its place. It takes the memory of the
    whole model in float32, which quantizing doesn't."""

    @property
    def max_shard_size_bytes(self) -> int:
        return parse_size(self.max_shard_size, where="max_shard_size")

    @property
    def activation_memory_bytes(self) -> int:
        return parse_size(self.activation_memory, where="activation_memory")

    @model_validator(mode="before")
    @classmethod
    def _default_group_size(cls, value: Any) -> Any:
        return _with_group_size(_with_method(value), "w4a16")

    @field_validator("scheme")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if value not in SCHEMES:
            raise unknown_scheme_key(value)
        return value

    @field_validator("method")
    @classmethod
    def _known_method(cls, value: str) -> str:
        return _known(value, [module.name for module in pkgutil.iter_modules(methods.__path__)])

    @field_validator("kv_cache")
    @classmethod
    def _no_loader_knows(cls, value: str | None) -> str | None:
        # transformers 5.24 names attention's argument `cache`, by which compressed-tensors 0.20 doesn't recognize it.
        if value is not None:
            raise ValueError(
                "an int8 key-value cache can't be stored with a model: transformers does nothing with a "
                "`kv_cache_scheme` (its scales would be unexpected tensors) and vLLM takes one of 8-bit floats only; "
                "leave `kv_cache` out, and choose the cache's type where the model is served (vLLM: --kv-cache-dtype)"
            )
        return value

    @field_validator("max_shard_size", "activation_memory")
    @classmethod
    def _is_size(cls, value: str) -> str:
        try:
            parse_size(value, where="max_shard_size")
        except RecipeError as cause:
            raise ValueError(f"{cause.what}; {cause.fix}") from None
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _check_weights(self.scheme, self.group_size, symmetric=self.symmetric)
        for scheme in self._scheme_names:
            methods = SCHEMES[scheme].methods
            if methods is not None and self.method not in methods:
                raise ValueError(f"{scheme} finds its codes by a rule of its own; set `method: {methods[0]}`")
            if methods is not None and self.tuning_steps:
                raise ValueError(f"{scheme} has scales of its own rule, which can't be tuned; set `tuning_steps: 0`")
            if self.format_name not in SCHEMES[scheme].formats:
                raise ValueError(
                    f"format {self.format_name} doesn't hold {scheme}; set `format` to one of "
                    + ", ".join(SCHEMES[scheme].formats)
                )
        if self.method == "smoothquant" and SCHEMES[self.scheme].activations is None:
            raise ValueError(f"smoothquant is for int8 inputs, {self.scheme} has none; set `scheme: w8a8`")
        if self.calibration_is_complete:
            self.check_calibration()
        return self

    def check_calibration(self) -> None:
        """Raise ValueError where there is no data to calibrate on and some is needed."""
        if self.calibration is not None and not self.calibration.data:
            raise ValueError("`calibration` has no text; set `calibration.data`")
        if self.calibration is not None and self.calibration.num_samples < self.num_processes:
            raise ValueError(
                f"{self.num_processes} processes can't share {self.calibration.num_samples} calibration samples; set "
                f"`num_processes` to at most {self.calibration.num_samples}"
            )
        if self.calibration is None and self.method == "rtn" and self.needs_calibration:
            raise ValueError(
                "w8a8_static needs `calibration:` data, which its inputs' scales are found on; set `calibration.data`, "
                "or `scheme: w8a8`, which needs none"
            )
        if self.needs_calibration and self.calibration is None:
            raise ValueError(
                f"method {self.method} needs `calibration:` data; set `calibration.data`, or `method: rtn` to use none"
            )

    def num_tuning_steps(self, num_tokens: int) -> int:
        """The steps that ``num_tokens`` of calibration text are tuned on."""
        if self.tuning_steps is not None:
            return self.tuning_steps
        weights = [SCHEMES[scheme].weights for scheme in self._scheme_names]
        if all(args.num_bits > TUNED_BITS or args.type != "int" for args in weights):
            return 0
        return min(TUNING_STEPS.get(self.method, 0), -(-TUNING_EPOCHS * num_tokens // TUNING_TOKENS))

    @property
    def corrects_drift(self) -> bool:
        if self.drift_correction is not None:
            return self.drift_correction
        return SCHEMES[self.scheme].weights.num_bits <= TUNED_BITS

    @property
    def _scheme_names(self) -> list[str]:
        return [self.scheme, *(override.scheme for override in self.overrides)]

    @property
    def needs_calibration(self) -> bool:
        kept_scales = [
            args for scheme in self._scheme_names if (args := SCHEMES[scheme].activations) and not args.dynamic
        ]
        return self.method != "rtn" or bool(kept_scales) or bool(self.tuning_steps)

    @property
    def uses_calibration(self) -> bool:
        """Whether data changes the result: to round int8 inputs well takes some, whatever the method."""
        rounds_inputs = any(SCHEMES[scheme].activations is not None for scheme in self._scheme_names)
        return self.needs_calibration or rounds_inputs

    @property
    def format_name(self) -> str:
        return self.format or SCHEMES[self.scheme].formats[0]

    @property
    def quant_scheme(self) -> QuantScheme:
        return scheme_with(self.scheme, group_size=self.group_size, symmetric=self.symmetric)


def _with_group_size(value: Any, default_scheme: str | None) -> Any:
    if isinstance(value, dict) and "group_size" not in value:
        scheme = SCHEMES.get(str(value.get("scheme", default_scheme)))
        group_size = scheme.weights.group_size if scheme else None
        return {**value, "group_size": GGUF_GROUP_SIZE if value.get("format") == "gguf" else group_size}
    return value


def _with_method(value: Any) -> Any:
    scheme = SCHEMES.get(str(value.get("scheme"))) if isinstance(value, dict) else None
    if scheme is not None and scheme.methods is not None and "method" not in value:
        return {**value, "method": scheme.methods[0]}
    return value


def _known(value: str, names: Iterable[str]) -> str:
    if value not in names:
        raise ValueError(did_you_mean(value, names))
    return value


def _check_weights(scheme: str, group_size: int | None, *, symmetric: bool) -> None:
    kind = SCHEMES[scheme]
    if kind.activations is not None and group_size is not None:
        raise ValueError(f"{scheme} has one scale an output channel: int8 kernels take no group_size; leave it out")
    if kind.activations is not None and not symmetric:
        raise ValueError(f"{scheme} is symmetric: int8 kernels take no zero points; leave `symmetric` out")
    if kind.weights.type != "int" and (group_size != kind.weights.group_size or not symmetric):
        raise ValueError(f"{scheme} comes with blocks of its own; leave `group_size` and `symmetric` out")
