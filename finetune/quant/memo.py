"""What a block has computed in one pass over the calibration samples needn't be computed again in the next.

Layers are quantized one after the other, each in a pass of its own, so that it sees those before it quantized.
Attention ends in a Linear layer, and so does the feed-forward part: once that layer's inputs have been caught, the
whole part is that layer applied to them, whatever it holds by then. So attention is computed once a block instead of
once a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

MAX_BYTES = 2**30
"""Of inputs that are kept; what would go beyond is computed again."""


class ForwardMemo:
    """The inputs of a block's ``layers`` for each of ``num_chunks`` chunks, where they spare later passes some work.

    ``forward()`` runs the block on one chunk. Only layers that end a part of the block are of use: a module that
    returns what they return.
    """

    def __init__(self, block: nn.Module, layers: Sequence[str], num_chunks: int, forward: Callable[[], Any]) -> None:
        self._block = block
        self._num_chunks = num_chunks
        self._ends, self._rest = _part_ends(block, layers, forward)
        self._kept: dict[str, dict[int, Tensor]] = {layer: {} for layer in self._ends}
        self._num_bytes = 0

    def keep(self, layer: str, chunk: int, hidden: Tensor) -> None:
        """Note what ``layer`` reads, with all that comes before it in its final state."""
        if layer not in self._kept:
            return
        self._num_bytes += hidden.nbytes
        if self._num_bytes > MAX_BYTES:
            self._num_bytes -= sum(kept.nbytes for kept in self._kept.pop(layer).values()) + hidden.nbytes
            return
        self._kept[layer][chunk] = hidden.cpu()

    @contextmanager
    def skipping(self, chunk: int, device: Any) -> Iterator[None]:
        """Within: parts whose last layer's inputs of ``chunk`` are known are computed from those."""
        with ExitStack() as stack:
            for layer, kept in self._kept.items():
                if len(kept) == self._num_chunks:
                    part = self._block.get_submodule(self._ends[layer])
                    end = partial(self._end, layer, kept[chunk].to(device))
                    part.forward = end
                    stack.callback(part.__dict__.pop, "forward")
            yield

    def _end(self, layer: str, hidden: Tensor, *_: Any, **__: Any) -> Any:
        output = self._block.get_submodule(layer)(hidden)
        rest = self._rest[layer]
        return output if rest is None else (output, *rest)


def _part_ends(
    block: nn.Module, layers: Sequence[str], forward: Callable[[], Any]
) -> tuple[dict[str, str], dict[str, tuple[Any, ...] | None]]:
    """For each of ``layers`` that ends a part of ``block``: the outermost module that returns what the layer returns,
    and what it returns behind that (None where it returns a tensor alone)."""
    returned: dict[str, Any] = {}

    def note(name: str, _: nn.Module, __: Any, output: Any) -> None:
        returned[name] = output

    with ExitStack() as stack:
        for name, module in block.named_modules():
            if name:
                stack.callback(module.register_forward_hook(partial(note, name)).remove)
        forward()
    ends: dict[str, str] = {}
    rests: dict[str, tuple[Any, ...] | None] = {}
    for layer in layers:
        for name in sorted(returned, key=lambda name: name.count(".")):
            output = returned[name]
            first, rest = (output[0], tuple(output[1:])) if isinstance(output, tuple) and output else (output, None)
            if not layer.startswith(name + ".") or first is not returned.get(layer):
                continue
            if not any(isinstance(value, Tensor) for value in rest or ()):
                ends[layer], rests[layer] = name, rest
                break
    return ends, rests
