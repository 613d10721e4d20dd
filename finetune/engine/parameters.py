"""A module's parameters and buffers as the engines hold them: each once, whatever names it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from finetune.engine.weights import load_tensors, tensor_files


def replace_parameters(module: nn.Module, replacement: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Put ``replacement(name, parameter)`` in the place of each parameter, under all the names that are tied to it.

    ``requires_grad`` stays as it was.
    """
    replacements = {
        parameter: nn.Parameter(replacement(name, parameter), requires_grad=parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = replacements[parameter]


def move_buffers(module: nn.Module, device: torch.device) -> None:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """{``buffer.<name>``: buffer} of the buffers that a model's files hold; others follow from the configuration."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {
        f"buffer.{name.removeprefix('model.')}": tensor
        for name, tensor in module.state_dict().items()
        if name not in parameters
    }


def load_buffers(module: nn.Module, folder: Path) -> None:
    """Fill the persistent buffers that the model folder's files hold; the others keep what the configuration says."""
    stored = tensor_files(folder)
    buffers = {name.removeprefix("buffer."): buffer for name, buffer in persistent_buffers(module).items()}
    load_tensors(folder, {name: buffer for name, buffer in buffers.items() if name in stored})
