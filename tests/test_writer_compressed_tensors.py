"""compressed-tensors folders of every kind: what plain transformers computes from them, what verify finds in them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from finetune.errors import CheckpointError, RecipeError
from finetune.export.load_check import check_load
from finetune.export.verify import verify_folder
from finetune.model.packed import num_words, pack_words, unpack_words
from finetune.model.probe import check_probe
from finetune.quant.activations import HessianSum, InputRounding, static_scale
from finetune.quant.calibration import load_calibration
from finetune.quant.layer_patterns import exact_patterns
from finetune.quant.methods import METHODS
from finetune.quant.quantize import quantize_model
from finetune.quant.scheme import ActivationArgs, scheme_with
from finetune.quant.writers import WRITERS
from tests.test_quant_model import load_in_a_fresh_process, settings_for
from tests.tiny import tiny_llama

MIXED = {
    "method": "rtn",
    "overrides": [
        {"layers": ["model.layers.1"], "scheme": "w8a16"},
        {"layers": ["model.layers.2"], "scheme": "w8a8"},
        {"layers": ["*.layers.1?.mlp.down_proj"], "scheme": "w3a16", "group_size": 64},
    ],
    "ignore": ["lm_head", "model.layers.10.self_attn"],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "asymmetric int4": ("plain", {"method": "rtn", "symmetric": False}),
    "asymmetric int8": ("plain", {"scheme": "w8a16", "symmetric": False}),
    "asymmetric int3": ("plain", {"scheme": "w3a16", "group_size": 32, "symmetric": False}),
    "int3": ("plain", {"scheme": "w3a16", "group_size": 32}),
    "int2": ("plain", {"scheme": "w2a16", "group_size": 32}),
    # 36 and 72 inputs fill no last word of 4 or 3 bits.
    "odd int4": ("odd", {"method": "rtn", "group_size": None}),
    "odd int3": ("odd", {"scheme": "w3a16", "method": "rtn", "group_size": 12}),
    "odd asymmetric int4": ("odd", {"method": "rtn", "group_size": 12, "symmetric": False}),
    "static": ("plain", {"scheme": "w8a8_static"}),
    "static rtn": ("plain", {"scheme": "w8a8_static", "method": "rtn", "smoothing": None}),
    "mixed": ("deep", MIXED),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("compressed")
    sources = {
        "plain": tiny_llama(root / "plain", dtype="bfloat16", tied=False),
        "odd": tiny_llama(
            root / "odd", dtype="bfloat16", hidden_size=36, intermediate_size=72, num_heads=2, num_kv_heads=1
        ),
        "deep": tiny_llama(root / "deep", dtype="bfloat16", num_layers=12),
    }
    made = {f"source {name}": path for name, path in sources.items()}
    for name, (source, values) in CASES.items():
        made[name] = root / name
        if name == "static rtn":
            values = {**values, "calibration": settings_for(root).calibration}
        quantize_model(sources[source], settings=settings_for(root, **values), out=made[name], seed=0)
    return made


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_a_plain_load_in_a_fresh_process_computes_the_fake_quantized_model(
    dtype: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    loaded = load_in_a_fresh_process({name: folders[name] for name in CASES}, tmp_path, dtype=dtype)
    for name in CASES:
        assert loaded[name]["faults"] == {}, name
        if name == "mixed":  # its probe is of float inputs
            checked = check_load(folders[name])["probe"]
        else:
            checked = check_probe(folders[name], loaded[name]["probe"], quantized_activations="static" in name)
        if dtype == "float32":
            assert checked["max_abs_difference"] < 1e-4, name
        assert checked["rms_difference"] < 0.1, name


def quantization_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return config


def test_several_schemes_name_their_layers_exactly(folders: dict[str, Path]) -> None:
    tensors = load_file(folders["mixed"] / "model.safetensors")
    bits = {}
    for index in range(12):
        for part in ("mlp.gate_proj", "mlp.down_proj"):
            layer = f"model.layers.{index}.{part}"
            if f"{layer}.weight_packed" in tensors:
                width = tensors[f"{layer}.weight_packed"].shape[1] * 32
                bits[index, part] = width // int(tensors[f"{layer}.weight_shape"][1])
            else:
                assert tensors[f"{layer}.weight"].dtype == torch.int8
                bits[index, part] = 8
    assert {index for (index, part), width in bits.items() if part == "mlp.gate_proj" and width == 8} == {1, 2}
    assert {index for (index, part), width in bits.items() if part == "mlp.down_proj" and width == 3} == {10, 11}
    assert tensors["model.layers.10.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert "model.layers.1.self_attn.q_proj.weight_packed" in tensors
    config = quantization_of(folders["mixed"])
    assert config["format"] == "mixed-precision"
    assert {group["format"] for group in config["config_groups"].values()} == {"pack-quantized", "int-quantized"}
    # compressed-tensors' own rule gives each layer the scheme that it was written with, and leaves the others out.
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_named_modules, match_targets
    from transformers import AutoModelForCausalLM

    parsed = QuantizationConfig.model_validate(config)
    scheme_of = {target: group for group in parsed.config_groups.values() for target in group.targets}
    model = AutoModelForCausalLM.from_pretrained(folders["source deep"])
    matched = dict(match_named_modules(model, scheme_of, parsed.ignore))
    for name, module in model.named_modules():
        stored = f"{name}.weight_scale" in tensors
        assert (name in matched) == stored
        if stored:
            weights = scheme_of[match_targets(name, module, scheme_of)[0]].weights
            expected = (len(module.weight), module.in_features // (weights.group_size or module.in_features))
            assert tensors[f"{name}.weight_scale"].shape == expected
    assert all("Linear" not in group["targets"] for group in config["config_groups"].values())
    for name in ("int3", "static", "asymmetric int4"):
        assert quantization_of(folders[name])["config_groups"]["group_0"]["targets"] == ["Linear"]


parts = st.sampled_from(["mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "mlp.experts.1.w1", "mlp.experts.10.w1"])
names = st.one_of(
    st.builds("model.layers.{}.{}".format, st.integers(0, 120), parts), st.sampled_from(["lm_head", "model.layers.1"])
)


@given(st.sets(names, max_size=30), st.sets(names, max_size=30))
def test_patterns_match_their_names_and_no_other(wanted: set[str], others: set[str]) -> None:
    patterns = exact_patterns(sorted(wanted))
    for name in wanted | others:
        for spelled in (name, name + "0", name + ".more", name.replace(".", "x")):
            assert any(re.match(pattern, spelled) for pattern in patterns) == (spelled in wanted)


def test_zero_points_are_packed_and_the_weights_lie_within_half_a_step(folders: dict[str, Path]) -> None:
    """Rounding to nearest with zero points cuts nothing off but by half a step."""
    for name, num_bits, source in (("asymmetric int4", 4, "source plain"), ("odd asymmetric int4", 4, "source odd")):
        stored, whole = load_file(folders[name] / "model.safetensors"), load_file(folders[source] / "model.safetensors")
        layer = "model.layers.1.mlp.down_proj"
        weight_OI = whole[f"{layer}.weight"].float()
        scale_OG = stored[f"{layer}.weight_scale"].float()
        packed = stored[f"{layer}.weight_zero_point"]
        assert packed.dtype == torch.int32
        assert packed.shape == (num_words(len(weight_OI), num_bits), scale_OG.shape[1])
        zero_OG = unpack_words(packed.T, num_bits, len(weight_OI)).T
        codes_OI = unpack_words(stored[f"{layer}.weight_packed"], num_bits, weight_OI.shape[1])
        assert zero_OG.min() >= 1
        steps_OGK = codes_OI.unflatten(1, (scale_OG.shape[1], -1)) - zero_OG.unsqueeze(-1)
        rounded_OI = (steps_OGK * scale_OG.unsqueeze(-1)).flatten(1)
        group_size = weight_OI.shape[1] // scale_OG.shape[1]
        steps_OI = (rounded_OI - weight_OI).abs() / scale_OG.repeat_interleave(group_size, 1)
        # Half a step of rounding, and at an end half a step that the zero point's rounding cuts off.
        assert steps_OI.max() < 1.1
        assert steps_OI.mean() < 0.3
        assert quantization_of(folders[name])["dequantize"] is True


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**31))
def test_words_of_any_width_are_those_of_compressed_tensors(num_bits: int, rows: int, columns: int, seed: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    values = torch.randint(0, 2**num_bits, (rows, columns), generator=torch.Generator().manual_seed(seed))
    packed = pack_words(values, num_bits)
    assert packed.shape == (rows, num_words(columns, num_bits))
    assert torch.equal(packed, pack_to_int32((values - 2 ** (num_bits - 1)).to(torch.int8), num_bits))
    assert torch.equal(unpack_words(packed, num_bits, columns), values.int())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["w4a16", "w8a16", "w3a16", "w2a16", "w8a8", "w8a8_static"])
def test_what_is_written_is_read_back_bit_by_bit(name: str, symmetric: bool) -> None:
    scheme = scheme_with(name, group_size=None if "w8" in name else 32, symmetric=symmetric or "w8a8" in name)
    weight_OI = torch.randn(20, 96, generator=torch.Generator().manual_seed(0))
    arguments = {"weights": scheme.weights, "scale_dtype": torch.bfloat16, "damp": 0.01, "act_order": True}
    weight = METHODS["rtn"].quantize(weight_OI, None, **arguments)
    if name == "w8a8_static":
        weight = type(weight)(weight.codes, weight.scale, input_scale=torch.tensor([0.5]))
    writer = WRITERS["compressed-tensors"]
    tensors = writer.tensors("a.b", weight, scheme)
    assert sorted(tensors) == sorted(writer.tensor_names("a.b", scheme))
    read = writer.read("a.b", tensors, scheme)
    for part in ("codes", "scale", "zero_point", "input_scale"):
        before, after = getattr(weight, part), getattr(read, part)
        assert (before is None) == (after is None)
        assert before is None or (torch.equal(before, after) and before.dtype == after.dtype)


def test_a_static_scale_is_the_largest_input_of_the_calibration_tokens(folders: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    source, folder = folders["source plain"], folders["static rtn"]
    stored = load_file(folder / "model.safetensors")
    calibration = settings_for(folder.parent).calibration
    assert calibration is not None
    samples = load_calibration(source, calibration, seed=0)
    model = AutoModelForCausalLM.from_pretrained(source)
    attention = model.model.layers[0].self_attn
    seen: list[Tensor] = []
    attention.q_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(torch.from_numpy(samples.input_ids).long())
    largest = seen[0][torch.from_numpy(samples.mask)].abs().max().float()
    scales = [stored[f"model.layers.0.self_attn.{part}_proj.input_scale"] for part in "qkv"]
    for scale in scales:
        assert scale.shape == (1,)
        assert scale.dtype == torch.bfloat16
        assert torch.equal(scale, scales[0])
    torch.testing.assert_close(scales[0].float(), (largest / 127.5).view(1), rtol=0.01, atol=0)
    inputs = quantization_of(folder)["config_groups"]["group_0"]["input_activations"]
    assert (inputs["strategy"], inputs["dynamic"]) == ("tensor", False)


def test_padding_does_not_enter_the_largest_input() -> None:
    hidden_BSI = torch.ones(1, 3, 4)
    hidden_BSI[0, 2] = 100
    total = HessianSum(4)
    total.add(hidden_BSI, torch.tensor([[True, True, False]]))
    assert total.largest == 1
    total.add(-2 * torch.ones(1, 3, 4), None)
    assert total.largest == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_rounded_under_a_static_scale_as_compressed_tensors_rounds_them(dtype: torch.dtype) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    hidden_BSI = torch.randn(3, 20, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    activations = ActivationArgs(8, strategy="tensor", dynamic=False)
    scale = static_scale(2.0, activations, torch.bfloat16)
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="tensor", dynamic=False)
    expected = fake_quantize(hidden_BSI, scale.to(dtype), None, args)
    assert torch.equal(InputRounding(activations, scale)(hidden_BSI), expected)
    assert static_scale(0.0, activations, dtype).item() == 1


def test_what_the_format_or_its_loader_cannot_hold_is_refused_before_calibration(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    overrides = [{"layers": ["down_proj"], "scheme": "w8a16"}]
    values = settings_for(tmp_path, symmetric=False, overrides=overrides)
    (tmp_path / "calibration.jsonl").unlink()
    with pytest.raises(RecipeError, match="by the first scheme alone") as caught:
        quantize_model(source, settings=values, out=tmp_path / "out", seed=0)
    assert "gptq" in str(caught.value)
    with pytest.raises(ValueError, match="w8a8_static needs `calibration:`"):
        settings_for(tmp_path, scheme="w8a8_static", method="rtn")
    with pytest.raises(ValueError, match="vLLM takes one of 8-bit floats only"):
        settings_for(tmp_path, kv_cache="int8")


def spoiled(folder: Path, to: Path, *, config: Callable[[Any], Any] | None = None, drop: str | None = None) -> Path:
    import shutil

    shutil.copytree(folder, to)
    if config is not None:
        whole = json.loads((to / "config.json").read_text())
        config(whole["quantization_config"])
        (to / "config.json").write_text(json.dumps(whole))
    if drop is not None:
        tensors = load_file(to / "model.safetensors")
        del tensors[drop]
        save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_verify_passes_what_was_written(folders: dict[str, Path]) -> None:
    for name in CASES:
        report = verify_folder(folders[name], fresh_process=False)
        assert report["quantization"] == "compressed-tensors"
        assert report["load"]["loader"] == "transformers"
        assert report["load"]["probe"]["agrees"]


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("mixed", {"drop": "model.layers.11.mlp.down_proj.weight_scale"}, r"layers\.11\.mlp\.down_proj\.weight_scale"),
        ("static", {"drop": "model.layers.1.mlp.up_proj.input_scale"}, r"layers\.1\.mlp\.up_proj\.input_scale is mis"),
        (
            "asymmetric int4",
            {"drop": "model.layers.0.mlp.up_proj.weight_zero_point"},
            r"layers\.0\.mlp\.up_proj\.weight_zero_point is missing",
        ),
        ("mixed", {"config": lambda config: config.pop("quantization_status")}, "quantization_status is missing"),
        ("int2", {"config": lambda config: config.pop("quantization_status")}, "quantization_status is missing"),
        ("asymmetric int8", {"config": lambda config: config.pop("dequantize")}, "dequantize"),
        (
            "mixed",
            {"config": lambda config: config["config_groups"]["group_0"]["weights"].update(group_size=16)},
            "weight_scale has the shape",
        ),
        (
            "int3",
            {"config": lambda config: config["config_groups"]["group_0"]["weights"].update(num_bits=4)},
            "weight_packed has the shape",
        ),
    ],
)
def test_verify_names_what_does_not_fit(
    name: str, change: dict[str, Any], told: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=told):
        verify_folder(spoiled(folders[name], tmp_path / "spoiled", **change), fresh_process=False)
