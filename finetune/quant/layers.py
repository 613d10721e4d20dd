"""Which Linear layers are quantized: those inside the decoder's blocks that no ``ignore`` entry names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from torch import nn

from finetune.errors import RecipeError, did_you_mean
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.scheme import QuantScheme


def linear_names(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def matches(entry: str, name: str) -> bool:
    """Does an ``ignore`` entry name the layer ``name``? Names are compared part by part: layer 1 isn't layer 10.

    An entry is a layer's full name, its last part, the name of a module around it, a glob, or ``re:`` and a pattern
    that must match the whole name.
    """
    if entry.startswith("re:"):
        return re.fullmatch(entry.removeprefix("re:"), name) is not None
    if any(character in entry for character in "*?["):
        return fnmatch.fnmatchcase(name, entry)
    return name == entry or (name.endswith("." + entry) and "." not in entry) or name.startswith(entry + ".")


def ignored_names(model: nn.Module, ignore: Iterable[str], *, head: str | None) -> set[str]:
    """The layers that ``ignore`` names; ``lm_head`` always means the output head, whatever this model calls it.

    Raises RecipeError for an entry that names no layer, with the closest one that does.
    """
    names = list(linear_names(model))
    found: set[str] = set()
    for entry in ignore:
        try:
            hits = {name for name in names if matches(entry, name) or (entry == "lm_head" and name == head)}
        except re.error as cause:
            raise RecipeError(f"`ignore: {entry}` isn't a valid pattern: {cause}", fix="correct the pattern") from cause
        if not hits:
            last_parts = {name.rpartition(".")[2] for name in names}
            candidates = [*last_parts, *names] if "." in entry else last_parts
            raise RecipeError(f"`ignore: {entry}` names no Linear layer", fix=did_you_mean(entry, candidates))
        found |= hits
    return found


def target_layers(decoder: StreamedDecoder, scheme: QuantScheme, ignore: Iterable[str]) -> list[str]:
    """Full names of the layers to quantize, in the model's order; everything a user can have got wrong is found here.

    Raises RecipeError for an ``ignore`` entry that matches nothing, for a head that would be quantized, for layers
    whose size the group doesn't divide, and where no layer is left.
    """
    linears = linear_names(decoder.model)
    head_module = decoder.model.get_output_embeddings()
    head = next((name for name, module in linears.items() if module is head_module), None)
    ignored = ignored_names(decoder.model, ignore, head=head)
    if head is not None and head not in ignored:
        if f"{head}.weight" in decoder.aliases:
            raise RecipeError(
                f"`{head}` is the input embedding under a second name (tied), and an embedding isn't quantized",
                fix=f"put `{head}` in `ignore`",
            )
        raise RecipeError(
            f"`{head}` would be quantized: only layers inside the decoder's blocks can be",
            fix=f"put `{head}` in `ignore`",
        )
    prefix = decoder.blocks_name + "."
    targets = [name for name in linears if name.startswith(prefix) and name not in ignored]
    if not targets:
        kinds = sorted({type(module).__name__ for module in decoder.blocks[0].modules()})
        raise RecipeError(
            "no Linear layer is left to quantize",
            where=decoder.folder,
            fix=f"shorten `ignore`; the blocks are made of {', '.join(kinds)}",
        )
    _check_group_size({name: linears[name].in_features for name in targets}, scheme)
    return targets


def _check_group_size(in_features: dict[str, int], scheme: QuantScheme) -> None:
    group_size = scheme.weights.group_size
    if group_size is None:
        return
    unfit = {name: size for name, size in in_features.items() if size % group_size}
    if not unfit:
        return
    per_word = 32 // scheme.weights.num_bits
    fitting = [
        size
        for size in (16, 32, 64, 128, 256)
        if size % per_word == 0 and all(in_size % size == 0 for in_size in in_features.values())
    ]
    shown = [f"{name} ({size} inputs)" for name, size in list(unfit.items())[:4]]
    more = f" and {len(unfit) - 4} more" if len(unfit) > 4 else ""
    sizes = f"group_size {', '.join(map(str, fitting))} fits every layer" if fitting else "group_size: null fits"
    raise RecipeError(
        f"group_size {group_size} doesn't divide the inputs of {', '.join(shown)}{more}",
        fix=f"{sizes}; or put these layers in `ignore`",
    )
