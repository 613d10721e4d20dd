"""Outliers of int8 inputs move into the weights, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finetune.quant.decoder import StreamedDecoder
from finetune.quant.quantize import quantize_model
from finetune.quant.scheme import SCHEMES
from finetune.quant.settings import QuantizeSettings
from finetune.quant.smoothing import searched_factors, shared_inputs_of, smooth_block, smoothing_factors
from tests.tiny import CORPUS, tiny_llama

ATTENTION_INPUT = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
INT8 = SCHEMES["w8a8"]
MLP = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}


def with_outliers(folder: Path, **options: Any) -> Path:
    """A tiny Llama whose norms make two channels of every block's inputs 60 times as large as the others."""
    from safetensors.torch import load_file, save_file

    source = tiny_llama(folder, **options)
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if "layernorm" in name:
            weight[[3, 40]] *= 60
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            weight[:, [3, 40]] /= 60
        if name.endswith("v_proj.weight"):
            weight[7] *= 60
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    return source


@pytest.mark.parametrize(("dtype", "num_kv_heads"), [(torch.float32, 2), (torch.float32, 4), (torch.bfloat16, 4)])
def test_a_smoothed_block_computes_the_same_to_the_last_bit(
    dtype: torch.dtype, num_kv_heads: int, tmp_path: Path
) -> None:
    """Norm to q, k, v and to gate, up; up to down; v to o only where each head has its own v: gate and q never fold."""
    decoder = StreamedDecoder(with_outliers(tmp_path / "source", num_kv_heads=num_kv_heads))
    chunks = list(torch.arange(3 * 2 * 20).view(3, 2, 20))
    hidden, calls = decoder.embed(chunks, dtype=dtype)
    tensors = decoder.load_block(0)
    original = {name: tensor.clone() for name, tensor in tensors.items()}
    with decoder.block(0, tensors, dtype=dtype) as block, torch.no_grad():

        def run(position: int) -> Tensor:
            return calls[position][0].run(block, hidden[position])

        before = [run(position) for position in range(3)]
        smoothed = smooth_block(block, tensors, run=run, masks=[None] * 3, strength=0.5, scheme=INT8)
        assert smoothed == ATTENTION_INPUT | MLP | ({"self_attn.o_proj"} if num_kv_heads == 4 else set())
        for position in range(3):
            assert torch.equal(run(position), before[position])
    kept = {"mlp.gate_proj.weight"} - {name for name, tensor in tensors.items() if torch.equal(tensor, original[name])}
    assert kept == {"mlp.gate_proj.weight"}, "gate reads a smoothed input"
    ratio_D = original["input_layernorm.weight"] / tensors["input_layernorm.weight"]
    assert torch.equal(ratio_D.log2(), ratio_D.log2().round()), "factors are powers of two"
    assert ratio_D[3] > 4 * ratio_D.median()
    # With the block's stored tensors in their own dtype the same holds again.
    with decoder.block(0, tensors, dtype=dtype) as block, torch.no_grad():
        assert torch.equal(calls[0][0].run(block, hidden[0]), before[0])


def test_factors_are_powers_of_two_and_leave_a_silent_channel_alone() -> None:
    largest_I = torch.tensor([1.0, 64.0, 0.0, 1.0])
    factor_I = smoothing_factors(largest_I, [torch.ones(3, 4), torch.full((2, 4), 0.5)], 0.5)
    assert factor_I[2] == 1
    assert factor_I[1] / factor_I[0] == 8
    assert torch.equal(factor_I.log2(), factor_I.log2().round())


def test_the_search_finds_the_least_output_error() -> None:
    torch.manual_seed(0)
    sample_NI = torch.randn(200, 32)
    sample_NI[:, 5] *= 40
    weights = [torch.randn(24, 32), torch.randn(8, 32)]
    largest_I = sample_NI.abs().amax(0)

    def error(factor_I: Tensor) -> float:
        exact, rounded = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        with torch.no_grad():
            exact.weight.copy_(torch.cat(weights))
            scaled_OI = exact.weight * factor_I
            scale_O1 = scaled_OI.abs().amax(1, keepdim=True) / 127
            rounded.weight.copy_((scaled_OI / scale_O1).round() * scale_O1)
            step_N1 = (sample_NI / factor_I).abs().amax(1, keepdim=True) / 127
            inputs_NI = (sample_NI / factor_I / step_N1).round() * step_N1
            return float((rounded(inputs_NI) - exact(sample_NI)).square().mean())

    found_I = searched_factors(largest_I, weights, sample_NI, INT8)
    assert error(found_I) < 0.5 * error(torch.ones(32))
    for strength in (0.2, 0.5, 0.9):
        assert error(found_I) < 1.05 * error(smoothing_factors(largest_I, weights, strength))


def test_a_module_that_reads_a_norm_beside_the_linear_layers_forbids_the_fold() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.proj = nn.Linear(8, 8)

        def forward(self, hidden: Tensor) -> Tensor:
            normed = self.norm(hidden)
            return self.proj(normed) + normed

    torch.manual_seed(0)
    block, hidden = Block(), torch.randn(2, 5, 8)
    tensors = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    tensors["norm.weight"][2] = 30
    block.load_state_dict(tensors)
    assert shared_inputs_of(block, lambda: block(hidden))[0].producers == ["norm"]
    with torch.no_grad():
        before = block(hidden)
        assert (
            smooth_block(block, tensors, run=lambda _: block(hidden), masks=[None], strength=0.5, scheme=INT8) == set()
        )
        assert torch.equal(block(hidden), before)
    assert tensors["norm.weight"][2] == 30


@pytest.mark.parametrize("strength", [0.5, "search"])
def test_int8_of_a_model_with_outliers_needs_smoothing(strength: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = with_outliers(tmp_path / "source")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS * 3), encoding="utf-8")
    calibration = {"data": [{"path": str(data)}], "num_samples": 6, "max_seq_length": 24}
    for name, smoothing in (("smooth", strength), ("plain", None)):
        settings = QuantizeSettings(scheme="w8a8", calibration=calibration, smoothing=smoothing)
        quantize_model(source, settings=settings, out=tmp_path / name, seed=0)
    ids = torch.arange(60, 100).unsqueeze(0)
    with torch.no_grad():
        whole, smooth, plain = (
            AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)(ids).logits
            for name in ("source", "smooth", "plain")
        )
    assert (smooth - whole).square().mean() < 0.25 * (plain - whole).square().mean()
    layers = json.loads((tmp_path / "smooth/quantization_report.json").read_text())["layers"]
    assert {entry["layer"].split(".", 3)[3] for entry in layers if entry["smoothed"]} == ATTENTION_INPUT | MLP
