"""SmoothQuant (Xiao et al., 2022, arXiv:2211.10438): move outliers of a layer's input into its weights.

An int8 input has one scale a token, so one channel with large values takes the precision of all others. Divide each
channel by a factor where it is made (a norm's weight, the rows of the Linear before) and multiply the columns of the
layers that read it: the block computes the same, its inputs are even. Factors are powers of two, so nothing is rounded:
whether a pair of layers may be folded is decided by trying, the block's output must stay the same to the last bit.

On a 135M model int8 inputs and weights, rounded to nearest, cost 2.8% of perplexity without it, 1.0% with strength 0.7
(KL 0.0135 nats a token); searched, with GPTQ, 0.7% (KL 0.0087; with GPTQ and 0.7 it is 0.0111). See bench/README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.quant.activations import fake_quantize_inputs, kept_tokens, run_and_catch
from finetune.quant.experts import expert_of, routed_mask
from finetune.quant.ranks import ALONE, Ranks, Share
from finetune.quant.scheme import QuantScheme
from finetune.quant.zero_points import rounded_to_nearest

SEARCHED_STRENGTHS = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
AWQ_STRENGTHS = [0.25, 0.5, 0.75, 1.0]
SEARCH_TOKENS = 1024
"""Tokens of the first calibration chunk on which the strengths are compared."""
_TINY = 1e-5


@dataclass(frozen=True)
class SharedInput:
    """A tensor that Linear layers of a block read."""

    consumers: list[str]
    producers: list[str]
    """What may have made it, likeliest first: the module whose output it is, else Linear layers of its width."""


def smooth_block(
    block: nn.Module,
    tensors: dict[str, Tensor],
    *,
    run: Callable[[int], Tensor],
    masks: list[Tensor | None],
    strength: float | None,
    scheme: QuantScheme,
    ranks: Ranks = ALONE,
    share: Share | None = None,
) -> set[str]:
    """Even out the inputs of the block's Linear layers, in ``block`` and in ``tensors`` (its stored tensors by name).

    ``run(c)`` gives the block's output for calibration chunk c, ``masks[c]`` (B, S) what of it isn't padding.
    ``strength`` in 0..1 is how much of an input's range goes into the weights; None chooses for each input the one of
    SEARCHED_STRENGTHS, or no smoothing, under which ``scheme`` changes the layers' outputs least. Several ``ranks``
    measure inputs on the chunks of each, ``share`` says which those are; the first decides. Returns the layers that
    were smoothed.
    """
    inputs = shared_inputs_of(block, lambda: run(0))
    readers = {entry.consumers[0]: block.get_submodule(entry.consumers[0]) for entry in inputs}
    largest: dict[str, Tensor] = {}
    sample: dict[str, Tensor] = {}
    places: dict[str, Tensor] = {}

    def widen(mask_BS: Tensor | None, name: str, hidden: Tensor) -> None:
        mask = routed_mask(block, name, mask_BS)
        hidden_NI = kept_tokens(hidden, mask)
        largest.setdefault(name, hidden_NI.new_zeros(hidden_NI.shape[1], dtype=torch.float32))
        if len(hidden_NI):  # no token of this chunk may go to an expert
            largest[name] = torch.maximum(largest[name], hidden_NI.abs().amax(0).float())
        if strength is not None or name in sample:
            return
        if ranks.size > 1:
            assert share is not None
            place_N = kept_tokens(_places(block, name, hidden, share).unsqueeze(-1), mask).squeeze(-1)
            is_first_N = place_N < share.chunk_size * share.num_tokens[0]
            hidden_NI, places[name] = hidden_NI[is_first_N.to(hidden.device)], place_N[is_first_N][:SEARCH_TOKENS]
        sample[name] = hidden_NI[:SEARCH_TOKENS].float()

    for position, mask_BS in enumerate(masks):
        run_and_catch(readers, partial(run, position), partial(widen, mask_BS))
    ranks.max_(largest[name] for name in readers)
    if ranks.size > 1 and strength is None:
        _gather_samples(sample, places, ranks)
    folds: list[_Fold] = []
    if ranks.is_first:
        expected_BSD = run(0)
        for entry in inputs:
            columns = [tensors[f"{name}.weight"] for name in entry.consumers]
            largest_I = largest[entry.consumers[0]].cpu()
            if strength is None:
                factor_I = searched_factors(largest_I, columns, sample.pop(entry.consumers[0]), scheme)
            else:
                factor_I = smoothing_factors(largest_I, columns, strength)
            if not torch.isfinite(factor_I).all() or (factor_I == 1).all():
                continue
            for producer in entry.producers:
                before, fold = dict(tensors), _Fold(producer, entry.consumers, factor_I)
                changed = fold.apply(block, tensors)
                if torch.equal(run(0), expected_BSD):
                    folds.append(fold)
                    break
                tensors.update(before)
                _refill(block, tensors, changed)
    folds = ranks.broadcast(folds)
    for fold in () if ranks.is_first else folds:
        fold.apply(block, tensors)
    return {consumer for fold in folds for consumer in fold.consumers}


def _places(block: nn.Module, name: str, hidden: Tensor, share: Share) -> Tensor:
    """For each row that layer ``name`` reads of this rank's first chunk: its place in all samples joined end to end."""
    length = share.num_tokens[0]
    place_BS = torch.tensor(share.chunks[0]).unsqueeze(1) * length + torch.arange(length)
    expert = expert_of(block, name)
    if expert is None:
        return place_BS if hidden.ndim == 3 else place_BS.flatten()
    assert expert.tokens_M is not None
    return place_BS.flatten()[expert.tokens_M.cpu()]


def _gather_samples(sample: dict[str, Tensor], places: Mapping[str, Tensor], ranks: Ranks) -> None:
    """On rank 0: the ``sample`` that a process alone would take of its first chunk, in its order."""
    gathered = ranks.gather({name: (rows_NI.cpu(), places[name]) for name, rows_NI in sample.items()})
    for name in sample if gathered else ():
        rows_NI = torch.cat([part[name][0] for part in gathered])
        order_N = torch.cat([part[name][1] for part in gathered]).argsort()
        sample[name] = rows_NI[order_N[:SEARCH_TOKENS]].to(sample[name].device)


def smoothing_factors(largest_I: Tensor, weights: list[Tensor], strength: float) -> Tensor:
    """Powers of two near input range ** strength / weight range ** (1 - strength), their mean exponent about 0."""
    input_I = largest_I.float().clamp_min(_TINY)
    weight_I = torch.stack([weight_OI.float().abs().amax(0) for weight_OI in weights]).amax(0).clamp_min(_TINY)
    exponent_I = strength * input_I.log2() - (1 - strength) * weight_I.log2()
    return power_of_two(exponent_I, largest_I)


def power_of_two(exponent_I: Tensor, range_I: Tensor) -> Tensor:
    exponent_I = (exponent_I - exponent_I.mean()).round().clamp(-8, 8)
    # An input that is always 0 keeps its weights as they are.
    return torch.where(range_I > 0, exponent_I.exp2(), 1.0)


def searched_factors(largest_I: Tensor, weights: list[Tensor], sample_NI: Tensor, scheme: QuantScheme) -> Tensor:
    """Of ``smoothing_factors`` with each of SEARCHED_STRENGTHS, and of no smoothing, those of least output error.

    Where inputs stay floats that is the search of AWQ (Lin et al., 2023, arXiv:2306.00978), whose own factors, typical
    input ** strength, are tried as well.

    An input's range is its largest value or its root mean square, whichever does better: a down projection's few huge
    tokens say little about the others (a quarter less error by the latter). The error is that of rounding to nearest:
    weights by their rows' extremes, inputs ``sample_NI`` by their tokens', or by their own where the scale is static.
    """
    weight_OI = torch.cat([weight.to(sample_NI.device, torch.float32) for weight in weights])
    exact_NO = sample_NI @ weight_OI.T
    candidates = [torch.ones_like(largest_I)]
    typical_I = sample_NI.square().mean(0).sqrt().cpu()
    for range_I in (largest_I, torch.where(largest_I > 0, typical_I, 0.0)):
        candidates += [smoothing_factors(range_I, weights, strength) for strength in SEARCHED_STRENGTHS]
    if scheme.activations is None:
        candidates += [power_of_two(typical_I.clamp_min(_TINY).log2() * s, typical_I) for s in AWQ_STRENGTHS]
    errors = []
    for candidate_I in candidates:
        factor_I = candidate_I.to(sample_NI.device)
        scaled_OI = weight_OI * factor_I
        rounded_OI = rounded_to_nearest(scaled_OI, scheme.weights)
        rounded_NI = sample_NI / factor_I
        if scheme.activations is not None:
            rounded_NI = fake_quantize_inputs(rounded_NI, scheme.activations)
        errors.append(float((rounded_NI @ rounded_OI.T - exact_NO).square().mean()))
    return candidates[errors.index(min(errors))]


@dataclass(frozen=True)
class _Fold:
    producer: str
    consumers: list[str]
    factor: Tensor
    """(I,): by which the producer's output is divided and the consumers' columns multiplied."""

    def apply(self, block: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
        """Put it into ``tensors`` and ``block``; returns the names that changed."""
        changed = []
        for name in (f"{self.producer}.{part}" for part in ("weight", "bias")):
            if name in tensors:
                divisor = self.factor.view(-1, *[1] * (tensors[name].ndim - 1))
                tensors[name] = (tensors[name].float() / divisor).to(tensors[name].dtype)
                changed.append(name)
        for name in (f"{consumer}.weight" for consumer in self.consumers):
            tensors[name] = (tensors[name].float() * self.factor).to(tensors[name].dtype)
            changed.append(name)
        _refill(block, tensors, changed)
        return changed


def _refill(block: nn.Module, tensors: Mapping[str, Tensor], names: list[str]) -> None:
    for name in names:
        owner, _, part = name.rpartition(".")
        old = block.get_parameter(name)
        new = nn.Parameter(tensors[name].to(old.device, old.dtype), requires_grad=False)
        block.get_submodule(owner).register_parameter(part, new)


def shared_inputs_of(block: nn.Module, run: Callable[[], Any]) -> list[SharedInput]:
    """Every tensor that Linear layers of the block read, in the order of ``run()``, and what may have made it."""
    made: list[tuple[str, nn.Module, Tensor]] = []
    read: list[tuple[Tensor, SharedInput]] = []

    def note_output(name: str, module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            made.append((name, module, output))

    def note_input(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        hidden = args[0]
        for seen, entry in read:
            if seen is hidden:
                entry.consumers.append(name)
                return
        width = hidden.shape[-1]
        producers = [maker for maker, module, output in made if output is hidden and _folds(module, width)]
        if not producers:
            producers = [
                maker for maker, module, _ in reversed(made) if isinstance(module, nn.Linear) and _folds(module, width)
            ]
        read.append((hidden, SharedInput([name], producers)))

    with ExitStack() as stack:
        for name, module in block.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                stack.callback(module.register_forward_hook(partial(note_output, name)).remove)
            if isinstance(module, nn.Linear):
                stack.callback(module.register_forward_pre_hook(partial(note_input, name)).remove)
        run()
    return [entry for _, entry in read]


def _folds(module: nn.Module, width: int) -> bool:
    """Has it a weight, and maybe a bias, with one entry (or row) an output channel, and nothing else?"""
    parts = dict(module.named_parameters(recurse=False))
    return "weight" in parts and parts.keys() <= {"weight", "bias"} and all(p.shape[0] == width for p in parts.values())
