"""Weights that a model class holds otherwise than in ``nn.Linear``, put as ``nn.Linear``: nobody else need care.

Conv1D (GPT-2) keeps its weight as (I, O). Transformers keeps a block's experts as two parameters, gate_up_proj
(E, 2F, D) and down_proj (E, D, F), while checkpoints, and what loads quantized ones, have three matrices an expert.
Shapes: E experts, D hidden, F intermediate size, N tokens, K experts a token, M tokens of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.pytorch_utils import Conv1D


class LinearOfConv1D(nn.Linear):
    """Computes what a Conv1D does; ``weight`` is (O, I), the transpose of what files hold."""


class Expert(nn.Module):
    """Three Linear layers under the names that they have in checkpoints."""

    def __init__(self, names: tuple[str, str, str], hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.names = names
        gate, up, down = names
        self.add_module(gate, nn.Linear(hidden_size, intermediate_size, bias=False))
        self.add_module(up, nn.Linear(hidden_size, intermediate_size, bias=False))
        self.add_module(down, nn.Linear(intermediate_size, hidden_size, bias=False))
        self.tokens_M: Tensor | None = None
        """Which tokens of the flattened batch this expert was given in the forward under way."""
        self.calibrated_on_all = False
        """Be called with all tokens, though only those routed here count in the output."""

    def layers(self) -> list[nn.Linear]:
        """Gate, up and down."""
        layers = [self.get_submodule(name) for name in self.names]
        return [layer for layer in layers if isinstance(layer, nn.Linear)]


class LinearExperts(nn.Module):
    """Computes what a transformers experts module does, with a Linear layer a matrix, called for each expert.

    An expert without a token is called with none, so that who waits for its input is called too.
    """

    def __init__(self, fused: nn.Module, names: tuple[str, str, str]) -> None:
        super().__init__()
        num_experts, double_size, hidden_size = fused.gate_up_proj.shape  # type: ignore[union-attr, misc]
        self.num_experts = int(num_experts)
        self._apply_gate: Callable[[Tensor], Tensor] = fused._apply_gate  # type: ignore[assignment]
        for index in range(self.num_experts):
            self.add_module(str(index), Expert(names, hidden_size, double_size // 2))
        self.act_fn = fused.act_fn

    def experts(self) -> Iterator[Expert]:
        for index in range(self.num_experts):
            expert = self.get_submodule(str(index))
            assert isinstance(expert, Expert)
            yield expert

    def forward(self, hidden_ND: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        output_ND = torch.zeros_like(hidden_ND)
        for index, expert in enumerate(self.experts()):
            tokens_M, choices_M = torch.where(top_k_index == index)
            gate, up, down = expert.layers()
            all_N = torch.arange(len(hidden_ND), device=tokens_M.device)
            expert.tokens_M = all_N if expert.calibrated_on_all else tokens_M
            hidden_MD = hidden_ND[expert.tokens_M].to(gate.weight.dtype)
            gated_MF = self._apply_gate(torch.cat([gate(hidden_MD), up(hidden_MD)], dim=-1))
            output_MD = down(gated_MF)
            if expert.calibrated_on_all:
                output_MD = output_MD[tokens_M]
            weighted_MD = output_MD * top_k_weights[tokens_M, choices_M, None]
            output_ND.index_add_(0, tokens_M, weighted_MD.to(output_ND.dtype))
        return output_ND


@dataclass(frozen=True)
class FusedPart:
    """Where a Linear weight lies in a fused parameter of experts: rows ``start:stop`` of expert ``expert``."""

    parameter: str
    expert: int
    start: int
    stop: int


def put_linear(model: nn.Module, converters: Sequence[WeightConverter]) -> dict[str, FusedPart]:
    """Replace, in a model on the meta device, every Conv1D and every experts module that Linear layers can stand for.

    ``converters``: how transformers makes this model's parameters of a checkpoint's tensors. Experts stay as they are
    where those don't merge one matrix an expert. Returns where each expert's weight lies in its fused parameter.
    """
    parts: dict[str, FusedPart] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            num_inputs, num_outputs = module.weight.shape
            with torch.device("meta"):
                linear = LinearOfConv1D(num_inputs, num_outputs, bias=module.bias is not None)
            model.set_submodule(name, linear.eval())
        elif (names := expert_names(name, module, converters)) is not None:
            with torch.device("meta"):
                experts = LinearExperts(module, names)
            model.set_submodule(name, experts.eval())
            gate, up, down = names
            for index, expert in enumerate(experts.experts()):
                size, hidden_size = expert.layers()[0].weight.shape
                for part, fused, start, stop in (
                    (gate, "gate_up_proj", 0, size),
                    (up, "gate_up_proj", size, 2 * size),
                    (down, "down_proj", 0, hidden_size),
                ):
                    parts[f"{name}.{index}.{part}.weight"] = FusedPart(f"{name}.{fused}", index, start, stop)
    return parts


def expert_names(path: str, module: nn.Module, converters: Sequence[WeightConverter]) -> tuple[str, str, str] | None:
    """What a checkpoint calls the gate, up and down matrix of one expert of ``module``; None where it isn't of experts
    of that kind."""
    parameters = dict(module.named_parameters(recurse=False))
    plain = {"is_concatenated": True, "has_gate": True, "is_transposed": False, "has_bias": False}
    plain["has_post_expert_norm"] = False
    if parameters.keys() != {"gate_up_proj", "down_proj"} or not hasattr(module, "_apply_gate"):
        return None
    if any(getattr(module, key, None) is not value for key, value in plain.items()):
        return None
    gate_up = _merged_names(f"{path}.gate_up_proj", converters, [MergeModulelist, Concatenate])
    down = _merged_names(f"{path}.down_proj", converters, [MergeModulelist])
    return (*gate_up, *down) if len(gate_up) == 2 and len(down) == 1 else None  # type: ignore[return-value]


def _merged_names(parameter: str, converters: Sequence[WeightConverter], operations: list[type]) -> list[str]:
    """w1 and w3 of the patterns ``.experts.*.w1.weight`` and ``.experts.*.w3.weight`` that are merged to ``parameter``;
    nothing where they are made otherwise."""
    module = parameter.rpartition(".")[0]
    for converter in converters:
        target = converter._original_target_patterns[0].removeprefix("^").replace(r"\.", ".")
        if not parameter.endswith(target) or [type(operation) for operation in converter.operations] != operations:
            continue
        names = []
        for pattern in converter._original_source_patterns:
            before, star, behind = pattern.removeprefix("^").replace(r"\.", ".").partition("*.")
            if not star or not f"{module}.".endswith(before) or not behind.endswith(".weight"):
                return []
            names.append(behind.removesuffix(".weight"))
        return names
    return []
