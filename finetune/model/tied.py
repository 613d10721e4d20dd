"""Parameters that are one tensor under several names."""

from __future__ import annotations

from torch import nn


def tied_parameter_names(model: nn.Module) -> dict[str, str]:
    """{alias: canonical name} of each parameter that a model holds under more than one name.

    The canonical name is the first in the order of ``named_parameters``: for a tied head it is the embedding's.
    """
    canonical: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in canonical:
            aliases[name] = canonical[id(parameter)]
        else:
            canonical[id(parameter)] = name
    return aliases
