"""What a block has computed in one pass over the calibration samples needn't be computed again in the next.

Layers are quantized one after the other, each in a pass of its own, so that it sees those before it quantized.
Attention ends in a Linear layer, and so does the feed-forward part: once that layer's inputs have been caught, the
whole part is that layer applied to them, whatever it holds by then. So attention is computed once a block instead of
once a pass. And what made a layer's input, a norm say, needn't make it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

MAX_BYTES, MAX_MADE_BYTES = 2**30, 2**28
"""Of inputs that are kept, and of those that only spare a norm; what would go beyond is computed again."""


class ForwardMemo:
    """The inputs of a block's layers for each of ``num_chunks`` chunks, where they spare later passes some work.

    ``groups`` are the layers of one input and scheme, each caught by its first. Of use are a lone layer that ends a
    part of the block, a module that returns what the layer returns, and a layer whose input a module returned.
    ``forward()`` runs the block on one chunk.
    """

    def __init__(
        self, block: nn.Module, groups: Sequence[Sequence[str]], num_chunks: int, forward: Callable[[], Any]
    ) -> None:
        self._block = block
        self._num_chunks = num_chunks
        alone = [group[0] for group in groups if len(group) == 1]
        self._ends, self._rest, self._makers = _parts(block, alone, [group[0] for group in groups], forward)
        self._kept: dict[str, dict[int, Tensor]] = {layer: {} for layer in (*self._ends, *self._makers)}
        self._num_bytes = dict.fromkeys(self._kept, 0)

    def keep(self, layer: str, chunk: int, hidden: Tensor) -> None:
        """Note what ``layer`` reads, with all that comes before it in its final state."""
        if layer not in self._kept:
            return
        self._num_bytes[layer] += hidden.nbytes
        made = sum(num_bytes for name, num_bytes in self._num_bytes.items() if name not in self._ends)
        if sum(self._num_bytes.values()) > MAX_BYTES or (layer not in self._ends and made > MAX_MADE_BYTES):
            del self._kept[layer], self._num_bytes[layer]
            return
        self._kept[layer][chunk] = hidden.cpu()

    @contextmanager
    def skipping(self, chunk: int, device: Any) -> Iterator[None]:
        """Within: parts whose last layer's inputs of ``chunk`` are known are computed from those, and modules that only
        made a known input return it."""
        with ExitStack() as stack:
            for layer, kept in list(self._kept.items()):
                if len(kept) != self._num_chunks:
                    continue
                hidden = kept[chunk].to(device)
                if hidden._version > 0 and layer in self._makers:  # a block that writes into what its norm returned
                    del self._kept[layer], self._num_bytes[layer]
                    continue
                if layer in self._ends:
                    part, forward = self._ends[layer], partial(self._end, layer, hidden)
                else:
                    part, forward = self._makers[layer], partial(_made, hidden)
                module = self._block.get_submodule(part)
                module.forward = forward
                stack.callback(module.__dict__.pop, "forward", None)
            yield

    def _end(self, layer: str, hidden: Tensor, *_: Any, **__: Any) -> Any:
        output = self._block.get_submodule(layer)(hidden)
        rest = self._rest[layer]
        return output if rest is None else (output, *rest)


def _made(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


def _parts(
    block: nn.Module, alone: Sequence[str], layers: Sequence[str], forward: Callable[[], Any]
) -> tuple[dict[str, str], dict[str, tuple[Any, ...] | None], dict[str, str]]:
    """For each of ``alone`` that ends a part of ``block``: the outermost module that returns what the layer returns,
    and what it returns behind that (None where it returns a tensor alone). For each other one of ``layers``: the module
    without any layer in it that returned its input."""
    returned: dict[str, Any] = {}
    read: dict[str, Any] = {}
    num_calls: Counter[str] = Counter()

    def note(name: str, _: nn.Module, __: Any, output: Any) -> None:
        returned[name] = output
        num_calls[name] += 1

    def note_input(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        read[name] = args[0] if args else None

    with ExitStack() as stack:
        for name, module in block.named_modules():
            if name:
                stack.callback(module.register_forward_hook(partial(note, name)).remove)
        for name in layers:
            stack.callback(block.get_submodule(name).register_forward_pre_hook(partial(note_input, name)).remove)
        forward()
    returned = {name: output for name, output in returned.items() if num_calls[name] == 1}
    ends: dict[str, str] = {}
    rests: dict[str, tuple[Any, ...] | None] = {}
    for layer in alone:
        for name in sorted(returned, key=lambda name: name.count(".")):
            output = returned[name]
            first, rest = (output[0], tuple(output[1:])) if isinstance(output, tuple) and output else (output, None)
            if not layer.startswith(name + ".") or first is not returned.get(layer):
                continue
            if not any(isinstance(value, Tensor) for value in rest or ()):
                ends[layer], rests[layer] = name, rest
                break
    makers: dict[str, str] = {}
    for layer in (layer for layer in layers if layer in read and layer not in ends):
        for name, output in returned.items():
            if output is not read[layer] or not isinstance(output, Tensor):
                continue
            if not any(isinstance(module, nn.Linear) for module in block.get_submodule(name).modules()):
                makers[layer] = name
                break
    return ends, rests, makers
