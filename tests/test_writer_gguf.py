"""GGUF: blocks bit by bit, whole models by transformers' reader and by llama.cpp, and what verify tells."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("gguf")

import gguf

from finetune.errors import CheckpointError, MissingDependencyError, RecipeError
from finetune.export.folder import export_model
from finetune.export.model_card import CardFacts
from finetune.export.verify import verify_folder
from finetune.model.load import load_model, load_tokenizer
from finetune.model.probe import check_probe, read_probe
from finetune.quant.gguf_blocks import from_blocks, to_blocks, type_name
from finetune.quant.methods import QuantizedWeight
from finetune.quant.methods.rtn import quantize_rtn
from finetune.quant.q4_k import quantize_q4_k
from finetune.quant.quantize import quantize_model
from finetune.quant.scales import weight_values
from finetune.quant.scheme import SCHEMES, scheme_with
from finetune.quant.settings import QuantizeSettings
from tests.llama_cpp_run import interpreter, run_llama_cpp
from tests.test_quant_model import settings_for
from tests.tiny import tiny_llama, tiny_tokenizer

Q4_0 = {"scheme": "w4a16", "format": "gguf", "method": "rtn"}
TEXTS = ["the quick brown fox, isn't it?  12345\n\nHello  World", "<|im_start|>user\nWhat is  2 +3?<|im_end|>\n"]
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {"model_type": "llama", "rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 32}},
    "linear": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "mistral": {"sliding_window": 64},
    "qwen2": {"tie_word_embeddings": True},
    # These sizes, those of the real ones, transformers' reader takes for granted.
    "qwen3": {"head_dim": 128},
    "gemma2": {"sliding_window": 8, "head_dim": 256, "query_pre_attn_scalar": 256, "num_hidden_layers": 3},
    "gemma3_text": {"sliding_window": 8, "head_dim": 256, "query_pre_attn_scalar": 256, "num_hidden_layers": 7},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024},
}
UNREADABLE_ALONE = {"llama3", "linear"}
"""transformers' reader takes no rotary scaling from a GGUF file: it needs config.json, as load_model gives it."""


def tiny_family(name: str, folder: Path, **extra: Any) -> Path:
    """A random bfloat16 model of this family, no two of whose norms are alike."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    values = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "model_type": name,
    }
    if name == "gpt2":
        values = {"model_type": name}
    values |= {**FAMILIES[name], **extra, "initializer_range": 0.1, "vocab_size": len(tokenizer)}
    ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(values.pop("model_type"), **values, **ids)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                centre = 0.0 if parameter_name.endswith("bias") else parameter.float().mean().item()
                parameter.copy_(centre + 0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def quantized(source: Path, out: Path, **values: Any) -> Path:
    quantize_model(source, settings=QuantizeSettings(**{**Q4_0, **values}), out=out, seed=0)
    return out


@torch.no_grad()
def probe_logits(model: Any, folder: Path) -> Tensor:
    probe = read_probe(folder)
    assert probe is not None
    logits_TV: Tensor = model(torch.tensor([probe.input_ids])).logits[0]
    return logits_TV


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: quantized(tiny_family(name, root / name), root / f"{name}-gguf") for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_reads_what_was_computed(name: str, families: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    out = families[name]
    ours = probe_logits(load_model(out, dtype=torch.float32, device="cpu"), out)
    assert check_probe(out, ours)["rms_difference"] < 1e-5
    plain = AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=torch.float32).eval()
    agrees = check_probe(out, probe_logits(plain, out))["rms_difference"] < 1e-5
    assert agrees == (name not in UNREADABLE_ALONE)


@pytest.mark.skipif(interpreter() is None, reason="llama-cpp-python isn't installed")
def test_llama_cpp_computes_and_tokenizes_alike(families: dict[str, Path], tmp_path: Path) -> None:
    """llama.cpp rounds inputs to 8 bits, which is 0.03 of the logits' spread; a wrong layer is 0.3 and more."""
    folders = {**families, "llama q8_0": families["llama"].with_name("llama-q8_0")}
    source = families["llama"].with_name("llama")
    quantized(source, folders["llama q8_0"], scheme="w8a16")
    wide = tiny_llama(tmp_path / "wide", hidden_size=256, intermediate_size=512, dtype="bfloat16")
    folders["q4_k"] = quantized(wide, tmp_path / "q4_k", scheme="q4_k")
    jobs = []
    for name, folder in folders.items():
        probe = read_probe(folder)
        assert probe is not None
        file, out = str(folder / "model.gguf"), str(tmp_path / f"{name}.npy")
        jobs.append({"file": file, "ids": probe.input_ids, "texts": TEXTS, "out": out})
    run_llama_cpp(jobs, tmp_path)
    for (name, folder), job in zip(folders.items(), jobs, strict=True):
        checked = check_probe(folder, torch.from_numpy(np.load(job["out"])))
        assert checked["rms_difference"] < 0.1, (name, checked)
        tokenizer = load_tokenizer(folder)
        ids = json.loads(Path(job["out"] + ".json").read_text())
        assert ids == [tokenizer(text)["input_ids"] for text in TEXTS], name


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "q4_k"])
def test_blocks_are_those_of_the_gguf_package(scheme: str) -> None:
    """Its dequantizer gives our values, and reading gives back what was stored, bit by bit."""
    described = SCHEMES[scheme] if scheme == "q4_k" else scheme_with(scheme, group_size=32)
    torch.manual_seed(0)
    weight_OI = torch.randn(6, 512) * torch.logspace(-3, 1, 6).unsqueeze(1) + torch.randn(6, 1) * 0.01
    weight_OI[3] = 0
    rounded = quantize_rtn(
        weight_OI, None, weights=described.weights, scale_dtype=torch.float16, damp=0.01, act_order=False
    )
    kind = type_name(described)
    assert kind is not None
    blocks_OB = to_blocks(rounded, kind)
    back = from_blocks(blocks_OB, kind)
    assert torch.equal(back.codes, rounded.codes)
    assert torch.equal(back.scale, rounded.scale)
    theirs = gguf.dequantize(blocks_OB.numpy(), gguf.GGMLQuantizationType[kind])
    values_OI = weight_values(back, torch.float32)
    assert np.array_equal(theirs, values_OI.numpy())
    assert (values_OI[3] == 0).all()
    assert rounded.codes[0].unique().numel() > 12, "the whole range of codes is in use"


def test_every_code_and_sign_survives() -> None:
    torch.manual_seed(1)
    for kind, bits in (("Q4_0", 4), ("Q8_0", 8)):
        codes_OI = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (8, 256), dtype=torch.int8)
        scale_OG = (torch.randn(8, 8) * 0.1).half()
        weight = QuantizedWeight(codes_OI, scale_OG)
        theirs = gguf.dequantize(to_blocks(weight, kind).numpy(), gguf.GGMLQuantizationType[kind])
        expected = codes_OI.float().unflatten(1, (8, 32)) * scale_OG.float().unsqueeze(-1)
        assert np.array_equal(theirs, expected.flatten(1).numpy())


def test_q4_k_beats_the_plain_way_to_round_and_its_own_size_at_q4_0() -> None:
    torch.manual_seed(0)
    weight_OI = torch.randn(64, 1024) + 0.3 * torch.randn(64, 1)
    error = (weight_values(quantize_q4_k(weight_OI), torch.float32) - weight_OI).square().mean()
    groups = weight_OI.unflatten(1, (-1, 32))
    low, high = groups.amin(-1, keepdim=True).clamp_max(0), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    plain = (((groups - low) / step).round().clamp(0, 15) * step + low - groups).square().mean()
    q4_0 = gguf.dequantize(gguf.quantize(weight_OI.numpy(), gguf.GGMLQuantizationType.Q4_0), 2)
    assert error < 0.97 * plain
    assert error < 0.85 * float(((torch.from_numpy(q4_0) - weight_OI) ** 2).mean())


def test_gptq_codes_reach_llama_cpp_as_they_are(tmp_path: Path) -> None:
    """The file holds the very codes that GPTQ found for the same settings in another format."""
    from safetensors.torch import load_file

    from finetune.quant.writers.compressed_tensors import unpack_codes

    source = tiny_llama(tmp_path / "source", dtype="float16")
    for name in ("gguf", "compressed-tensors"):
        settings = settings_for(tmp_path, format=name, method="gptq")
        quantize_model(source, settings=settings, out=tmp_path / name, seed=0)
    packed = load_file(tmp_path / "compressed-tensors/model.safetensors")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "gguf/model.gguf").tensors}
    for index in range(2):
        weight = from_blocks(torch.from_numpy(stored[f"blk.{index}.ffn_down.weight"].data.copy()), "Q4_0")
        layer = f"model.layers.{index}.mlp.down_proj"
        assert torch.equal(weight.codes, unpack_codes(packed[f"{layer}.weight_packed"], 4, weight.codes.shape[1]))
        assert torch.equal(weight.scale, packed[f"{layer}.weight_scale"])
    assert verify_folder(tmp_path / "gguf", fresh_process=False)["load"]["probe"]["rms_difference"] < 1e-5


def test_floats_stay_as_they_are_and_a_tied_head_is_not_there(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    source = tiny_llama(tmp_path / "source", dtype="bfloat16")
    out = quantized(source, tmp_path / "out", ignore=["lm_head", "*.0.mlp.down_proj"])
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(out / "model.gguf").tensors}
    original = load_file(source / "model.safetensors")
    assert "output.weight" not in tensors
    for name, key in (("token_embd", "model.embed_tokens"), ("blk.0.ffn_down", "model.layers.0.mlp.down_proj")):
        assert tensors[f"{name}.weight"].tensor_type.name == "BF16"
        assert bytes(tensors[f"{name}.weight"].data) == original[f"{key}.weight"].view(torch.uint8).numpy().tobytes()
    assert tensors["output_norm.weight"].tensor_type.name == "F32"
    assert "output.weight" in {
        tensor.name
        for tensor in gguf.GGUFReader(
            quantized(tiny_llama(tmp_path / "untied", tied=False), tmp_path / "u") / "model.gguf"
        ).tensors
    }


def test_what_gguf_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    def refusal(source: Path, **values: Any) -> str:
        with pytest.raises(RecipeError) as caught:
            quantized(source, tmp_path / "out", **values)
        assert not list(tmp_path.glob("out*"))
        return str(caught.value)

    source = tiny_family("llama", tmp_path / "llama")
    assert "group_size: 32" in refusal(source, group_size=16)
    assert "group_size: 32" in refusal(source, symmetric=False)
    told = refusal(source, scheme="q4_k")
    assert "multiple of 256" in told
    assert "model.layers.0.self_attn.q_proj (" in told
    assert "model.layers.0.self_attn.o_proj (" in told
    assert " and 10 more" in told
    biased = tiny_family("llama", tmp_path / "biased", attention_bias=True)
    assert "`attention_bias` is True" in refusal(biased)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    assert "`rope_type` is yarn" in refusal(tiny_family("llama", tmp_path / "yarn", rope_parameters=yarn))
    scaled = tiny_family("gemma2", tmp_path / "scaled", query_pre_attn_scalar=64)
    assert "`query_pre_attn_scalar` is 64" in refusal(scaled)
    state = json.loads((source / "tokenizer.json").read_text())
    state["pre_tokenizer"] = {"type": "Whitespace"}
    (source / "tokenizer.json").write_text(json.dumps(state))
    assert "tokenizer can't be stored as GGUF" in refusal(source)


def test_a_family_that_is_not_proven_is_refused_by_name(tmp_path: Path) -> None:
    FAMILIES["olmo2"] = {}
    try:
        source = tiny_family("olmo2", tmp_path / "source")
    finally:
        del FAMILIES["olmo2"]
    with pytest.raises(RecipeError, match="olmo2"):
        quantized(source, tmp_path / "out")


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "nan", "another model"])
def test_verify_tells_a_damaged_file(damage: str, families: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(families["llama"], out)
    (out / "finetune.json").unlink()  # without the hashes that tell any damage
    path = out / "model.gguf"
    data = bytearray(path.read_bytes())
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(families["llama"] / "model.gguf").tensors}
    place = int(tensors["blk.1.ffn_down.weight"].data_offset)
    if damage == "cut":
        data = data[: len(data) - 1000]
    elif damage == "longer":
        data += bytes(64)
    elif damage == "flipped":
        data[place + 1] ^= 0x08
    elif damage == "nan":
        data[place : place + 2] = b"\x00\x7e"
    else:
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    path.write_bytes(data)
    words = {"cut": "cut short", "longer": "its tensors end at", "flipped": "isn't the one", "nan": "NaN"}
    with pytest.raises(CheckpointError, match=words.get(damage, "config.json asks for 0.1")):
        verify_folder(out, fresh_process=False)


def test_export_copies_the_file_and_its_hash_tells_a_flipped_byte(families: dict[str, Path], tmp_path: Path) -> None:
    out = export_model(families["llama"], out=tmp_path / "out", card=CardFacts(title="tiny"))
    assert (out / "model.gguf").read_bytes() == (families["llama"] / "model.gguf").read_bytes()
    card = (out / "README.md").read_text()
    assert 'gguf_file="model.gguf"' in card
    assert "- gguf" in card
    data = bytearray((out / "model.gguf").read_bytes())
    data[-1] ^= 1
    (out / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        verify_folder(out, fresh_process=False)


def test_the_missing_package_is_named_with_its_install_line(
    families: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    for act in (
        lambda: quantized(families["llama"].with_name("llama"), tmp_path / "out"),
        lambda: load_model(families["llama"], dtype=torch.float32, device="cpu"),
    ):
        with pytest.raises(MissingDependencyError, match=r"pip install 'gguf>=0\.17'"):
            act()
    assert not (tmp_path / "out").exists()
