"""Experts of a mixture: each is calibrated on the tokens that are routed to it, or on all where those are too few."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from finetune.quant.as_linear import Expert, LinearExperts
from finetune.quant.ranks import Ranks

FEWEST_TOKENS_PER_INPUT = 0.25
"""An expert with fewer routed tokens than this part of its inputs is calibrated on all tokens, as if all were routed to
it: of so few, a Hessian knows a quarter of the directions."""
MAX_HESSIAN_BYTES = 4 * 2**30
"""Experts whose Hessians need more together take several passes over the calibration tokens."""


def expert_of(block: nn.Module, layer: str) -> Expert | None:
    """The expert that ``layer`` of ``block`` belongs to."""
    owner = block.get_submodule(layer.rpartition(".")[0])
    return owner if isinstance(owner, Expert) else None


def routed_mask(block: nn.Module, layer: str, mask_BS: Tensor | None) -> Tensor | None:
    """``mask_BS`` for the rows that ``layer`` is reading now: an expert is given (tokens, width), some of the batch."""
    expert = expert_of(block, layer)
    if mask_BS is None or expert is None:
        return mask_BS
    assert expert.tokens_M is not None
    return mask_BS.flatten().to(expert.tokens_M.device)[expert.tokens_M]


def joined_stages(stages: list[list[list[str]]], block: nn.Module) -> list[list[list[str]]]:
    """``stages`` (of groups of layers, each calibrated in one pass) with those joined that are of different experts:
    first what enters all experts, then what is inside all of them. A pass an expert would cost hours."""
    joined: list[list[list[str]]] = []
    places: dict[tuple[str, bool], int] = {}
    bytes_of: list[int] = []
    for stage in stages:
        first = stage[0][0]
        expert = expert_of(block, first)
        if expert is None or len(stage) > 1:
            joined.append(stage)
            bytes_of.append(0)
            continue
        key = (first.rpartition(".")[0].rpartition(".")[0], first.endswith("." + expert.names[2]))
        layer = block.get_submodule(first)
        assert isinstance(layer, nn.Linear)
        needed = 4 * layer.in_features**2
        if key in places and bytes_of[places[key]] + needed <= MAX_HESSIAN_BYTES:
            joined[places[key]] += stage
            bytes_of[places[key]] += needed
        else:
            places[key] = len(joined)
            joined.append(list(stage))
            bytes_of.append(needed)
    # What enters experts comes before what is inside them, also where it took several passes.
    return _inside_last(joined, block)


def _inside_last(stages: list[list[list[str]]], block: nn.Module) -> list[list[list[str]]]:
    def rank(stage: list[list[str]]) -> int:
        expert = expert_of(block, stage[0][0])
        return 0 if expert is None else 2 if stage[0][0].endswith("." + expert.names[2]) else 1

    ordered = list(stages)
    places = [place for place, stage in enumerate(stages) if rank(stage)]
    for place, stage in zip(places, sorted((stages[place] for place in places), key=rank), strict=True):
        ordered[place] = stage
    return ordered


class RoutedTokens:
    """Counts, over the calibration tokens, how many each expert of a block is given."""

    def __init__(self, block: nn.Module) -> None:
        self.modules = {name: module for name, module in block.named_modules() if isinstance(module, LinearExperts)}
        self.counts = {
            name: torch.zeros(module.num_experts, dtype=torch.int64) for name, module in self.modules.items()
        }

    def add(self, name: str, top_k_index_NK: Tensor, mask_BS: Tensor | None) -> None:
        if mask_BS is not None:
            top_k_index_NK = top_k_index_NK[mask_BS.flatten().to(top_k_index_NK.device)]
        num_experts = self.modules[name].num_experts
        # An index past the last expert says: none.
        counts = torch.bincount(top_k_index_NK.flatten().cpu(), minlength=num_experts + 1)
        self.counts[name] += counts[:num_experts]

    def add_up(self, ranks: Ranks) -> None:
        """Let the counts be those of all ranks' tokens."""
        ranks.sum_(self.counts.values())

    def calibrate_short_on_all(self) -> None:
        """Let experts with too few tokens be called with all of them."""
        for name, module in self.modules.items():
            for count, expert in zip(self.counts[name].tolist(), module.experts(), strict=True):
                expert.calibrated_on_all = count < FEWEST_TOKENS_PER_INPUT * expert.layers()[0].in_features

    def reset(self) -> None:
        for module in self.modules.values():
            for expert in module.experts():
                expert.calibrated_on_all = False
                expert.tokens_M = None

    def describe(self, layers: Iterable[str]) -> dict[str, dict[str, Any]]:
        """For each of ``layers`` that is an expert's: its routed tokens, and whether it was calibrated on all."""
        described = {}
        for layer in layers:
            path, _, index = layer.rpartition(".")[0].rpartition(".")
            if path in self.modules:
                expert = self.modules[path].get_submodule(index)
                assert isinstance(expert, Expert)
                count = int(self.counts[path][int(index)])
                described[layer] = {"routed_tokens": count, "calibrated_on_all": expert.calibrated_on_all}
        return described
