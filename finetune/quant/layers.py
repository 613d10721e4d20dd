"""Which Linear layers are quantized: those inside the decoder's blocks that no ``ignore`` entry names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import nn

from finetune.errors import RecipeError, did_you_mean
from finetune.quant.activations import shared_inputs
from finetune.quant.as_linear import LinearExperts
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.scheme import QuantScheme
from finetune.quant.settings import QuantizeSettings


def linear_names(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def matches(entry: str, name: str) -> bool:
    """Does an ``ignore`` entry name the layer ``name``? Names are compared part by part: layer 1 isn't layer 10.

    An entry is the full name of a layer or of a module around it; the last part of such a name (``mlp``: in every
    block), a number apart; a glob; or ``re:`` and a pattern that must match the whole name.
    """
    if entry.startswith("re:"):
        return re.fullmatch(entry.removeprefix("re:"), name) is not None
    if any(character in entry for character in "*?["):
        return fnmatch.fnmatchcase(name, entry)
    if name == entry or name.startswith(entry + "."):
        return True
    return entry in name.split(".") and not entry.isdecimal()


def some(names: Iterable[str], most: int = 4) -> str:
    """The first few of ``names`` and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def named_layers(
    model: nn.Module,
    entries: Iterable[str],
    *,
    head: str | None,
    key: str = "ignore",
    others: Iterable[str] = (),
) -> set[str]:
    """The layers that ``entries`` name; ``lm_head`` always means the output head, whatever this model calls it.

    ``others``: names of what isn't a Linear layer and may be named too.

    Raises RecipeError for an entry that names no layer, with the closest one that does.
    """
    names = [*linear_names(model), *others]
    found: set[str] = set()
    for entry in entries:
        try:
            hits = {name for name in names if matches(entry, name) or (entry == "lm_head" and name == head)}
        except re.error as cause:
            raise RecipeError(f"`{key}: {entry}` isn't a valid pattern: {cause}", fix="correct the pattern") from cause
        if not hits:
            parts = {part for name in names for part in name.split(".") if not part.isdecimal()}
            candidates = [*parts, *names] if "." in entry else parts
            raise RecipeError(f"`{key}: {entry}` names no Linear layer", fix=did_you_mean(entry, candidates))
        found |= hits
    return found


def layer_schemes(decoder: StreamedDecoder, settings: QuantizeSettings) -> dict[str, QuantScheme]:
    """The scheme of each layer to quantize by its full name, in the model's order.

    Everything a user can have got wrong about layers is found here. Raises RecipeError for an entry of ``ignore`` or
    ``overrides`` that matches nothing, for one of ``overrides`` that matches only what isn't quantized, for a head that
    would be quantized, for layers of one kernel with different schemes, for layers whose size the group doesn't divide,
    and where no layer is left.
    """
    linears = linear_names(decoder.model)
    head_module = decoder.model.get_output_embeddings()
    head = next((name for name, module in linears.items() if module is head_module), None)
    others = [
        f"{decoder.block_name(index)}.{name}"
        for index, block in enumerate(decoder.blocks)
        for name in weight_parameters(block)
    ]
    ignored = named_layers(decoder.model, settings.ignore, head=head, others=others)
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
    _check_other_parameters(decoder, ignored)
    kept = ignored | routers(decoder.model)
    targets = [name for name in linears if name.startswith(prefix) and name not in kept]
    if not targets:
        kinds = sorted({type(module).__name__ for module in decoder.blocks[0].modules()})
        raise RecipeError(
            "no Linear layer is left to quantize",
            where=decoder.folder,
            fix=f"shorten `ignore`; the blocks are made of {', '.join(kinds)}",
        )
    schemes = dict.fromkeys(targets, settings.quant_scheme)
    for override in settings.overrides:
        named = named_layers(decoder.model, override.layers, head=head, key="overrides.layers")
        if routed := sorted(named & routers(decoder.model)):
            raise RecipeError(
                f"`overrides.layers` names {routed[0]}, which chooses experts: such layers are never quantized",
                fix="name the other layers alone",
            )
        for entry in override.layers:
            matched = named_layers(decoder.model, [entry], head=head, key="overrides.layers")
            if matched.isdisjoint(targets):
                in_blocks = any(name.startswith(prefix) for name in matched)
                raise RecipeError(
                    f"`overrides.layers: {entry}` names nothing that is quantized, but {some(sorted(matched))}",
                    fix="take it out of `ignore`, or out of the override"
                    if in_blocks
                    else "leave it out: only layers inside the decoder's blocks are quantized",
                )
        schemes.update({name: override.quant_scheme for name in targets if name in named})
    _check_fused(schemes, ignored)
    for scheme in dict.fromkeys(schemes.values()):
        _check_group_size({name: linears[name].in_features for name in targets if schemes[name] == scheme}, scheme)
    return schemes


def routers(model: nn.Module) -> set[str]:
    """Linear layers that choose or weigh experts. They are tiny, each of their errors sends a token elsewhere, and
    inference engines expect them in floats."""
    found: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, LinearExperts):
            around = path.rpartition(".")[0] + "."
            for name, layer in linear_names(model.get_submodule(around[:-1])).items():
                if layer.out_features in (1, module.num_experts) and not (around + name).startswith(path + "."):
                    found.add(around + name)
    return found


LARGE_PART = 0.1
"""A parameter with this part of its block's weights can't be passed over without a word."""


def weight_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Matrices that aren't the weight of a Linear layer, such as fused experts that none stands for."""
    linears = {f"{name}.weight" for name in linear_names(model)}
    return {name: value for name, value in model.named_parameters() if value.ndim > 1 and name not in linears}


def _check_other_parameters(decoder: StreamedDecoder, ignored: set[str]) -> None:
    for index, block in enumerate(decoder.blocks):
        total = sum(parameter.numel() for parameter in block.parameters())
        for name, parameter in weight_parameters(block).items():
            full_name = f"{decoder.block_name(index)}.{name}"
            if parameter.numel() > LARGE_PART * total and full_name not in ignored:
                owner = type(block.get_submodule(name.rpartition(".")[0])).__name__
                raise RecipeError(
                    f"{full_name} (a {owner}, {parameter.numel() / total:.0%} of its block's weights) is no Linear "
                    "layer, and can't be quantized",
                    where=decoder.folder,
                    fix=f"keep it as it is: put `*.{name}` in `ignore`",
                )


@torch.no_grad()
def check_called(decoder: StreamedDecoder, schemes: Mapping[str, QuantScheme]) -> None:
    """Raise RecipeError for a layer whose weight the model reads past the layer's forward (Mamba's ``dt_proj``): its
    inputs can't be caught, and a loader that unpacks weights in the forward fails. One block of each kind is run."""
    hidden, calls = decoder.embed([torch.zeros((1, 2), dtype=torch.int64)], dtype=torch.float32)
    kinds: dict[tuple[tuple[str, type], ...], int] = {}
    for index, block in enumerate(decoder.blocks):
        kinds.setdefault(tuple((name, type(module)) for name, module in block.named_modules()), index)
    for index in kinds.values():
        prefix = decoder.block_name(index) + "."
        wanted = [name.removeprefix(prefix) for name in schemes if name.startswith(prefix)]
        with decoder.block(index, decoder.load_block(index), dtype=torch.float32) as block:
            layers = {name: block.get_submodule(name) for name in wanted}
            run = partial(calls[0][index].run, block, hidden[0].to(decoder.device))
            called = {name for group in shared_inputs(layers, run) for name in group}
        if uncalled := [name for name in wanted if name not in called]:
            raise RecipeError(
                f"{prefix}{uncalled[0]} is never called: its block reads the weight itself, or doesn't use it",
                where=decoder.folder,
                fix=f"keep it as it is: put `*.{uncalled[0]}` in `ignore`",
            )


FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Last parts of layers that inference engines compute as one, so that they need one scheme."""


def _check_fused(schemes: dict[str, QuantScheme], ignored: set[str]) -> None:
    for name, scheme in schemes.items():
        parent, _, last = name.rpartition(".")
        for parts in FUSED:
            for other in (f"{parent}.{part}" for part in parts if last in parts):
                if other in ignored or schemes.get(other, scheme) != scheme:
                    raise RecipeError(
                        f"{name} and {other} are computed as one layer by inference engines, and would get "
                        "different schemes",
                        fix=f"name {', '.join(f'`{parent}.{part}`' for part in parts)} together, or none of them",
                    )


def _check_group_size(in_features: dict[str, int], scheme: QuantScheme) -> None:
    group_size = scheme.weights.group_size
    if group_size is None or scheme.weights.type != "int":  # a format with blocks of its own checks them itself
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
    shown = some(f"{name} ({size} inputs)" for name, size in unfit.items())
    sizes = f"group_size {', '.join(map(str, fitting))} fits every layer" if fitting else "group_size: null fits"
    raise RecipeError(
        f"group_size {group_size} doesn't divide the inputs of {shown}",
        fix=f"{sizes}; or put these layers in `ignore`",
    )
