"""The parts that a rank's memory is made of, and the counts of a model that decide them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

from finetune.engine.build import decoder_blocks

Place = Literal["device", "host", "nvme"]
Moment = Literal["loss", "backward starts", "backward ends", "step"]

MOMENTS: tuple[Moment, ...] = ("loss", "backward starts", "backward ends", "step")
"""When a step may be largest: the loss is computed, and its gradients with it, all activations are kept; the backward
of the last block runs; that of the first one is done; the optimizer steps."""
ALWAYS = frozenset(MOMENTS)
FORWARD: frozenset[Moment] = frozenset({"loss", "backward starts"})
COMPUTE: frozenset[Moment] = frozenset({"loss", "backward starts", "backward ends"})
BACKWARD: frozenset[Moment] = frozenset({"backward starts", "backward ends"})
GRADIENTS: frozenset[Moment] = frozenset({"backward ends", "step"})


@dataclass(frozen=True)
class MemoryItem:
    """One part of a rank's memory, and the moments of a step at which it is held."""

    name: str
    num_bytes: int
    place: Place
    moments: frozenset[Moment] = ALWAYS
    note: str = ""


@dataclass(frozen=True)
class ModelSize:
    """Counts of a model's parameters, each tied one once. ``outside``: in no block (embedding, head, last norm)."""

    total: int
    outside: int
    largest_block: int
    largest_parameter: int
    is_tied: bool
    buffer_bytes: int
    """Of the buffers that its files hold."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelSize:
        blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in decoder_blocks(model)]
        sizes = [parameter.numel() for parameter in model.parameters()]
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        buffers = (value for name, value in model.state_dict(keep_vars=True).items() if name not in parameters)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        return cls(
            total=sum(sizes),
            outside=sum(sizes) - sum(blocks),
            largest_block=max(blocks),
            largest_parameter=max(sizes),
            is_tied=head is not None and head.weight is embedding.weight,
            buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in buffers),
        )
