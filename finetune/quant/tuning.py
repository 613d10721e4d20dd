"""Tune what a quantized model keeps in floats, scales and norms, so that the whole model predicts as the original does.

Codes stay as they are. The loss is KL(unquantized || quantized) of the next token on the calibration text, its gradient
goes through all blocks: what one layer's rounding did, others make up for, which no error of a single layer sees.
Tuning only the scales end to end is the second phase of EfficientQAT (Chen et al., 2024, arXiv:2407.11062); norms are
tuned as in Norm Tweaking (Li et al., 2023, arXiv:2309.02784), here by the same loss.

Several ranks take a step together, each with those of its sequences that it holds; all have the same tuned values.

Memory stays that of one block. A step runs its sequences forward through the blocks, one in memory at a time, and keeps
what enters each on disk; then it goes back, runs each block again with gradients, and updates it.

Shapes: B sequences, S tokens, D hidden size, V vocabulary, N positions; O, G as in ``scales``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

from finetune.engine.host_memory import give_back_freed_memory
from finetune.quant.activations import InputRounding, quantized_inputs
from finetune.quant.decoder import BlockCall
from finetune.quant.methods import QuantizedWeight
from finetune.quant.scales import dequantize
from finetune.quant.settings import TUNING_TOKENS
from finetune.quant.spill import OneOf
from finetune.quant.stream import BlockQuantizer, BlockResult, Stream

SCALE_RATE, NORM_RATE = 3e-3, 1e-3
"""Peak learning rates of Adam. What is tuned are relative changes: 3e-3 moves a scale by about one step of bfloat16."""
BETAS, EPSILON = (0.9, 0.95), 1e-10
WARMUP = 0.05
"""Share of the steps over which the rate rises; over the rest it falls to 0."""
POSITIONS_PER_CHUNK = 256
"""Positions whose logits exist at a time."""


@dataclass(frozen=True)
class _Tuned:
    """Relative changes of a block's tensors and Adam's moments of them, by name: all float32, of the tensor's shape."""

    change: dict[str, Tensor]
    mean: dict[str, Tensor]
    square: dict[str, Tensor]

    @classmethod
    def untouched(cls, block: BlockResult) -> _Tuned:
        shapes = {f"{name}.scale": weight.scale for name, weight in block.quantized.items()}
        # Vectors: norms, and biases, which a relative change keeps at 0 where they are 0.
        shapes |= {name: tensor for name, tensor in block.tensors.items() if _is_tuned(tensor)}
        parts = [{name: torch.zeros(tensor.shape) for name, tensor in shapes.items()} for _ in range(3)]
        return cls(*parts)

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], *, number: int, share: float) -> None:
        """One step of Adam, the ``number``th (from 1), at ``share`` of the peak rate."""
        for name, gradient in gradients.items():
            mean, square = self.mean[name], self.square[name]
            # Scales in float16 pass their gradients on in float16, where those of huge inputs overflow.
            gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
            mean.lerp_(gradient, 1 - BETAS[0])
            square.lerp_(gradient.square(), 1 - BETAS[1])
            corrected = square.div(1 - BETAS[1] ** number).sqrt_().add_(EPSILON)
            rate = (SCALE_RATE if name.endswith(".scale") else NORM_RATE) * share / (1 - BETAS[0] ** number)
            self.change[name].addcdiv_(mean, corrected, value=-rate)


Rows = list[tuple[int, slice]]
"""Sequences of a step that this rank holds: chunks of the stream, and rows in each."""
Run = Callable[[dict[str, Tensor], BlockCall, Tensor], Tensor]


class ScaleTuner:
    """``inputs`` holds the calibration samples as they enter the first block; ``load(i)`` gives the quantized block i,
    ``folder``, of this rank alone, is for what memory shouldn't hold; its content is dropped."""

    def __init__(
        self, quantizer: BlockQuantizer, inputs: Stream, *, load: Callable[[int], BlockResult], folder: Path
    ) -> None:
        self._quantizer = quantizer
        self._ranks = quantizer.ranks
        self._decoder = quantizer.decoder
        self._inputs = inputs
        self._share = inputs.held()
        self._load = load
        self._folder = folder
        self._num_blocks = len(self._decoder.blocks)

    def tune(self, *, steps: int, seed: int, save: Callable[[int, BlockResult], None]) -> list[float]:
        """Take ``steps`` steps, then ``save`` every block; returns the loss of each step (nats a token).

        Every rank saves the same; it is for ``save`` to know which one's is kept.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        per_step = max(1, TUNING_TOKENS // self._inputs.hidden[0].shape[1])
        epochs = itertools.chain.from_iterable(self._batches(per_step, seed + epoch) for epoch in itertools.count())
        batches = list(itertools.islice(epochs, steps))
        targets = self._exact_outputs({chunk for batch in batches for chunk, _ in self._rows(batch)})
        for index in range(self._num_blocks):
            block = self._load(index)
            self._write(self._folder / f"block-{index}", _flat(_parts_of(block)))
            self._store(index, _Tuned.untouched(block))
        losses = []
        with self._decoder.head(dtype=self._inputs.dtype) as head:
            for number, batch in enumerate(tqdm(batches, desc="tune", unit="step", disable=None), 1):
                losses.append(self._step(batch, targets, head, number=number, share=_rate(number, steps)))
        for index in range(self._num_blocks):
            block = self._load(index)
            tuned, change = self._restore(index), {}
            for name, value in _values(block, tuned.change).items():
                change[name] = value.detach()
            quantized = {
                name: replace(weight, scale=change[f"{name}.scale"].to(weight.scale.dtype))
                for name, weight in block.quantized.items()
            }
            tensors = {
                name: change[name].to(tensor.dtype) if name in change else tensor
                for name, tensor in block.tensors.items()
            }
            save(index, BlockResult(tensors, quantized, block.report))
        return losses

    def _exact_outputs(self, chunks: set[int]) -> Mapping[int, OneOf]:
        """What leaves the last unquantized block, (B, S, D) for each of ``chunks``, read when it is asked for."""
        inputs, order = self._inputs, sorted(chunks)
        masks, calls = [inputs.masks[chunk] for chunk in order], [inputs.calls[chunk] for chunk in order]
        exact = Stream(inputs.storage("exact"), masks, calls, inputs.dtype)
        exact.hidden.extend(inputs.hidden[chunk] for chunk in order)
        for index in range(self._num_blocks):
            with self._decoder.block(index, self._decoder.load_block(index), dtype=exact.dtype) as block:
                exact.advance(block, index, self._decoder.device)
        return {chunk: OneOf(exact.hidden, position) for position, chunk in enumerate(order)}

    def _batches(self, per_step: int, seed: int) -> Iterator[list[range]]:
        """The numbers of each step's sequences: chunks in an order drawn from ``seed``, each cut to steps."""
        chunks = self._share.batches
        order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(seed)).tolist()
        step: list[range] = []
        for chunk in (chunks[index] for index in order):
            for start in range(0, len(chunk), per_step):
                step.append(chunk[start : start + per_step])
                if sum(map(len, step)) >= per_step:
                    yield step
                    step = []
        if step:
            yield step

    def _rows(self, batch: list[range]) -> Rows:
        return [rows for samples in batch for rows in self._share.rows(samples)]

    def _step(
        self,
        batch: list[range],
        targets: Mapping[int, OneOf],
        head: Callable[[Tensor], Tensor],
        *,
        number: int,
        share: float,
    ) -> float:
        device, dtype = self._decoder.device, self._inputs.dtype
        step = self._rows(batch)  # of few sequences, or many ranks, it may be none
        num_tokens = sum(map(self._share.tokens_in, batch))
        hidden = [self._inputs.hidden[chunk][rows].to(device, dtype) for chunk, rows in step]
        calls = [[rows_of(call, rows, self._inputs.hidden[chunk]) for call in self._inputs.calls[chunk]]
                 for chunk, rows in step]  # fmt: skip
        for index in range(self._num_blocks if step else 0):
            self._write(self._folder / f"inputs-{index}", {str(part): x.cpu() for part, x in enumerate(hidden)})
            block = self._block_as_stored(index)
            with torch.no_grad(), self._block(index, block) as run:
                values = _values(block, self._restore(index).change)
                hidden = [run(values, call[index], x) for call, x in zip(calls, hidden, strict=True)]
        loss, gradients = self._loss(hidden, step, targets, head, num_tokens=num_tokens)
        for index in reversed(range(self._num_blocks)):
            stored = load_file(self._folder / f"inputs-{index}") if step else {}
            inputs = [stored[str(part)].to(device) for part in range(len(step))]
            block, tuned = self._block_as_stored(index), self._restore(index)
            changes = {name: change.to(device).requires_grad_() for name, change in tuned.change.items()}
            with self._block(index, block) as run:
                for part, (call, x) in enumerate(zip(calls, inputs, strict=True)):
                    output = run(_values(block, changes), call[index], x.requires_grad_())
                    output.backward(gradients[part])
                    assert x.grad is not None
                    gradients[part] = x.grad
            tuned.step(self._gradients(changes), number=number, share=share)
            self._store(index, tuned)
        give_back_freed_memory()
        return self._ranks.total(loss)

    def _gradients(self, changes: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of those of ``changes`` that a sequence of any rank has run through, summed over ranks, on the cpu."""
        reached_K = torch.tensor([change.grad is not None for change in changes.values()], dtype=torch.int64)
        self._ranks.sum_([reached_K])
        found = {}
        for (name, change), reached in zip(changes.items(), reached_K.tolist(), strict=True):
            if reached:
                found[name] = torch.zeros_like(change) if change.grad is None else change.grad
        self._ranks.sum_(found.values())
        return {name: gradient.cpu() for name, gradient in found.items()}

    def _loss(
        self,
        hidden: list[Tensor],
        step: Rows,
        targets: Mapping[int, OneOf],
        head: Callable[[Tensor], Tensor],
        *,
        num_tokens: int,
    ) -> tuple[float, list[Tensor]]:
        """The KL over this rank's tokens of the step, over ``num_tokens``, which are all ranks', and its gradients with
        respect to ``hidden``."""
        masks = []
        for (chunk, rows), x in zip(step, hidden, strict=True):
            mask_BS = self._inputs.masks[chunk]
            masks.append(torch.ones(x.shape[:2], dtype=torch.bool) if mask_BS is None else mask_BS[rows])
        total, gradients = 0.0, []
        for (chunk, rows), x, mask_BS in zip(step, hidden, masks, strict=True):
            keep_BS = mask_BS.to(x.device)
            leaf_ND = x.detach()[keep_BS].requires_grad_()
            exact_ND = targets[chunk][0][rows].to(x.device)[keep_BS]
            for start in range(0, len(leaf_ND), POSITIONS_PER_CHUNK):
                positions = slice(start, start + POSITIONS_PER_CHUNK)
                with torch.no_grad():
                    exact_CV = head(exact_ND[None, positions])[0].float().log_softmax(-1)
                model_CV = head(leaf_ND[None, positions])[0].float().log_softmax(-1)
                kl = nn.functional.kl_div(model_CV, exact_CV, reduction="sum", log_target=True) / num_tokens
                kl.backward()
                total += kl.item()
            assert leaf_ND.grad is not None
            gradient_BSD = torch.zeros_like(x)
            gradient_BSD[keep_BS] = leaf_ND.grad
            gradients.append(gradient_BSD)
        return total, gradients

    @contextmanager
    def _block(self, index: int, block: BlockResult) -> Iterator[Run]:
        """Within: ``run(values, call, hidden)`` computes the quantized block with ``values`` in place of its floats."""
        device, dtype = self._decoder.device, self._inputs.dtype
        roundings = self._quantizer.input_roundings(index, block.quantized)
        straight = {name: rounding and partial(round_straight, rounding) for name, rounding in roundings.items()}
        # Quantized weights come with each run. The next block takes the memory that this one leaves.
        with self._decoder.block(index, block.tensors, dtype=dtype, give_back=False) as module:

            def run(values: dict[str, Tensor], call: BlockCall, hidden_BSD: Tensor) -> Tensor:
                weights = {name: value.to(device, dtype) for name, value in values.items() if name in block.tensors}
                for name, weight in block.quantized.items():
                    scale_OG = values[f"{name}.scale"].to(weight.scale.dtype).to(device, dtype)
                    weights[f"{name}.weight"] = _dequantize(weight, scale_OG)
                return call.run(lambda *args, **kwargs: functional_call(module, weights, args, kwargs), hidden_BSD)

            with quantized_inputs({name: module.get_submodule(name) for name in straight}, straight):
                yield run

    def _block_as_stored(self, index: int) -> BlockResult:
        """What ``load`` gives but the report, without unpacking the storage format at each step."""
        parts = _by_part(load_file(self._folder / f"block-{index}"))
        quantized = {
            name: QuantizedWeight(
                codes=codes_OI,
                scale=parts["scale"][name],
                zero_point=parts["zero_point"].get(name),
                input_scale=parts["input_scale"].get(name),
            )
            for name, codes_OI in parts["codes"].items()
        }
        return BlockResult(parts["rest"], quantized, [])

    def _store(self, index: int, tuned: _Tuned) -> None:
        parts = {"change": tuned.change, "mean": tuned.mean, "square": tuned.square}
        self._write(self._folder / f"tuned-{index}", _flat(parts))

    def _restore(self, index: int) -> _Tuned:
        flat = load_file(self._folder / f"tuned-{index}")
        parts = _by_part({key: tensor.clone() for key, tensor in flat.items()})
        return _Tuned(parts["change"], parts["mean"], parts["square"])

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _parts_of(block: BlockResult) -> dict[str, dict[str, Tensor]]:
    """Everything a block computes with, by part and name."""
    assert all(weight.type == "int" for weight in block.quantized.values()), "the settings refuse to tune other types"
    parts = {"rest": block.tensors}
    for part in ("codes", "scale", "zero_point", "input_scale"):
        values = {name: getattr(weight, part) for name, weight in block.quantized.items()}
        parts[part] = {name: value for name, value in values.items() if value is not None}
    return parts


def _flat(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{part}:{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def _by_part(flat: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The inverse of ``_flat``; a part of which nothing was there is empty."""
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in flat.items():
        part, _, name = key.partition(":")
        parts[part][name] = tensor
    return parts


def _is_tuned(tensor: Tensor) -> bool:
    return tensor.ndim == 1 and tensor.is_floating_point()


def _values(block: BlockResult, change: dict[str, Tensor]) -> dict[str, Tensor]:
    """The changed tensors in float32: scales by ``<layer>.scale``, the others by their name."""
    before = {f"{name}.scale": weight.scale for name, weight in block.quantized.items()} | block.tensors
    return {name: before[name].to(part.device, torch.float32) * (1 + part) for name, part in change.items()}


def _dequantize(weight: QuantizedWeight, scale_OG: Tensor) -> Tensor:
    zero_point = None if weight.zero_point is None else weight.zero_point.to(scale_OG.device)
    return dequantize(weight.codes.to(scale_OG.device), scale_OG, zero_point)


def round_straight(rounding: InputRounding, hidden_BSI: Tensor) -> Tensor:
    """Rounded, with the gradient of what isn't (Bengio et al., 2013, arXiv:1308.3432)."""
    return hidden_BSI + (rounding(hidden_BSI.detach()) - hidden_BSI).detach()


def _rate(number: int, num_steps: int) -> float:
    warmup = max(1, round(WARMUP * num_steps))
    return min(number / warmup, 1 - (number - 1) / num_steps)


def rows_of(call: BlockCall, rows: slice, whole_BSD: Tensor) -> BlockCall:
    """``call`` for some rows of its chunk: tensors with an entry a row are cut, others serve any number of rows."""

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(cut(part) for part in value)
        is_by_row = isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == len(whole_BSD) > 1
        return value[rows] if is_by_row else value

    return BlockCall(cut(call.args), {name: cut(value) for name, value in call.kwargs.items()})
