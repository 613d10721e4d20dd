"""Mixtures of experts: each expert is quantized on its own tokens, stored one by one, and loaded fused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from finetune.errors import RecipeError
from finetune.export.verify import verify_folder
from finetune.model.load import load_model
from finetune.model.probe import check_probe, read_probe
from finetune.quant import experts as module
from finetune.quant.activations import HessianSum, run_and_catch
from finetune.quant.as_linear import LinearExperts
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.experts import RoutedTokens, routed_mask
from finetune.quant.layers import routers
from finetune.quant.quantize import quantize_model
from tests.families import EXPERTS, tiny_model
from tests.test_quant_families import plain_logits, streamed_logits
from tests.test_quant_model import settings_for

LAYER_0 = "model.layers.0.mlp.experts"


def report_layers(folder: Path) -> dict[str, dict[str, Any]]:
    report = json.loads((folder / "quantization_report.json").read_text())
    return {entry["layer"]: entry for entry in report["layers"]}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("mixtral", tmp_path_factory.mktemp("mixtral") / "source")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 experts, one a token: a few sequences leave some with none."""
    folder = tmp_path_factory.mktemp("many") / "source"
    return tiny_model("mixtral", folder, num_local_experts=16, num_experts_per_tok=1)


def test_an_expert_sees_its_own_tokens_without_padding(mixtral: Path) -> None:
    """Counts and Hessians against the fused module's own routing, sums written out."""
    decoder = StreamedDecoder(mixtral)
    ids_BS = torch.randint(0, 300, (3, 20), generator=torch.Generator().manual_seed(0))
    mask_BS = torch.ones(3, 20, dtype=torch.bool)
    mask_BS[2, 11:] = False
    hidden, calls = decoder.embed([ids_BS], dtype=torch.float32)
    with decoder.block(0, decoder.load_block(0), dtype=torch.float32) as block, torch.no_grad():
        seen: dict[str, tuple[Any, ...]] = {}
        routed = RoutedTokens(block)
        layers = {f"mlp.experts.{index}.w1": block.get_submodule(f"mlp.experts.{index}.w1") for index in range(4)}
        sums = {name: HessianSum(64) for name in layers}

        def forward() -> Tensor:
            return calls[0][0].run(block, hidden[0])

        run_and_catch(routed.modules, forward, seen.__setitem__, whole=True)
        routed.add("mlp.experts", seen["mlp.experts"][1], mask_BS)
        run_and_catch(layers, forward, lambda name, x: sums[name].add(x, routed_mask(block, name, mask_BS)))
    into_ND, chosen_NK, _ = seen["mlp.experts"]
    kept_N = mask_BS.flatten()
    for index in range(4):
        mine_ND = into_ND[(chosen_NK == index).any(-1) & kept_N]
        total = sums[f"mlp.experts.{index}.w1"]
        assert routed.counts["mlp.experts"][index] == total.num_tokens == len(mine_ND) > 0
        torch.testing.assert_close(total.mean(), mine_ND.T @ mine_ND / len(mine_ND))
    assert routed.counts["mlp.experts"].sum() == 2 * (20 + 20 + 11)


def test_the_report_counts_the_tokens_of_each_expert(mixtral: Path, tmp_path: Path) -> None:
    report = quantize_model(mixtral, settings=settings_for(tmp_path), out=tmp_path / "out", seed=0)
    layers = report_layers(tmp_path / "out")
    used = report["calibration"]["tokens_used"]
    for index in range(2):
        counts = []
        for expert in range(4):
            of_expert = [layers[f"model.layers.{index}.mlp.experts.{expert}.{part}"] for part in ("w1", "w3", "w2")]
            assert len({entry["routed_tokens"] for entry in of_expert}) == 1
            counts.append(of_expert[0]["routed_tokens"])
            assert [entry["calibrated_on_all"] for entry in of_expert] == [counts[-1] < 0.25 * 64] * 3
        assert sum(counts) == 2 * used
        assert "routed_tokens" not in layers[f"model.layers.{index}.self_attn.q_proj"]


def test_experts_with_too_few_tokens_are_calibrated_on_all(many: Path, tmp_path: Path) -> None:
    """Even one that no token goes to gets codes that fit its inputs, and the model computes as it is stored."""
    quantize_model(many, settings=settings_for(tmp_path), out=tmp_path / "gptq", seed=0)
    quantize_model(many, settings=settings_for(tmp_path, method="rtn"), out=tmp_path / "rtn", seed=0)
    layers = report_layers(tmp_path / "gptq")
    experts = {name: entry for name, entry in layers.items() if ".experts." in name}
    assert {entry["calibrated_on_all"] for entry in experts.values()} == {True, False}
    assert min(entry["routed_tokens"] for entry in experts.values()) < 4
    for name, entry in experts.items():
        assert 0 < entry["relative_error"] < 0.03, name
        assert entry["clip"]["mean_ratio"] < 1.15, name
    verify_folder(tmp_path / "gptq", fresh_process=False)
    source = plain_logits(many)
    errors = {name: (plain_logits(tmp_path / name) - source).square().mean() for name in ("gptq", "rtn")}
    assert errors["gptq"] < errors["rtn"]


def test_calibrating_on_all_tokens_leaves_the_output_alone(many: Path) -> None:
    decoder = StreamedDecoder(many)
    expected = streamed_logits(decoder)
    for block in decoder.blocks:
        experts = block.get_submodule("mlp.experts")
        assert isinstance(experts, LinearExperts)
        for expert in experts.experts():
            expert.calibrated_on_all = True
    torch.testing.assert_close(streamed_logits(decoder), expected, atol=1e-5, rtol=0)


def test_passes_are_shared_by_experts_and_bounded_by_memory(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = StreamedDecoder(mixtral)
    block = decoder.blocks[0]
    stages = [[["self_attn.q_proj", "self_attn.k_proj"]]]
    for index in range(4):
        stages += [[[f"mlp.experts.{index}.w1", f"mlp.experts.{index}.w3"]], [[f"mlp.experts.{index}.w2"]]]
    entering = [[f"mlp.experts.{index}.w1", f"mlp.experts.{index}.w3"] for index in range(4)]
    inside = [[f"mlp.experts.{index}.w2"] for index in range(4)]
    assert module.joined_stages(stages, block) == [stages[0], entering, inside]
    monkeypatch.setattr(module, "MAX_HESSIAN_BYTES", 2 * 4 * 96 * 96)
    joined = module.joined_stages(stages, block)
    assert [len(stage) for stage in joined[:3]] == [1, 4, 2]
    assert [group for stage in joined for group in stage] == [*stages[0], *entering, *inside]
    # However many passes it takes, the result is that of one.
    outs = {}
    for name, limit in (("one", 2**30), ("each", 1)):
        monkeypatch.setattr(module, "MAX_HESSIAN_BYTES", limit)
        quantize_model(mixtral, settings=settings_for(tmp_path, tuning_steps=0), out=tmp_path / name, seed=0)
        outs[name] = load_file(tmp_path / name / "model.safetensors")
    same = [torch.equal(tensor, outs["each"][name]) for name, tensor in outs["one"].items() if "w2" not in name]
    assert all(same)


def test_fused_files_give_what_files_of_single_experts_give(mixtral: Path, tmp_path: Path) -> None:
    fused = tmp_path / "fused"
    model = load_model(mixtral, dtype="auto", device="cpu")
    model.save_pretrained(fused, save_original_format=False)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (mixtral / name).exists():
            (fused / name).write_bytes((mixtral / name).read_bytes())
    assert f"{LAYER_0}.gate_up_proj" in load_file(fused / "model.safetensors")
    outs = []
    for source in (mixtral, fused):
        outs.append(tmp_path / f"out-{source.name}")
        quantize_model(source, settings=settings_for(tmp_path), out=outs[-1], seed=0)
    single, whole = (load_file(out / "model.safetensors") for out in outs)
    # A tensor that the files hold as the class has it keeps the name it has there.
    whole = {name.replace(".mlp.gate.", ".block_sparse_moe.gate."): tensor for name, tensor in whole.items()}
    assert set(single) == set(whole)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in single.items())
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight_packed" in single


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_stay_in_floats_where_ignore_says_so(family: str, tmp_path: Path) -> None:
    source = tiny_model(family, tmp_path / "source")
    settings = settings_for(tmp_path, ignore=["lm_head", "*.mlp.experts.*"])
    quantize_model(source, settings=settings, out=tmp_path / "out", seed=0)
    assert not any(".experts." in name for name in report_layers(tmp_path / "out"))
    probe = read_probe(tmp_path / "out")
    assert probe is not None
    checked = check_probe(tmp_path / "out", plain_logits(tmp_path / "out", probe.input_ids))
    assert checked["max_abs_difference"] < 1e-4


def test_what_choose_experts_is_never_quantized(tmp_path: Path) -> None:
    source = tiny_model("qwen2_moe", tmp_path / "source")
    decoder = StreamedDecoder(source)
    assert routers(decoder.model) == {"model.layers.1.mlp.shared_expert_gate"}
    quantize_model(source, settings=settings_for(tmp_path, method="rtn"), out=tmp_path / "out", seed=0)
    written = load_file(tmp_path / "out/model.safetensors")
    assert written["model.layers.1.mlp.shared_expert_gate.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.shared_expert_gate" in config["ignore"]
    override = {"layers": ["shared_expert_gate"], "scheme": "w8a16"}
    settings = settings_for(tmp_path, method="rtn", overrides=[override])
    with pytest.raises(RecipeError, match="chooses experts"):
        quantize_model(source, settings=settings, out=tmp_path / "other", seed=0)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"scheme": "w8a8"}, "can't have int8 inputs"),
        ({"symmetric": False}, "can't have zero points"),
        ({"ignore": ["lm_head", "*.experts.2.*"]}, r"several schemes \(model.layers.0.mlp.experts.2.w1 as it is\)"),
        ({"overrides": [{"layers": ["*.experts.1.*"], "scheme": "w8a16"}]}, "several schemes"),
    ],
)
def test_what_a_plain_load_cannot_fuse_is_refused(
    values: dict[str, Any], told: str, mixtral: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=told):
        quantize_model(mixtral, settings=settings_for(tmp_path, method="rtn", **values), out=tmp_path / "out", seed=0)
    assert not (tmp_path / "out").exists()


def test_experts_may_have_another_scheme_than_attention(mixtral: Path, tmp_path: Path) -> None:
    overrides = [{"layers": ["*.experts.*"], "scheme": "w4a16", "group_size": 32}]
    settings = settings_for(tmp_path, scheme="w8a8", overrides=overrides)
    quantize_model(mixtral, settings=settings, out=tmp_path / "out", seed=0)
    schemes = {name: entry["scheme"] for name, entry in report_layers(tmp_path / "out").items()}
    assert {scheme for name, scheme in schemes.items() if ".experts." in name} == {"w4a16"}
    assert {scheme for name, scheme in schemes.items() if ".experts." not in name} == {"w8a8"}
    verify_folder(tmp_path / "out", fresh_process=False)
