"""Between the tensors of a model class and those of its files, whose names and layouts may differ.

GPT-2's files may leave out the prefix ``transformer.``, Mixtral's say ``block_sparse_moe`` where the class says
``mlp``, experts lie one by one or fused. Transformers' own table of conversions, which a plain load uses, decides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from finetune.quant.as_linear import FusedPart


def weight_converters(model: PreTrainedModel) -> list[WeightConverter]:
    """How transformers makes parameters of this model of other tensors in a checkpoint."""
    return [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightConverter)]


@dataclass
class Origin:
    """What a tensor of the model is made of."""

    name: str
    """Of the tensor in the model, or of the first one where ``converter`` makes several."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Names in the files, by the converter's pattern that they match; without a converter a single one."""
    converter: WeightConverter | None = None
    part: FusedPart | None = None
    """Set where it is a piece of a stored tensor that holds all experts."""

    @property
    def stored_name(self) -> str | None:
        """The name in the files, where the tensor lies there as it is in the model."""
        plain = self.converter is None and self.part is None
        return next(iter(self.sources.values()))[0] if plain else None

    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]


class StoredNames:
    """``origins``: by name, what each tensor of ``model`` is made of. ``unknown``: stored tensors that none is."""

    def __init__(self, model: PreTrainedModel, parts: Mapping[str, FusedPart], stored: Iterable[str]) -> None:
        self._model = model
        # A tensor under several names (a tied head) isn't there twice in the meta model's parameters.
        self._state = dict.fromkeys(model.state_dict(), True)
        self._by_fused: dict[str, list[tuple[str, FusedPart]]] = {}
        for name, part in parts.items():
            self._by_fused.setdefault(part.parameter, []).append((name, part))
        transforms = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        self._reverse = [
            entry.reverse_transform()
            for entry in reversed(get_model_conversion_mapping(model, add_legacy=False))
            if isinstance(entry, WeightRenaming) and not isinstance(entry, PrefixChange)
        ]
        self.origins: dict[str, Origin] = {}
        self.unknown: list[str] = []
        for name in sorted(stored, key=dot_natural_key):
            self._place(name)

    def _rename(self, name: str, *, converters: list[WeightConverter]) -> tuple[str, str | None]:
        fused = dict.fromkeys(self._by_fused, True)
        prefix = self._model.base_model_prefix
        return rename_source_key(name, self._renamings, converters, prefix, {**self._state, **fused})

    def _place(self, stored: str) -> None:
        name, _ = self._rename(stored, converters=[])
        if name not in self._state and stored in self._state:
            name = stored
        if name in self._state:
            self.origins[name] = Origin(name, {stored: [stored]})
            return
        if name in self._by_fused:
            for part_name, part in self._by_fused[name]:
                self.origins[part_name] = Origin(part_name, {stored: [stored]}, part=part)
            return
        name, pattern = self._rename(stored, converters=self._converters)
        if pattern is None or name not in self._state:
            self.unknown.append(stored)
            return
        converter = next(entry for entry in self._converters if pattern in entry.source_patterns)
        origin = self.origins.get(name)
        if origin is None or origin.converter is None:
            origin = Origin(name, converter=converter)
            first = converter.target_patterns[0]
            for target in converter.target_patterns:
                self.origins[name.replace(first, target)] = origin
        origin.sources.setdefault(pattern, []).append(stored)

    def make(self, name: str, load: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The model's tensor ``name`` (and those that are made with it) of what ``load`` gives for stored names."""
        origin = self.origins[name]
        if origin.converter is None:
            tensor = load(origin.names()[0])
            if origin.part is not None:
                tensor = tensor[origin.part.expert, origin.part.start : origin.part.stop].clone()
            return {name: tensor}
        converter = copy.deepcopy(origin.converter)
        for pattern, names in origin.sources.items():
            for stored in names:
                converter.add_tensor(origin.name, stored, pattern, load(stored))  # type: ignore[arg-type]
        made = converter.convert(origin.name, model=self._model, config=self._model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}

    def written_name(self, name: str) -> str:
        """Under what name a model file is to hold the tensor ``name``: the source's own, else the one that
        ``save_pretrained`` gives it. A plain load finds it under that name again."""
        origin = self.origins.get(name)
        if origin is not None and origin.stored_name is not None:
            return origin.stored_name
        written = name
        for renaming in self._reverse:
            written, _ = renaming.rename_source_key(written)
        return written if self._rename(written, converters=[])[0] == name else name
