"""What a block keeps for the backward pass: all of it, nothing but its input, or a copy in the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.errors import RecipeError

SMALLEST_OFFLOADED = 1 << 16
"""Bytes below which a kept tensor stays where it is: the copy's launch costs more than the room is worth."""


def checkpoint_blocks(model: PreTrainedModel, *, every: int) -> None:
    """Let every ``every``-th block (the last of each such group) compute its activations anew in the backward pass.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". Raises RecipeError for a model that can't.
    """
    if not model.supports_gradient_checkpointing:
        raise RecipeError(
            f"{type(model).__name__} can't checkpoint its activations",
            where="gradient_checkpointing",
            fix="set gradient_checkpointing: none",
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if every == 1:
        return
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if len(blocks) < every:
        raise RecipeError(
            f"{type(model).__name__} has {len(blocks)} blocks that can be checkpointed, so every {every}th is none",
            where="gradient_checkpointing",
            fix="set gradient_checkpointing to none, full, or a smaller number",
        )
    for number, block in enumerate(blocks, start=1):
        block.gradient_checkpointing = number % every == 0


def offloaded_activations(device: torch.device) -> AbstractContextManager[Any]:
    """A context for the forward pass in which what the backward pass needs waits in the host's memory.

    Parameters stay: a sharding engine gathers them anew. On the cpu nothing is moved.
    """
    if device.type == "cpu":
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(*host_hooks(pin_memory=True))


def host_hooks(*, pin_memory: bool) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """(pack, unpack) that copy a kept tensor to the host and back to its device."""

    def pack(tensor: Tensor) -> Any:
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter) or tensor.numel() * tensor.element_size() < SMALLEST_OFFLOADED:
            return tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin_memory)
        copy.copy_(tensor, non_blocking=pin_memory)
        return tensor.device, copy

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, copy = packed
        # The same stream wrote the copy, so it is whole by the time that this one reads it.
        moved: Tensor = copy.to(device, non_blocking=pin_memory)
        return moved

    return pack, unpack
