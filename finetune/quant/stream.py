"""Quantize block after block: catch its inputs, quantize its layers, run it quantized, write it, forget it.

Memory holds one block, its Hessians, and the hidden states of the calibration tokens, whatever the model's size.
Each block sees the inputs that the quantized blocks before it give, so it makes up for some of their error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from finetune.engine.host_memory import give_back_freed_memory
from finetune.errors import CheckpointError, RecipeError
from finetune.quant.activations import (
    HessianSum,
    InputRounding,
    quantized_inputs,
    run_and_catch,
    shared_inputs,
)
from finetune.quant.decoder import BlockCall, StreamedDecoder
from finetune.quant.drift import ExactInputs
from finetune.quant.experts import RoutedTokens, expert_of, joined_stages, routed_mask
from finetune.quant.groups import quantize_groups
from finetune.quant.memo import ForwardMemo
from finetune.quant.methods import METHODS, QuantizedWeight
from finetune.quant.ranks import ALONE, Ranks, Share
from finetune.quant.scales import relative_error, weight_values
from finetune.quant.scheme import QuantScheme
from finetune.quant.smoothing import smooth_block
from finetune.quant.spill import HiddenStates, OneOf

CALIBRATION_DTYPE = torch.bfloat16
"""Of the calibration forwards: five times as fast as float32 on a processor with bfloat16 multipliers."""
PROBE_DTYPE = torch.float32
"""Of the probe: float32 tells finer faults than a model's own bfloat16 can."""


@dataclass
class Stream:
    """Hidden states on their way through the model, in chunks of a few sequences."""

    hidden: MutableSequence[Tensor]
    """Each (B, S, D); read one at a time, since all of them needn't be in memory."""
    masks: list[Tensor | None]
    """Each (B, S) bool, False at padding; None where the chunk has none."""
    calls: list[list[BlockCall]]
    """For each chunk the call of every block."""
    dtype: torch.dtype
    share: Share | None = None
    """Which of the calibration samples they are; None: all that there are."""

    def held(self) -> Share:
        """``share``, counted from the chunks where nobody said it."""
        if self.share is None:
            num_tokens: list[int] = []
            for hidden_BSD, mask_BS in zip(self.hidden, self.masks, strict=True):
                num_rows, length = hidden_BSD.shape[:2]
                num_tokens += [length] * num_rows if mask_BS is None else mask_BS.sum(1).tolist()
            self.share = Share(num_tokens, len(self.hidden[0]))
        return self.share

    def chunks(self) -> list[Stream]:
        """One stream a chunk."""
        parts = enumerate(zip(self.masks, self.calls, strict=True))
        return [
            Stream(OneOf(self.hidden, position), [mask_BS], [calls], self.dtype) for position, (mask_BS, calls) in parts
        ]

    def copy(self, name: str) -> Stream:
        """The same states, which go a way of their own from now on."""
        storage = self.storage(name)
        storage.extend(self.hidden)
        return Stream(storage, self.masks, self.calls, self.dtype, self.share)

    def storage(self, name: str) -> MutableSequence[Tensor]:
        """An empty list for more hidden states, which share this stream's memory with it."""
        return self.hidden.another(name) if isinstance(self.hidden, HiddenStates) else []

    def forward(self, block: nn.Module, index: int, device: torch.device) -> Iterator[Tensor]:
        """Yield the block's output for each chunk."""
        for hidden_BSD, calls in zip(self.hidden, self.calls, strict=True):
            yield calls[index].run(block, hidden_BSD.to(device, self.dtype))

    @torch.no_grad()
    def advance(self, block: nn.Module, index: int, device: torch.device, memo: ForwardMemo | None = None) -> None:
        """Replace the hidden states by the block's outputs; ``memo`` knows parts of them."""
        for position, (hidden_BSD, calls) in enumerate(zip(self.hidden, self.calls, strict=True)):
            with nullcontext() if memo is None else memo.skipping(position, device):
                self.hidden[position] = calls[index].run(block, hidden_BSD.to(device, self.dtype)).cpu()


@dataclass(frozen=True)
class BlockResult:
    tensors: dict[str, Tensor]
    """What isn't quantized, in its stored dtype, by its name inside the block."""
    quantized: dict[str, QuantizedWeight]
    """By the layer's name inside the block."""
    report: list[dict[str, Any]]
    """One entry a quantized layer."""


@dataclass(frozen=True)
class BlockQuantizer:
    """How every block is quantized."""

    decoder: StreamedDecoder
    schemes: Mapping[str, QuantScheme]
    """Of each layer to quantize, by its full name, in the model's order."""
    scale_dtypes: Mapping[QuantScheme, torch.dtype]
    """In which the storage format keeps scales."""
    method: str
    damp: float
    act_order: bool
    true_sequential: bool
    smoothing: float | Literal["search"] | None
    """Strength of the smoothing of int8 inputs; None leaves them as they are."""
    rounding_iterations: int = 0
    """Of a method that learns its rounding, in each block."""
    experts_in_scale_dtype: bool = False
    """Whether a load computes fused experts in the dtype of their scales, whatever dtype it is asked for."""
    ranks: Ranks = ALONE
    """Who else quantizes the same blocks, each with samples of its own."""

    def layers_of(self, index: int) -> list[str]:
        prefix = self.decoder.block_name(index) + "."
        return [name.removeprefix(prefix) for name in self.schemes if name.startswith(prefix)]

    def scheme_of(self, index: int, layer: str) -> QuantScheme:
        return self.schemes[f"{self.decoder.block_name(index)}.{layer}"]

    def input_roundings(self, index: int, quantized: Mapping[str, QuantizedWeight]) -> dict[str, InputRounding | None]:
        roundings: dict[str, InputRounding | None] = {}
        for name, weight in quantized.items():
            activations = self.scheme_of(index, name).activations
            roundings[name] = None if activations is None else InputRounding(activations, weight.input_scale)
        return roundings

    @contextmanager
    def quantized_block(
        self, index: int, result: BlockResult, *, dtype: torch.dtype, round_inputs: bool = True
    ) -> Iterator[nn.Module]:
        """The block as a plain load in ``dtype`` would compute it: dequantized weights, and inputs that are rounded,
        or left in floats."""
        tensors = dict(result.tensors)
        for name, weight in result.quantized.items():
            tensors[f"{name}.weight"] = weight_values(weight, dtype)
        with self.decoder.block(index, tensors, dtype=dtype) as block:
            layers = {name: _linear(block, name) for name in result.quantized}
            for name, weight in result.quantized.items():
                fused = f"{self.decoder.block_name(index)}.{name}.weight" in self.decoder.parts
                if fused and self.experts_in_scale_dtype:
                    values_OI = weight_values(weight, weight.scale.dtype).to(self.decoder.device)
                    layers[name].weight = nn.Parameter(values_OI, requires_grad=False)
            roundings = self.input_roundings(index, result.quantized)
            with quantized_inputs(layers, roundings if round_inputs else dict.fromkeys(layers)):
                yield block

    @torch.no_grad()
    def quantize(
        self, index: int, stream: Stream | None, *, advance: bool = False, exact: Stream | None = None
    ) -> BlockResult:
        """Quantize block ``index``; ``stream`` holds its inputs, None with a method that uses none.

        ``advance``: afterwards ``stream`` holds what the quantized block makes of them. ``exact`` holds its inputs in
        the unquantized model, afterwards its outputs there: the weights make up for the difference (``drift.py``).

        Raises RecipeError for a layer that the block's forward never reaches, CheckpointError for inputs that overflow.
        """
        tensors = self.decoder.load_block(index)
        wanted = self.layers_of(index)
        quantized: dict[str, QuantizedWeight] = {}
        report: list[dict[str, Any]] = []
        if stream is None:
            quantized, report = quantize_groups(self, index, [[name] for name in wanted], None, tensors)
        else:
            with self.decoder.block(index, tensors, dtype=stream.dtype) as block:
                learns = METHODS[self.method].learns and self.rounding_iterations
                outputs = stream.forward(block, index, self.decoder.device) if learns else ()
                targets = stream.storage("targets")
                targets.extend(output_BSD.cpu() for output_BSD in outputs)
                in_order = self._quantize_in_order
                hessians, memo = in_order(block, index, wanted, stream, exact, tensors, quantized, report)
                if learns:
                    self._learn(block, index, stream, targets, tensors, hessians, quantized, report)
                elif advance and memo is not None:
                    layers = {name: block.get_submodule(name) for name in quantized}
                    with quantized_inputs(layers, self.input_roundings(index, quantized)):
                        stream.advance(block, index, self.decoder.device, memo)
                    advance = False
        rest = {name: tensor for name, tensor in tensors.items() if name.removesuffix(".weight") not in quantized}
        order = list(self.schemes)
        result = BlockResult(rest, quantized, sorted(report, key=lambda entry: order.index(entry["layer"])))
        if stream is not None and advance:
            with self.quantized_block(index, result, dtype=stream.dtype) as block:
                stream.advance(block, index, self.decoder.device)
        return result

    def _learn(
        self,
        block: nn.Module,
        index: int,
        stream: Stream,
        targets: Sequence[Tensor],
        tensors: dict[str, Tensor],
        hessians: dict[str, Tensor],
        quantized: dict[str, QuantizedWeight],
        report: list[dict[str, Any]],
    ) -> None:
        """Replace ``quantized`` by what learning makes of it; the report's seconds get a layer's share of its time."""
        from finetune.quant.learned_rounding import learn_rounding

        started = time.perf_counter()
        weights = {name: tensors[f"{name}.weight"] for name in quantized}
        iterations = self.rounding_iterations
        learned = learn_rounding(self, index, block, weights, quantized, stream, targets, iterations=iterations)
        seconds = (time.perf_counter() - started) / len(learned)
        quantized.update(learned)
        prefix = self.decoder.block_name(index) + "."
        for entry in report:
            name = entry["layer"].removeprefix(prefix)
            entry["seconds"] = round(entry["seconds"] + seconds, 3)
            if not self.ranks.is_first:
                continue
            values_OI = weight_values(learned[name], torch.float32)
            entry["relative_error"] = relative_error(
                weights[name].to(values_OI.device).float(), values_OI, hessians[name]
            )

    def _quantize_in_order(
        self,
        block: nn.Module,
        index: int,
        wanted: list[str],
        stream: Stream,
        exact: Stream | None,
        tensors: dict[str, Tensor],
        quantized: dict[str, QuantizedWeight],
        report: list[dict[str, Any]],
    ) -> tuple[dict[str, Tensor], ForwardMemo | None]:
        """Quantize the block's layers in the order of its forward; returns their Hessians if the method learns, and
        what a pass over the samples needn't compute again."""
        device = self.decoder.device
        hessians: dict[str, Tensor] = {}
        layers = {name: _linear(block, name) for name in wanted}
        first_chunk = stream.chunks()[0]
        groups = shared_inputs(layers, lambda: list(first_chunk.forward(block, index, device)))
        unreached = set(wanted) - {name for group in groups for name in group}
        if unreached:
            raise RecipeError(
                f"{self.decoder.block_name(index)}.{min(unreached)} takes no part in the block's forward",
                fix="put it in `ignore`",
            )
        smoothed: set[str] = set()
        scaling = METHODS[self.method].scales_inputs
        rounding = [
            scheme for name in wanted if (scheme := self.scheme_of(index, name)).activations is not None or scaling
        ]
        if self.smoothing is not None and rounding:
            chunks = stream.chunks()
            smoothed = smooth_block(
                block,
                tensors,
                run=lambda position: next(chunks[position].forward(block, index, device)),
                masks=stream.masks,
                strength=None if self.smoothing == "search" else self.smoothing,
                scheme=rounding[0],
                ranks=self.ranks,
                share=stream.held(),
            )
        groups = [part for group in groups for part in self._by_scheme(index, group)]
        stages = joined_stages([[group] for group in groups], block) if self.true_sequential else [groups]
        exact_inputs = None
        if exact is not None:
            # Experts are given other tokens there, so theirs can't be compared. Before any expert is called with all
            # tokens: its outputs would differ in a last bit from those of a run that is resumed later.
            comparable = [group[0] for group in groups if expert_of(block, group[0]) is None]
            exact_inputs = ExactInputs(block, index, comparable, exact, device)
        routed = self._count_routed_tokens(block, index, stream)
        memo = None
        if self.true_sequential and not routed.modules:
            forward = first_chunk.forward(block, index, device)
            memo = ForwardMemo(block, groups, len(stream.hidden), lambda: list(forward))
        for stage in stages:
            done = {name: layers[name] for name in quantized}
            with quantized_inputs(done, self.input_roundings(index, quantized)):
                firsts = {group[0]: layers[group[0]] for group in stage}
                inputs = self._hessians(block, index, firsts, stream, memo, exact_inputs)
            found, entries = quantize_groups(self, index, stage, inputs, tensors)
            quantized.update(found)
            report += entries
            for name, weight in found.items():
                layers[name].weight = nn.Parameter(weight_values(weight, stream.dtype), requires_grad=False)
            for group in stage if METHODS[self.method].learns else ():
                hessians.update(dict.fromkeys(group, inputs[group[0]].mean()))
            give_back_freed_memory()  # what one stage leaves in pieces the next would take anew
        prefix = self.decoder.block_name(index) + "."
        of_experts = routed.describe(wanted)
        for entry in report:
            entry.update(of_experts.get(entry["layer"].removeprefix(prefix), {}))
        routed.reset()
        if self.smoothing is not None and rounding:
            for entry in report:
                entry["smoothed"] = entry["layer"].removeprefix(self.decoder.block_name(index) + ".") in smoothed
        return hessians, memo

    def _count_routed_tokens(self, block: nn.Module, index: int, stream: Stream) -> RoutedTokens:
        """How many tokens go to each expert; those with too few are given all from now on."""
        routed = RoutedTokens(block)
        for chunk in stream.chunks() if routed.modules else []:

            def add(name: str, args: tuple[Any, ...], mask_BS: Tensor | None = chunk.masks[0]) -> None:
                routed.add(name, args[1], mask_BS)

            outputs = chunk.forward(block, index, self.decoder.device)
            run_and_catch(routed.modules, lambda outputs=outputs: list(outputs), add, whole=True)
        routed.add_up(self.ranks)
        routed.calibrate_short_on_all()
        return routed

    def _by_scheme(self, index: int, group: list[str]) -> list[list[str]]:
        parts: dict[QuantScheme, list[str]] = {}
        for name in group:
            parts.setdefault(self.scheme_of(index, name), []).append(name)
        return list(parts.values())

    def _hessians(
        self,
        block: nn.Module,
        index: int,
        layers: dict[str, nn.Linear],
        stream: Stream,
        memo: ForwardMemo | None = None,
        exact_inputs: ExactInputs | None = None,
    ) -> dict[str, HessianSum]:
        device = self.decoder.device
        sums = {name: HessianSum(layer.in_features, device) for name, layer in layers.items()}
        for position, chunk in enumerate(stream.chunks()):

            def add(name: str, hidden_BSI: Tensor, position: int = position, chunk: Stream = chunk) -> None:
                exact_BSI = None
                if exact_inputs is not None and name in exact_inputs:
                    exact_BSI = exact_inputs.take(name, position)
                sums[name].add(hidden_BSI, routed_mask(block, name, chunk.masks[0]), exact_BSI)
                if memo is not None:
                    memo.keep(name, position, hidden_BSI)

            with nullcontext() if memo is None else memo.skipping(position, device):
                run_and_catch(layers, lambda chunk=chunk: list(chunk.forward(block, index, device)), add)
        for name, total in sums.items():
            total.add_up(self.ranks)
            if not torch.isfinite(total.mean()).all():
                raise CheckpointError(
                    f"the inputs of {self.decoder.block_name(index)}.{name} aren't finite on the calibration data",
                    where=self.decoder.folder,
                    fix="the model overflows or holds NaN: evaluate it before quantizing it",
                )
        return sums


def _linear(block: nn.Module, name: str) -> nn.Linear:
    layer = block.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer
