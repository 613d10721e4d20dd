"""Learn a block's rounding by the signs of gradients (SignRound, Cheng et al., 2023, arXiv:2309.05516; AutoRound).

Every weight gets an offset, within half a code of where it lies between two codes, and every scale a factor; both
descend by the sign of their gradient, at a rate that falls to 0, on the squared error of the block's output. Rounding
passes gradients straight through. Unlike in the paper the start may be codes that another method found: an offset is
added to the code plus what it left of the weight (half a code at most).

Several ranks run an iteration together, each its own sequences of the chunk.

Cost: an iteration runs one chunk of the calibration samples forward and back through the block, three forwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from finetune.quant.activations import quantized_inputs
from finetune.quant.methods import QuantizedWeight
from finetune.quant.ranks import Ranks
from finetune.quant.scales import grouped, stored_scales
from finetune.quant.scheme import QuantScheme
from finetune.quant.stream import BlockQuantizer, Stream
from finetune.quant.tuning import round_straight, rows_of
from finetune.quant.zero_points import shifted

SMALLEST_FACTOR, LARGEST_FACTOR = 0.5, 1.15
"""Of a scale; as in the clip search of GPTQ."""
CHECKED_CHUNKS = 4
"""Chunks on which what was learned must beat what it began with."""


class _Rounded:
    """A weight as a function of what is learned: offsets ``offset_OI`` and factors ``factor_OG``, both float32."""

    def __init__(self, weight_OI: Tensor, start: QuantizedWeight, scheme: QuantScheme) -> None:
        self._start = start
        self._weights = scheme.weights
        self._scale_OG = start.scale.float()
        exact_OI = shifted(weight_OI, start.scale, start.zero_point)
        left_OGK = grouped(exact_OI, scheme.weights) / self._scale_OG.unsqueeze(-1)
        codes_OGK = grouped(start.codes.float(), scheme.weights)
        # Just inside of half a code, so that without an offset the start's codes come out.
        self._place_OGK = codes_OGK + (left_OGK - codes_OGK).clamp(-0.499, 0.499)
        self.offset_OGK = torch.zeros_like(self._place_OGK, requires_grad=True)
        self.factor_OG = torch.ones_like(self._scale_OG, requires_grad=True)

    def _codes(self) -> Tensor:
        moved_OGK = (self._place_OGK + self.offset_OGK).clamp(self._weights.code_min, self._weights.code_max)
        return moved_OGK + (moved_OGK.round() - moved_OGK).detach()

    def _scale(self) -> Tensor:
        scale_OG = self._scale_OG * self.factor_OG
        return scale_OG + (stored_scales(scale_OG.detach(), self._start.scale.dtype).float() - scale_OG).detach()

    def values(self) -> Tensor:
        """weight_OI in float32, differentiable."""
        codes_OGK = self._codes()
        if self._start.zero_point is not None:
            codes_OGK = codes_OGK - self._start.zero_point.unsqueeze(-1)
        return (codes_OGK * self._scale().unsqueeze(-1)).flatten(1)

    @torch.no_grad()
    def descend(self, rate: float, ranks: Ranks) -> None:
        if ranks.size > 1:
            for parameter in (self.offset_OGK, self.factor_OG):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                ranks.sum_([parameter.grad])
        for parameter, low, high in (
            (self.offset_OGK, -0.5, 0.5),
            (self.factor_OG, SMALLEST_FACTOR, LARGEST_FACTOR),
        ):
            if parameter.grad is not None:
                parameter.sub_(rate * parameter.grad.sign()).clamp_(low, high)
            parameter.grad = None

    @torch.no_grad()
    def stored(self) -> QuantizedWeight:
        scale_OG = stored_scales(self._scale_OG * self.factor_OG, self._start.scale.dtype)
        return replace(self._start, codes=self._codes().flatten(1).to(torch.int8), scale=scale_OG)


def learn_rounding(
    quantizer: BlockQuantizer,
    index: int,
    block: nn.Module,
    weights: Mapping[str, Tensor],
    start: Mapping[str, QuantizedWeight],
    stream: Stream,
    targets: Sequence[Tensor],
    *,
    iterations: int,
) -> dict[str, QuantizedWeight]:
    """Better codes and scales than ``start``'s for the layers of ``block``, or those where none were found.

    ``weights``: float weight_OI of each layer; ``stream`` holds the block's inputs, ``targets`` (B, S, D a chunk) what
    the unquantized block makes of them. ``block`` is the module of block ``index``, filled.
    """
    device = quantizer.decoder.device
    rounded = {
        name: _Rounded(weights[name].to(device, torch.float32), weight, quantizer.scheme_of(index, name))
        for name, weight in start.items()
    }
    straight = {
        name: rounding and partial(round_straight, rounding)
        for name, rounding in quantizer.input_roundings(index, start).items()
    }
    share, ranks = stream.held(), quantizer.ranks
    batches = share.batches
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(index))

    def error(position: int) -> Tensor:
        """This rank's part of the mean over what chunk ``position`` holds besides padding."""
        values = {f"{name}.weight": layer.values().to(stream.dtype) for name, layer in rounded.items()}

        def run(*args: object, **kwargs: object) -> object:
            return functional_call(block, values, args, kwargs)

        total = torch.zeros((), device=device)
        for chunk, rows in share.rows(batches[position]):
            whole_BSD, mask_BS = stream.hidden[chunk], stream.masks[chunk]
            call = rows_of(stream.calls[chunk][index], rows, whole_BSD)
            output_BSD = call.run(run, whole_BSD[rows].to(device, stream.dtype))
            difference_BSD = output_BSD.float() - targets[chunk][rows].to(device)
            kept = difference_BSD if mask_BS is None else difference_BSD[mask_BS[rows].to(device)]
            num_tokens = kept.numel() // kept.shape[-1]
            if num_tokens:
                total = total + kept.square().mean() * (num_tokens / share.tokens_in(batches[position]))
        return total

    def checked() -> float:
        with torch.no_grad():
            mine = sum(error(position).item() for position in range(min(CHECKED_CHUNKS, len(batches))))
        return ranks.total(mine)

    with quantized_inputs({name: block.get_submodule(name) for name in start}, straight):
        before = checked()
        with torch.enable_grad():
            for step in range(iterations):
                part = error(int(order[step % len(order)]))
                if part.requires_grad:  # else this rank has nothing of the chunk
                    part.backward()
                for layer in rounded.values():
                    layer.descend((1 - step / iterations) / iterations, ranks)
        better = checked() < before
    return {name: layer.stored() for name, layer in rounded.items()} if better else dict(start)
