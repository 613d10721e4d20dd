"""What a model folder is to hold: each tensor that the configuration asks for, from where it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from finetune.checkpoint.sources import Names, Source
from finetune.checkpoint.stored import StoredTensor
from finetune.errors import CheckpointError
from finetune.model.load import meta_model
from finetune.model.tied import tied_parameter_names


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the result: from where, as what, and which stored copies of it must be equal to it."""

    name: str
    stored: StoredTensor
    dtype: torch.dtype
    copies: tuple[StoredTensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.stored.num_elements * self.dtype.itemsize


def plan_model(source: Source, *, dtype: torch.dtype) -> tuple[list[OutputTensor], dict[str, str]]:
    """Match what is stored with what the model of the source's config.json expects: (outputs in its order, aliases).

    Raises CheckpointError for a tensor that is missing, left over or of another shape.
    """
    # Only names and shapes matter here, and eager is what every model has.
    model = meta_model(source.model_folder, attn_implementation="eager")
    fix = f"{source.model_folder / 'config.json'} is of another model"
    aliases = tied_parameter_names(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    expected = model.state_dict(keep_vars=True)
    buffers = frozenset(expected.keys() - parameters.keys())
    # Buffers that the model computes from its configuration have no place in the weight files.
    computed = frozenset(name for name, _ in model.named_buffers(remove_duplicate=False) if name not in expected)
    stored = source.read(Names(frozenset(parameters), buffers, computed))
    if stored.left_over:
        raise CheckpointError(f"the checkpoint holds {stored.left_over[0]}", where=source.folder, fix=fix)
    outputs: list[OutputTensor] = []
    for name, tensor in expected.items():
        if name in aliases:
            continue
        names = [name, *(alias for alias, canonical in aliases.items() if canonical == name)]
        found = [stored.tensors[known] for known in names if known in stored.tensors]
        if not found:
            prefix = ("buffer." if name in buffers else "model.") if source.kind == "ours" else ""
            raise CheckpointError(f"the checkpoint lacks {prefix}{name}", where=source.folder, fix=fix)
        for each in found:
            if each.shape != tuple(tensor.shape):
                raise CheckpointError(
                    f"{each.name} is {list(each.shape)} in the checkpoint, {list(tensor.shape)} by its config.json",
                    where=source.folder,
                    fix=fix,
                )
        first = found[0]
        cast = name in parameters and first.dtype.is_floating_point
        copies = tuple(each for each in found[1:] if each.pieces != first.pieces)
        outputs.append(OutputTensor(name, first, dtype if cast else first.dtype, copies))
    return outputs, aliases


def split_files(outputs: Sequence[OutputTensor], max_shard_size_bytes: int) -> list[list[OutputTensor]]:
    """Consecutive tensors in files of at most ``max_shard_size_bytes``; a larger tensor gets a file of its own."""
    groups: list[list[OutputTensor]] = []
    room = 0
    for output in outputs:
        if not groups or output.num_bytes > room:
            groups.append([])
            room = max_shard_size_bytes
        groups[-1].append(output)
        room -= output.num_bytes
    return groups


def file_names(num_files: int) -> list[str]:
    """As transformers names them."""
    if num_files == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{num_files:05d}.safetensors" for number in range(1, num_files + 1)]


def require_dtype(source: Source, dtype: torch.dtype) -> None:
    """Raise CheckpointError where the masters can't be had and so ``dtype`` would hold rounded values."""
    if source.only_dtype and source.only_dtype[0] != dtype:
        stored, reason = source.only_dtype
        raise CheckpointError(reason, where=source.folder, fix=f"add --dtype {str(stored).removeprefix('torch.')}")
