"""What plain transformers can't load as compressed-tensors, found out by loading it (transformers 5.24, 0.20.1)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from finetune.errors import RecipeError
from finetune.model.load import meta_model
from finetune.quant.as_linear import LinearExperts, LinearOfConv1D
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.layers import routers
from finetune.quant.scheme import QuantScheme


def check_plain_load(decoder: StreamedDecoder, schemes: Mapping[str, QuantScheme]) -> None:
    """Raise RecipeError for layers that would load as something else, or not at all."""
    for name, scheme in schemes.items():
        module = decoder.model.get_submodule(name)
        if isinstance(module, LinearOfConv1D):
            raise RecipeError(
                f"{name} is a Conv1D, whose weight lies transposed: compressed-tensors leaves it out, and plain "
                "transformers would load random weights for it",
                where=decoder.folder,
                fix=_other_formats(scheme),
            )
        if type(module) is not nn.Linear:
            raise RecipeError(
                f"{name} is a {type(module).__name__}, a Linear layer of this model's own kind, and plain transformers "
                "can't load such layers as compressed-tensors",
                where=decoder.folder,
                fix=_other_formats(scheme),
            )
    for path, module in decoder.model.named_modules():
        if isinstance(module, LinearExperts):
            _check_experts(decoder, path, schemes)
    _check_initialization(decoder, schemes)


def _check_initialization(decoder: StreamedDecoder, schemes: Mapping[str, QuantScheme]) -> None:
    """A load lets the class initialize what no file holds. Some (Mamba's) set weights of their Linear layers there,
    which a packed layer doesn't have: found out by doing the same on the meta device."""
    model = meta_model(decoder.config)
    for name, scheme in schemes.items():
        if scheme.activations is None and f"{name}.weight" not in decoder.parts:
            model.get_submodule(name).register_parameter("weight", None)
            del model.get_submodule(name).weight
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    try:
        model.initialize_weights()
    except AttributeError as cause:
        raise RecipeError(
            f"{type(model).__name__} initializes the weights of its Linear layers while transformers loads it, and "
            f"fails where they are packed ({cause})",
            where=decoder.folder,
            fix=_other_formats(next(iter(schemes.values()))),
        ) from cause


def _other_formats(scheme: QuantScheme) -> str:
    others = [name for name in scheme.formats if name != "compressed-tensors"]
    return f"choose `format: {' or '.join(others)}`" if others else "choose the scheme w4a16 with `format: gptq`"


def _check_experts(decoder: StreamedDecoder, path: str, schemes: Mapping[str, QuantScheme]) -> None:
    """Transformers fuses experts at a load: it dequantizes packed symmetric weights, all of them, by one scheme."""
    layers = [name.removesuffix(".weight") for name in decoder.parts if name.startswith(path + ".")]
    found = {schemes.get(name) for name in layers}
    if found == {None}:
        return
    # Beside several schemes it takes that of the first group whose names say "experts", as shared ones may do.
    alike = {scheme for name, scheme in schemes.items() if "experts." in name}
    if len(found | alike) > 1:
        kept = next((name for name in layers if name not in schemes), None)
        raise RecipeError(
            f"the experts in {path} would be stored in several schemes"
            + (f" ({kept} as it is)" if kept else "")
            + ": plain transformers loads all of them by one",
            where=decoder.folder,
            fix=f"give all experts one scheme, or put `*.{path.rpartition('.')[2]}.*` in `ignore`",
        )
    (scheme,) = found
    assert scheme is not None
    if scheme.activations is not None or not scheme.weights.symmetric:
        what = "int8 inputs" if scheme.activations is not None else "zero points"
        raise RecipeError(
            f"the experts in {path} can't have {what}: plain transformers fuses experts while it loads, and reads "
            "packed symmetric weights alone there",
            where=decoder.folder,
            fix="choose symmetric w4a16 or w8a16 for them (`overrides`), or put "
            f"`*.{path.rpartition('.')[2]}.*` in `ignore`",
        )


def kept_names(decoder: StreamedDecoder, kept: list[str]) -> list[str]:
    """Names of what stays in floats, for ``ignore`` of compressed-tensors: also those that other loaders know of
    (routers, the names in the files)."""
    names = dict.fromkeys([*kept, *sorted(routers(decoder.model))])
    for name in list(names):
        names[decoder.names.written_name(f"{name}.weight").removesuffix(".weight")] = None
    return list(names)
