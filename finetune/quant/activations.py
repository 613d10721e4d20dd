"""Inputs of Linear layers: rounding them to int8 a token, and their second moments (the output error's Hessian)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.quant.ranks import Ranks
from finetune.quant.scheme import ActivationArgs


def fake_quantize_tokens(hidden_BSI: Tensor, activations: ActivationArgs) -> Tensor:
    """Each token rounded to ``num_bits`` codes of its own scale and back, in the input's dtype.

    The operations and their order (scale = largest magnitude over half the range, rounded to the dtype) are those of
    compressed-tensors, so that the result has its rounding too.
    """
    low_BS1, high_BS1 = hidden_BSI.amin(-1, keepdim=True), hidden_BSI.amax(-1, keepdim=True)
    scale_BS1 = torch.maximum(low_BS1.clamp_max(0).abs(), high_BS1.clamp_min(0)) / _half_range(activations)
    scale_BS1 = torch.where(scale_BS1 == 0, torch.finfo(hidden_BSI.dtype).eps, scale_BS1)
    return fake_quantize(hidden_BSI, scale_BS1, activations)


def fake_quantize(hidden_BSI: Tensor, scale: Tensor, activations: ActivationArgs) -> Tensor:
    """Rounded to codes of ``scale`` (which broadcasts, in the input's dtype) and back."""
    code_max = 2 ** (activations.num_bits - 1) - 1
    return (hidden_BSI / scale).clamp_(-code_max - 1, code_max).round_() * scale


def static_scale(largest: float, activations: ActivationArgs, dtype: torch.dtype) -> Tensor:
    """(1,) in ``dtype``, the scale under which an input of magnitude ``largest`` takes the last code."""
    return torch.tensor([largest / _half_range(activations) or 1.0]).to(dtype)


def fake_quantize_inputs(hidden_NI: Tensor, activations: ActivationArgs) -> Tensor:
    """Rounded as ``activations`` has it; a static scale is taken from these inputs themselves."""
    if activations.dynamic:
        return fake_quantize_tokens(hidden_NI, activations)
    scale = static_scale(hidden_NI.abs().max().item(), activations, hidden_NI.dtype)
    return fake_quantize(hidden_NI, scale.to(hidden_NI.device), activations)


def _half_range(activations: ActivationArgs) -> float:
    return (2**activations.num_bits - 1) / 2


@dataclass(frozen=True)
class InputRounding:
    """How a layer's input is rounded at inference."""

    activations: ActivationArgs
    scale: Tensor | None
    """(1,), where it is static."""

    def __call__(self, hidden_BSI: Tensor) -> Tensor:
        if self.activations.dynamic:
            return fake_quantize_tokens(hidden_BSI, self.activations)
        assert self.scale is not None, "a static scale is found before the layer is run quantized"
        return fake_quantize(hidden_BSI, self.scale.to(hidden_BSI.device, hidden_BSI.dtype), self.activations)


@contextmanager
def quantized_inputs(
    layers: Mapping[str, nn.Module], how: Mapping[str, Callable[[Tensor], Tensor] | None]
) -> Iterator[None]:
    """Within: the inputs of ``layers`` are rounded as they will be at inference, each as ``how`` has it (None: not)."""

    def round_input(rounding: Callable[[Tensor], Tensor], _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounding(args[0]), *args[1:])

    with ExitStack() as stack:
        for name, layer in layers.items():
            rounding = how[name]
            if rounding is not None:
                stack.callback(layer.register_forward_pre_hook(partial(round_input, rounding)).remove)
        yield


def kept_tokens(hidden: Tensor, mask_BS: Tensor | None) -> Tensor:
    """hidden_NI: the tokens that ``mask_BS`` keeps of (B, S, I), or of (B * S, I), as some blocks have it."""
    if mask_BS is None:
        return hidden.flatten(0, -2)
    mask = mask_BS.to(hidden.device)
    return hidden[mask.flatten() if hidden.ndim == 2 else mask]


class _CaughtAllError(Exception):
    """Raised inside a block's forward once every input that is wanted has been seen: the rest needn't be computed."""


def run_and_catch(layers: Mapping[str, nn.Module], forward: Any, catch: Any, *, whole: bool = False) -> None:
    """Call ``forward()`` and ``catch(name, input)`` at each of ``layers``; stop the forward after the last of them.

    ``whole``: catch all positional arguments, not the first alone.
    """
    waiting = set(layers)

    def hook(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        catch(name, args if whole else args[0])
        waiting.discard(name)
        if not waiting:
            raise _CaughtAllError

    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(partial(hook, name)).remove)
        try:
            forward()
        except _CaughtAllError:
            return


def shared_inputs(layers: Mapping[str, nn.Module], forward: Any) -> list[list[str]]:
    """The layers that ``forward`` reaches, in its order, grouped by the tensor they read (q, k, v; gate, up)."""
    groups: list[tuple[Tensor, list[str]]] = []

    def catch(name: str, hidden: Tensor) -> None:
        for seen, members in groups:
            if seen is hidden:
                members.append(name)
                return
        groups.append((hidden, [name]))

    run_and_catch(layers, forward, catch)
    return [members for _, members in groups]


@dataclass
class HessianSum:
    """Running sum of x xᵀ over tokens, in float32, and the largest magnitude in them; and how x has drifted."""

    in_features: int
    device: torch.device | str = "cpu"
    num_tokens: int = 0
    largest: float = 0.0
    total: Tensor = field(init=False)
    exact: Tensor | None = None
    """Sum of (exact x) xᵀ, where what x is in the unquantized model was given."""

    def __post_init__(self) -> None:
        self.total = torch.zeros(self.in_features, self.in_features, device=self.device)

    def add(self, hidden_BSI: Tensor, mask_BS: Tensor | None, exact_BSI: Tensor | None = None) -> None:
        """Add the tokens that ``mask_BS`` keeps (all of them where it is None); ``exact_BSI`` is what they are in the
        unquantized model, given for all tokens or for none."""
        hidden_NI = kept_tokens(hidden_BSI, mask_BS)
        if not len(hidden_NI):  # an expert that no token of this chunk goes to
            return
        self.num_tokens += len(hidden_NI)
        self.largest = max(self.largest, hidden_NI.abs().max().item())
        with exact_products(hidden_NI.dtype):
            hidden_NI = hidden_NI.float()
            self.total.addmm_(hidden_NI.T, hidden_NI)
            if exact_BSI is not None:
                if self.exact is None:
                    self.exact = torch.zeros_like(self.total)
                exact_NI = kept_tokens(exact_BSI.to(hidden_NI.device), mask_BS).float()
                self.exact.addmm_(exact_NI.T, hidden_NI)

    def add_up(self, ranks: Ranks) -> None:
        """Let this be the sum over the tokens of all ranks."""
        counted_1, largest_1 = torch.tensor([self.num_tokens]), torch.tensor([self.largest], dtype=torch.float64)
        ranks.sum_([self.total, counted_1, *([] if self.exact is None else [self.exact])])
        ranks.max_([largest_1])
        self.num_tokens, self.largest = int(counted_1), float(largest_1)

    def mean(self) -> Tensor:
        """hessian_II: the mean of x xᵀ."""
        return self.total / max(self.num_tokens, 1)

    def mean_drift(self) -> Tensor | None:
        """drift_II: the mean of (exact x - x) xᵀ, where exact inputs were given. The difference is of sums: products of
        bfloat16 are exact, so it loses a few of float32's 24 bits, and no difference is taken token by token."""
        return None if self.exact is None else (self.exact - self.total) / max(self.num_tokens, 1)


@contextmanager
def exact_products(dtype: torch.dtype) -> Iterator[None]:
    """Within: float32 matrix products may use bfloat16 multipliers where the factors were bfloat16 anyway.

    Such products lose nothing: the factors are exact and sums are kept in float32. On a processor with AMX a Hessian
    of 1,536 inputs takes 0.04 s instead of 0.10 s per 4,096 tokens, with the same error (5e-7 of the largest entry).
    """
    if dtype != torch.bfloat16:
        yield
        return
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
