"""Every family of decoders: streamed block by block it computes what plain transformers does; quantized, plain
transformers loads what was computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from finetune.errors import RecipeError
from finetune.export.verify import verify_folder
from finetune.model.load import load_model
from finetune.model.probe import check_probe, read_probe
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.quantize import quantize_model
from tests.families import CONV1D, EXPERTS, FAMILIES, OWN_LINEAR, tiny_model
from tests.test_quant_model import IDS, settings_for
from tests.tiny import tiny_llama, tiny_tokenizer


def plain_logits(folder: Path, ids: list[int] = IDS) -> Tensor:
    with torch.no_grad():
        logits_TV: Tensor = load_model(folder, dtype=torch.float32, device="cpu")(torch.tensor([ids])).logits[0]
    return logits_TV


def streamed_logits(decoder: StreamedDecoder) -> Tensor:
    """The unquantized model's, two sequences at once: the second is another one."""
    ids_BT = torch.tensor([IDS, IDS[::-1]])
    hidden, calls = decoder.embed([ids_BT], dtype=torch.float32)
    hidden_BTD = hidden[0]
    for index in range(len(decoder.blocks)):
        with decoder.block(index, decoder.load_block(index), dtype=torch.float32) as block, torch.no_grad():
            hidden_BTD = calls[0][index].run(block, hidden_BTD)
    return decoder.logits(hidden_BTD[:1], dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_streams_and_quantizes(family: str, tmp_path: Path) -> None:
    source = tiny_model(family, tmp_path / "source")
    decoder = StreamedDecoder(source)
    torch.testing.assert_close(streamed_logits(decoder), plain_logits(source), atol=1e-5, rtol=0)
    # What transformers can't load as compressed-tensors is tried in a format that holds it.
    extra = {"format": "gptq"} if family in (*CONV1D, *OWN_LINEAR) else {}
    for method in ("rtn", "gptq"):
        out = tmp_path / method
        report = quantize_model(source, settings=settings_for(tmp_path, method=method, **extra), out=out, seed=0)
        assert report["num_layers"] == sum(1 for _ in quantizable(decoder))
        assert report["carried_over"] == []
        probe = read_probe(out)
        assert probe is not None
        checked = check_probe(out, plain_logits(out, probe.input_ids))
        assert checked["max_abs_difference"] < 1e-4, (family, method)
        stored = load_file(out / "model.safetensors")
        tied = plain_tied(source)
        assert ("lm_head.weight" in stored) <= (not tied)
        assert set(unquantized(stored)) <= set(load_file(source / "model.safetensors"))


def quantizable(decoder: StreamedDecoder) -> Any:
    for block in decoder.blocks:
        for name, module in block.named_modules():
            if isinstance(module, torch.nn.Linear) and not name.endswith("shared_expert_gate"):
                yield name


def unquantized(stored: dict[str, Tensor]) -> list[str]:
    marks = ("weight_packed", "weight_scale", "weight_shape", "qweight", "qzeros", "scales", "g_idx")
    return [name for name in stored if name.rpartition(".")[2] not in marks]


def plain_tied(folder: Path) -> bool:
    model = load_model(folder, dtype=torch.float32, device="cpu")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embedding.weight


@pytest.mark.parametrize("family", [*CONV1D, *OWN_LINEAR])
def test_what_compressed_tensors_cannot_hold_is_refused_with_the_format_that_can(family: str, tmp_path: Path) -> None:
    source = tiny_model(family, tmp_path / "source")
    with pytest.raises(RecipeError, match=r"(?s)transformers.*format: gptq"):
        quantize_model(source, settings=settings_for(tmp_path), out=tmp_path / "out", seed=0)
    assert not (tmp_path / "out").exists()


def test_layers_that_are_never_called_are_refused_before_any_calibration(tmp_path: Path) -> None:
    """Mamba's block multiplies with dt_proj.weight itself; the rest of it quantizes and loads."""
    sizes = {"hidden_size": 64, "state_size": 16, "num_hidden_layers": 2, "time_step_rank": 32}
    source = tiny_model("mamba", tmp_path / "source", plain=True, **sizes)
    for method in ("rtn", "gptq"):
        with pytest.raises(RecipeError, match=r"(?s)dt_proj is never called.*dt_proj` in `ignore"):
            quantize_model(source, settings=settings_for(tmp_path, method=method), out=tmp_path / "out", seed=0)
    kept = {"ignore": ["lm_head", "dt_proj"]}
    with pytest.raises(RecipeError, match=r"(?s)initializes the weights .*where they are packed"):
        quantize_model(source, settings=settings_for(tmp_path, **kept), out=tmp_path / "out", seed=0)
    settings = settings_for(tmp_path, scheme="w8a8", **kept)
    assert quantize_model(source, settings=settings, out=tmp_path / "out", seed=0)["num_layers"] == 2 * 3
    verify_folder(tmp_path / "out", fresh_process=False)


def test_files_without_the_prefix_and_with_tensors_of_old_load_and_keep_their_names(tmp_path: Path) -> None:
    """As GPT-2's on the Hub: `h.0.attn.c_attn.weight` without `transformer.`, and masks stored as `h.0.attn.bias`."""
    source = tiny_model("gpt2", tmp_path / "source")
    stored = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(source / "model.safetensors").items()
    }
    stored["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(streamed_logits(StreamedDecoder(source)), plain_logits(source), atol=1e-5, rtol=0)
    report = quantize_model(source, settings=settings_for(tmp_path, format="gptq"), out=tmp_path / "out", seed=0)
    assert report["carried_over"] == ["h.0.attn.bias"]
    written = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(written["h.0.attn.bias"], stored["h.0.attn.bias"])
    assert {"wte.weight", "h.1.attn.c_attn.qweight", "h.1.attn.c_attn.bias"} <= set(written)
    verify_folder(tmp_path / "out", fresh_process=False)


def test_tensors_that_the_class_does_not_know_are_carried_over_and_listed(tmp_path: Path) -> None:
    """One that transformers leaves out by itself, one that nobody knows; the copy of a tied head isn't kept."""
    source = tiny_llama(tmp_path / "source", tied=True)
    stored = load_file(source / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(8.0),
        "mtp.layers.0.proj.weight": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    }
    save_file({**stored, **extra}, source / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    report = quantize_model(source, settings=settings_for(tmp_path), out=out, seed=0)
    assert sorted(report["carried_over"]) == sorted(extra)
    assert json.loads((out / "quantization_report.json").read_text())["carried_over"] == report["carried_over"]
    written = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in written
    for name, tensor in extra.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor)
    verify_folder(out, fresh_process=False)
    verify_folder(out, fresh_process=True)


def test_a_large_part_that_is_no_linear_layer_needs_a_word(tmp_path: Path) -> None:
    """Experts with transposed matrices and biases: no Linear layers stand for them."""
    extra = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "rope_scaling": None,
        "intermediate_size": 64,
    }
    source = tiny_model("gpt_oss", tmp_path / "source", **extra)
    with pytest.raises(RecipeError, match=r"(?s)gate_up_proj \(a GptOssExperts, .* is no Linear.*ignore"):
        quantize_model(source, settings=settings_for(tmp_path), out=tmp_path / "out", seed=0)
    settings = settings_for(tmp_path, ignore=["lm_head", "*.mlp.experts.*"])
    report = quantize_model(source, settings=settings, out=tmp_path / "out", seed=0)
    assert report["num_layers"] == 2 * 4
    probe = read_probe(tmp_path / "out")
    assert probe is not None
    assert check_probe(tmp_path / "out", plain_logits(tmp_path / "out", probe.input_ids))["max_abs_difference"] < 1e-4


@pytest.mark.parametrize("padding", [0, 5])
def test_what_a_block_gets_of_its_own_tokens_stays_with_its_chunk(padding: int, tmp_path: Path) -> None:
    """Two chunks of one shape share masks and positions, one tensor for both; a chunk of another shape doesn't."""
    decoder = StreamedDecoder(tiny_llama(tmp_path / "source"))
    chunks = [torch.tensor([IDS]), torch.tensor([IDS[::-1]]), torch.tensor([IDS[: 12 - padding]])]
    _, calls = decoder.embed(chunks, dtype=torch.float32)
    cos = [call[0].kwargs["position_embeddings"][0] for call in calls]
    assert cos[0] is cos[1]
    assert (cos[2].shape == cos[0].shape) == (padding == 0)


def test_the_tests_know_each_kind(tmp_path: Path) -> None:
    assert set(EXPERTS) | set(CONV1D) | set(OWN_LINEAR) <= set(FAMILIES)
    assert tiny_tokenizer().vocab_size > max(IDS)
