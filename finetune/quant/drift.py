"""Let a layer's weights make up for what its inputs have lost.

By the time a layer is quantized its inputs have drifted: the layers before it are rounded, and maybe the inputs are,
too. GPTQ finds codes that keep W x̂, the layer's output on the drifted inputs x̂; what should be kept is W x, its output
in the unquantized model. That is the asymmetric calibration of GPTAQ (Li et al., 2025, arXiv:2504.02692), which works
it into every column's rounding. Here it is done once, before any rounding: codes are then found for the weights V of
least E|W x - V x̂|², by ridge regression towards W:

    V = W + W E[(x - x̂) x̂ᵀ] (E[x̂ x̂ᵀ] + λ I)⁻¹

It costs one more pass over the samples through the unquantized block, and as much again as a Hessian for each input.

Shapes: B sequences, S tokens; I in, O out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from finetune.quant.stream import Stream

RIDGE = 20.0
"""λ is this times I over the number of tokens, times the mean of the diagonal of E[x̂ x̂ᵀ]: drift is mostly noise, of
which too small a λ makes too much where tokens are few. Measured with one λ for all layers: a 135M model at int4 in
groups of 64, not tuned, comes to a KL on other text of 0.117 nats a token uncorrected with 16,384 tokens, to 0.116
with λ = 0.01, 0.100 with 0.05, 0.097 with 0.2, 0.091 with 1 and 0.098 with 4. With 65,536 tokens it is 0.107
uncorrected, 0.079 with λ = 1; on held-out calibration text 0.091 with λ = 1 and 0.087 with 0.3."""
_GONE = torch.empty(0)


class ExactInputs:
    """What ``layers`` of a block read in the unquantized model, for each chunk of the calibration samples.

    ``block`` is still unquantized. ``exact`` holds what enters it in the unquantized model, and afterwards what leaves
    it. The inputs are kept where ``exact`` keeps its own, on disk past its budget.
    """

    def __init__(
        self, block: nn.Module, index: int, layers: Sequence[str], exact: Stream, device: torch.device
    ) -> None:
        self._places = {name: place for place, name in enumerate(layers)}
        self._inputs = exact.storage("exact-inputs")
        for position, chunk in enumerate(exact.chunks()):
            caught: dict[str, Tensor] = {}

            def catch(name: str, _: nn.Module, args: tuple[Tensor, ...], caught: dict[str, Tensor] = caught) -> None:
                caught[name] = args[0].cpu()

            with ExitStack() as stack:
                for name in self._places:
                    hook = block.get_submodule(name).register_forward_pre_hook(partial(catch, name))
                    stack.callback(hook.remove)
                exact.hidden[position] = next(chunk.forward(block, index, device)).cpu()
            self._inputs.extend(caught[name] for name in self._places)

    def __contains__(self, layer: str) -> bool:
        return layer in self._places

    def take(self, layer: str, chunk: int) -> Tensor:
        """What ``layer`` reads of ``chunk``, (B, S, I), on the cpu; it is then forgotten."""
        position = chunk * len(self._places) + self._places[layer]
        hidden = self._inputs[position]
        self._inputs[position] = _GONE
        return hidden


def make_up(weight_OI: Tensor, hessian_II: Tensor, drift_II: Tensor, *, num_tokens: int) -> Tensor:
    """The weights to round in place of ``weight_OI``: V above, float32.

    ``hessian_II`` is the mean of x̂ x̂ᵀ over ``num_tokens``, ``drift_II`` that of (x - x̂) x̂ᵀ.
    """
    mean = hessian_II.diagonal().mean()
    if mean == 0:
        return weight_OI
    # In units of the mean, so that the least inputs don't leave float32's range.
    ridge_II = hessian_II / mean
    ridge_II.diagonal().add_(ridge(len(hessian_II), num_tokens))
    factor_II, failed = torch.linalg.cholesky_ex(ridge_II)
    if failed:  # inputs near the least numbers there are: products of theirs say nothing
        return weight_OI
    return weight_OI + torch.cholesky_solve((weight_OI @ (drift_II / mean)).T, factor_II).T


def ridge(num_inputs: int, num_tokens: int) -> float:
    """λ over the mean of the Hessian's diagonal; never so small that float32 finds no Cholesky factor."""
    return max(1e-3, RIDGE * num_inputs / num_tokens)
