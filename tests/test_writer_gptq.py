"""The GPTQ format against a decoder of the tests' own, written from the format's description."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from finetune.errors import CheckpointError, FinetuneError, RecipeError
from finetune.export.verify import verify_folder
from finetune.model.gptq import GptqArgs, dequantized, gptq_args, pack_layer
from finetune.model.load import load_model
from finetune.model.probe import check_probe, read_probe
from finetune.quant.methods import METHODS, QuantizedWeight
from finetune.quant.quantize import quantize_model
from finetune.quant.scheme import scheme_with
from finetune.quant.writers import WRITERS
from tests.families import tiny_model
from tests.test_quant_model import settings_for
from tests.tiny import tiny_llama, tiny_tokenizer

CASES: dict[str, dict[str, Any]] = {
    "int4": {},
    "int4 channel": {"method": "rtn", "group_size": None},
    "int4 zero": {"symmetric": False},
    "int8": {"scheme": "w8a16"},
    "int8 zero": {"scheme": "w8a16", "symmetric": False, "method": "rtn"},
    "int3": {"scheme": "w3a16", "group_size": 32},
    "int3 zero": {"scheme": "w3a16", "group_size": 32, "symmetric": False},
    "int2": {"scheme": "w2a16", "group_size": 64},
    "int2 zero": {"scheme": "w2a16", "group_size": 64, "symmetric": False},
    "mixed": {
        "method": "rtn",
        "overrides": [
            {"layers": ["model.layers.1"], "scheme": "w8a16"},
            {"layers": ["*.layers.1?.mlp.down_proj"], "scheme": "w3a16", "group_size": 64},
        ],
        "ignore": ["lm_head", "model.layers.10.self_attn", "model.layers.3.self_attn.o_proj"],
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("gptq")
    made = {
        "plain": tiny_llama(root / "plain", dtype="bfloat16", tied=False),
        "deep": tiny_llama(root / "deep", dtype="bfloat16", num_layers=12),
        "biased": biased_qwen(root / "biased"),
    }
    for name, values in CASES.items():
        made[name] = root / name
        settings = settings_for(root, **{"format": "gptq", **values})
        quantize_model(made["deep" if name == "mixed" else "plain"], settings=settings, out=made[name], seed=0)
    made["int4 biased"] = root / "int4 biased"
    quantize_model(made["biased"], settings=settings_for(root, format="gptq"), out=made["int4 biased"], seed=0)
    return made


def biased_qwen(folder: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def numbers(words: np.ndarray, num_bits: int) -> np.ndarray:
    """uint32 (W, N) → the numbers that each column's bits, put one behind the other, hold: (W * 32 / num_bits, N)."""
    bits = (words[:, None, :] >> np.arange(32, dtype=np.uint32)[None, :, None]) & 1
    bits = bits.reshape(-1, num_bits, words.shape[1]).astype(np.int64)
    return (bits << np.arange(num_bits)[None, :, None]).sum(axis=1)


def decoded(folder: Path) -> dict[str, Tensor]:
    """The float32 weights of a folder: weight[o, i] = scale[g, o] * (code[i, o] - zero[g, o]) with g = g_idx[i]."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored = load_file(folder / "model.safetensors")
    weights = {name: tensor.float() for name, tensor in stored.items() if name.rpartition(".")[2] in ("weight", "bias")}
    for layer in {name.rpartition(".")[0] for name in stored if name.endswith(".qweight")}:
        qweight, qzeros = (stored[f"{layer}.{part}"].numpy().view(np.uint32) for part in ("qweight", "qzeros"))
        scales, group = stored[f"{layer}.scales"].numpy(), stored[f"{layer}.g_idx"].numpy()
        num_bits = qweight.shape[0] * 32 // len(group)
        codes = numbers(qweight, num_bits)
        zeros = numbers(np.ascontiguousarray(qzeros.T), num_bits).T
        if config["checkpoint_format"] == "gptq":
            zeros = zeros + 1
        # As the probe has it: kernels round to half precision, which shows where weights have zero points.
        precision = np.float32 if config["sym"] else np.float16
        steps = (codes - zeros[group]).astype(precision)
        weights[f"{layer}.weight"] = torch.from_numpy((steps * scales[group].astype(precision)).astype(np.float32).T)
    return weights


@pytest.mark.parametrize("name", [*CASES, "int4 biased"])
def test_decoded_weights_in_the_float_model_give_the_probes_logits(name: str, folders: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    source = folders["deep" if name == "mixed" else "biased" if "biased" in name else "plain"]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(decoded(folders[name]), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    probe = read_probe(folders[name])
    assert probe is not None
    with torch.no_grad():
        logits_TV = model(torch.tensor([probe.input_ids])).logits[0]
    checked = check_probe(folders[name], logits_TV)
    assert checked["max_abs_difference"] < 1e-4
    # And so do the product's own loader, and verify, which says who loaded it.
    with torch.no_grad():
        own_TV = load_model(folders[name], dtype=torch.float32, device="cpu")(torch.tensor([probe.input_ids])).logits[0]
    torch.testing.assert_close(own_TV, logits_TV, atol=1e-4, rtol=0)
    report = verify_folder(folders[name], fresh_process=False)
    assert report["quantization"] == "gptq"
    assert "decoded by finetune" in report["load"]["loader"]
    assert report["load"]["dtype"] == "bfloat16"
    assert report["load"]["probe"]["agrees"]


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return config


def test_layout_and_configuration(folders: dict[str, Path]) -> None:
    stored = load_file(folders["int4"] / "model.safetensors")
    layer = "model.layers.0.mlp.down_proj"
    expected = {
        "qweight": (torch.int32, (128 * 4 // 32, 64)),
        "qzeros": (torch.int32, (4, 64 * 4 // 32)),
        "scales": (torch.float16, (4, 64)),
        "g_idx": (torch.int32, (128,)),
    }
    for part, (dtype, shape) in expected.items():
        assert (stored[f"{layer}.{part}"].dtype, tuple(stored[f"{layer}.{part}"].shape)) == (dtype, shape)
    assert f"{layer}.weight" not in stored
    assert (stored[f"{layer}.qzeros"] == 0x77777777).all()
    assert stored[f"{layer}.g_idx"].tolist() == [index // 32 for index in range(128)]
    config = config_of(folders["int4"])
    assert "dynamic" not in config
    asked = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "lm_head": False}
    assert asked.items() <= config.items()
    assert config["checkpoint_format"] == "gptq"
    assert config_of(folders["int4 channel"])["group_size"] == -1
    assert config_of(folders["int4 zero"])["checkpoint_format"] == "gptq_v2"
    zeros = load_file(folders["int4 zero"] / "model.safetensors")[f"{layer}.qzeros"]
    assert len(set(numbers(np.ascontiguousarray(zeros.numpy().view(np.uint32).T), 4).flatten())) > 3


def test_transformers_reads_the_configuration(folders: dict[str, Path]) -> None:
    from transformers import GPTQConfig

    for name in CASES:
        parsed = GPTQConfig.from_dict(config_of(folders[name]))
        assert parsed.bits == config_of(folders[name])["bits"]


def test_dynamic_names_layers_exactly_also_where_an_engine_fuses_them(folders: dict[str, Path]) -> None:
    config, stored = config_of(folders["mixed"]), load_file(folders["mixed"] / "model.safetensors")

    def found(layer: str) -> tuple[int, int] | None:
        """As GPTQModel and vLLM look it up."""
        for pattern, changes in config["dynamic"].items():
            if re.match(pattern[2:], layer):
                return None if pattern.startswith("-:") else (changes["bits"], changes["group_size"])
        return config["bits"], config["group_size"]

    for index in range(12):
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
            layer = f"model.layers.{index}.{part}"
            expected: tuple[int, int] | None = (8, -1) if index == 1 else (4, 32)
            if index in (10, 11) and part == "mlp.down_proj":
                expected = (3, 64)
            if (index == 10 and "self_attn" in part) or layer == "model.layers.3.self_attn.o_proj":
                expected = None
            assert found(layer) == expected
            assert (f"{layer}.qweight" in stored) == (expected is not None)
            if expected is not None:
                qweight, num_inputs = stored[f"{layer}.qweight"], len(stored[f"{layer}.g_idx"])
                assert len(qweight) == num_inputs * expected[0] // 32
                args = gptq_args(config, layer, where=Path("config.json"))
                assert args == GptqArgs(expected[0], None if expected[1] == -1 else expected[1], 1)
    assert found("model.layers.1.mlp.gate_up_proj") == found("model.layers.1.self_attn.qkv_proj") == (8, -1)
    assert found("model.layers.10.self_attn.qkv_proj") is None
    assert found("model.layers.11.self_attn.qkv_proj") == found("model.layers.11.mlp.gate_up_proj") == (4, 32)


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "qwen2_moe"])
def test_conv1d_and_experts_under_the_names_of_their_files(family: str, tmp_path: Path) -> None:
    """Transposed weights; experts that transformers fuses; Mixtral's files say block_sparse_moe, the class mlp."""
    source = tiny_model(family, tmp_path / "source")
    overrides = [{"layers": ["re:.*\\.1\\.(mlp|attn).*(w1|w2|w3|gate_proj|up_proj|down_proj|c_fc)"], "scheme": "w8a16"}]
    settings = settings_for(tmp_path, method="rtn", format="gptq", group_size=16, overrides=overrides)
    quantize_model(source, settings=settings, out=tmp_path / "out", seed=0)
    config = config_of(tmp_path / "out")
    assert {config["bits"], *(changes["bits"] for changes in config["dynamic"].values() if changes)} == {4, 8}
    report = verify_folder(tmp_path / "out", fresh_process=False)
    assert report["load"]["probe"]["rms_difference"] < 1e-5


def test_folders_of_other_tools_are_read_too() -> None:
    """Groups in the order of activations (desc_act), and the zero point 0, which runs over where zero - 1 is stored."""
    generator = torch.Generator().manual_seed(0)
    codes_OI = torch.randint(0, 16, (32, 64), generator=generator, dtype=torch.int32)
    zeros_OG = torch.randint(0, 16, (32, 4), generator=generator, dtype=torch.int32)
    zeros_OG[0, 0] = 0
    scale_OG = torch.rand(32, 4, generator=generator).half()
    group_I = torch.randint(0, 4, (64,), generator=generator, dtype=torch.int32)
    expected_OI = ((codes_OI - zeros_OG[:, group_I.long()]).half() * scale_OG[:, group_I.long()]).float()
    for offset in (0, 1):
        args = GptqArgs(4, 16, zero_offset=offset)
        tensors = {**pack_layer(codes_OI, zeros_OG, scale_OG, args), "g_idx": group_I}
        assert torch.equal(dequantized(tensors, args), expected_OI)
    first = tensors["qzeros"][0, 0].item() & 15
    assert first == 15


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["w4a16", "w8a16", "w3a16", "w2a16"])
def test_what_is_written_is_read_back_bit_by_bit(name: str, symmetric: bool) -> None:
    scheme = scheme_with(name, group_size=32, symmetric=symmetric)
    weight_OI = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    weight_OI[3] = 0
    weight_OI[4] = weight_OI[4].abs()
    arguments = {"weights": scheme.weights, "scale_dtype": torch.float16, "damp": 0.01, "act_order": True}
    weight: QuantizedWeight = METHODS["rtn"].quantize(weight_OI, None, **arguments)
    writer = WRITERS["gptq"]
    tensors = writer.tensors("a.b", weight, scheme)
    assert sorted(tensors) == sorted(writer.tensor_names("a.b", scheme))
    read = writer.read("a.b", tensors, scheme)
    assert torch.equal(read.codes, weight.codes)
    assert torch.equal(read.scale, weight.scale)
    assert (read.zero_point is None) == symmetric
    assert symmetric or torch.equal(read.zero_point, weight.zero_point)  # type: ignore[arg-type]


def test_what_the_format_cannot_hold_is_refused_before_calibration(tmp_path: Path) -> None:
    odd = tiny_llama(tmp_path / "odd", hidden_size=36, intermediate_size=72, num_heads=2, num_kv_heads=1)
    plain = tiny_llama(tmp_path / "plain")

    def refusal(folder: Path, **values: Any) -> str:
        settings = settings_for(tmp_path, format="gptq", **values)
        (tmp_path / "calibration.jsonl").unlink()
        with pytest.raises(RecipeError) as caught:
            quantize_model(folder, settings=settings, out=tmp_path / "out", seed=0)
        return str(caught.value)

    text = refusal(odd, group_size=None)
    assert "36 inputs" in text
    assert "multiples of 8" in text
    assert "group_size 4" in refusal(plain, group_size=4)
    assert "symmetric" in refusal(plain, overrides=[{"layers": ["down_proj"], "scheme": "w8a16", "symmetric": False}])


def test_weights_at_the_ends_of_float16(tmp_path: Path) -> None:
    """Scales too small for float16 give weights near 0, not NaN; too large ones are refused by name."""
    source = tiny_llama(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][:4] *= 1e-7
    weights["model.layers.0.mlp.up_proj.weight"][4] = 0
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    settings = settings_for(tmp_path, format="gptq")
    quantize_model(source, settings=settings, out=tmp_path / "out", seed=0)
    small_OI = decoded(tmp_path / "out")["model.layers.0.mlp.up_proj.weight"]
    assert small_OI[:4].abs().max() < 1e-5
    assert (small_OI[4] == 0).all()
    verify_folder(tmp_path / "out", fresh_process=False)
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e6
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FinetuneError, match=r"layers\.1\.mlp\.up_proj reaches 1e\+06: its scale doesn't fit"):
        quantize_model(source, settings=settings, out=tmp_path / "other", seed=0)


def spoiled(folder: Path, to: Path, *, config: Callable[[Any], Any] | None = None, tensors: Any = None) -> Path:
    shutil.copytree(folder, to)
    if config is not None:
        whole = json.loads((to / "config.json").read_text())
        config(whole["quantization_config"])
        (to / "config.json").write_text(json.dumps(whole))
    if tensors is not None:
        stored = load_file(to / "model.safetensors")
        tensors(stored)
        save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    (to / "finetune.json").unlink()  # without the hashes that tell any damage
    return to


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("int4", {"tensors": lambda t: t.pop("model.layers.1.mlp.up_proj.qzeros")}, r"1\.mlp\.up_proj\.qzeros is miss"),
        ("int4", {"tensors": lambda t: t.pop("model.layers.1.mlp.up_proj.scales")}, r"1\.mlp\.up_proj\.scales is miss"),
        ("int4", {"tensors": lambda t: t["model.layers.0.mlp.up_proj.scales"].mul_(1.2)}, "isn't the one that was"),
        ("int4", {"tensors": lambda t: t["model.layers.0.mlp.up_proj.g_idx"].add_(9)}, "names groups that aren't"),
        ("int4", {"config": lambda config: config.update(bits=8)}, "qweight has the shape"),
        ("int4", {"config": lambda config: config.update(bits=5)}, "can't be read"),
        ("int4", {"config": lambda config: config.pop("bits")}, "can't be read"),
        ("int4", {"config": lambda config: config.update(group_size=64)}, "has the shape"),
        ("int4 zero", {"config": lambda config: config.update(checkpoint_format="gptq")}, "isn't the one that was"),
        ("mixed", {"config": lambda config: config.pop("dynamic")}, "has the shape"),
        ("mixed", {"config": lambda c: c.update(dynamic={"-:.*": {}})}, "in floats, but its weight is quantized"),
    ],
)
def test_verify_names_what_does_not_fit(
    name: str, change: dict[str, Any], told: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=told):
        verify_folder(spoiled(folders[name], tmp_path / "spoiled", **change), fresh_process=False)


def test_a_lost_quantization_config_is_told(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = spoiled(folders["int4"], tmp_path / "spoiled")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="there is no quantization_config"):
        verify_folder(folder, fresh_process=False)
