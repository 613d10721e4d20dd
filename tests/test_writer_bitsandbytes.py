"""nf4, fp4 and llm_int8: the tensors bitsandbytes would have written, and a folder that verify takes apart."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

pytest.importorskip("bitsandbytes")

from finetune.errors import CheckpointError, MissingDependencyError, RecipeError
from finetune.export.load_check import check_load
from finetune.export.verify import verify_folder
from finetune.model.load import load_model
from finetune.quant.bitsandbytes_types import pack_nibbles, unpack_nibbles
from finetune.quant.methods.rtn import quantize_rtn
from finetune.quant.quantize import quantize_model
from finetune.quant.scales import weight_values
from finetune.quant.scheme import SCHEMES
from finetune.quant.settings import QuantizeSettings
from finetune.quant.writers import WRITERS
from tests.tiny import tiny_llama

SCHEME_NAMES = ("nf4", "fp4", "llm_int8")


def quantized(source: Path, out: Path, scheme: str, **values: Any) -> Path:
    quantize_model(source, settings=QuantizeSettings(scheme=scheme, **values), out=out, seed=0)
    return out


def by_bitsandbytes(source: Path, out: Path, scheme: str) -> Path:
    """What transformers and bitsandbytes write for the same model, without us."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {"load_in_8bit": True}
    if scheme != "llm_int8":
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": scheme, "bnb_4bit_compute_dtype": torch.bfloat16}
    config = BitsAndBytesConfig(**options)
    AutoModelForCausalLM.from_pretrained(source, quantization_config=config).save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bitsandbytes")
    source = tiny_llama(root / "source", dtype="bfloat16", tied=False)
    for scheme in SCHEME_NAMES:
        quantized(source, root / scheme, scheme)
    return root


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_the_file_is_the_one_that_bitsandbytes_writes(scheme: str, folders: Path) -> None:
    theirs = by_bitsandbytes(folders / "source", folders / f"{scheme}-theirs", scheme)
    ours, expected = (load_file(folder / "model.safetensors") for folder in (folders / scheme, theirs))
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    configs = [json.loads((folder / "config.json").read_text()) for folder in (folders / scheme, theirs)]
    described = [config["quantization_config"] for config in configs]
    assert described[0].pop("llm_int8_skip_modules") == ["lm_head"]
    described[1].pop("llm_int8_skip_modules")
    assert described[0] == described[1]


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_a_plain_load_computes_near_the_probe_and_verify_to_the_last_bits(scheme: str, folders: Path) -> None:
    from transformers import AutoModelForCausalLM

    from finetune.model.probe import check_probe, read_probe

    probe = read_probe(folders / scheme)
    assert probe is not None
    plain = AutoModelForCausalLM.from_pretrained(folders / scheme).eval()
    with torch.no_grad():
        logits_TV = plain(torch.tensor([probe.input_ids])).logits[0]
    assert check_probe(folders / scheme, logits_TV)["rms_difference"] < 0.1, "bfloat16, int8 inputs"
    report = verify_folder(folders / scheme, fresh_process=False)
    assert report["quantization"] == "bitsandbytes"
    assert report["load"]["probe"]["rms_difference"] < 1e-5


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_verify_tells_one_changed_scale(scheme: str, folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / scheme, tmp_path / "copy")
    file = tmp_path / "copy/model.safetensors"
    tensors = load_file(file)
    part = "SCB" if scheme == "llm_int8" else "weight.absmax"
    tensors[f"model.layers.1.mlp.down_proj.{part}"] *= 1.1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="isn't the one that was made"):
        check_load(tmp_path / "copy")


def test_a_folder_without_its_quantization_config_is_refused(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "nf4", tmp_path / "copy")
    path = tmp_path / "copy/config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError):
        verify_folder(tmp_path / "copy", fresh_process=False)


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_what_is_stored_reads_back_bit_by_bit_and_dequantizes_as_bitsandbytes_does(scheme: str) -> None:
    import bitsandbytes

    torch.manual_seed(0)
    weight_OI = torch.randn(32, 128)
    weight_OI[3] = 0
    described = SCHEMES[scheme]
    rounded = quantize_rtn(
        weight_OI, None, weights=described.weights, scale_dtype=torch.float32, damp=0.01, act_order=False
    )
    writer = WRITERS["bitsandbytes"]
    tensors = writer.tensors("layer", rounded, described)
    assert list(tensors) == writer.tensor_names("layer", described)
    back = writer.read("layer", tensors, described)
    assert torch.equal(back.codes, rounded.codes)
    assert torch.equal(back.scale, rounded.scale)
    assert back.type == scheme
    functional = bitsandbytes.functional
    if scheme == "llm_int8":
        expected_OI = functional.int8_vectorwise_dequant(tensors["layer.weight"], tensors["layer.SCB"])
    else:
        packed, state = functional.quantize_4bit(weight_OI, quant_type=scheme, blocksize=64)
        expected_OI = functional.dequantize_4bit(packed, state)
    values_OI = weight_values(back, torch.float32)
    assert torch.equal(values_OI, expected_OI)
    assert (values_OI[3] == 0).all()
    assert (values_OI - weight_OI).square().mean() < 0.02 * weight_OI.square().mean()


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 5), pairs=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_nibbles_unpack_to_what_was_packed(rows: int, pairs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes_OI = torch.randint(0, 16, (rows, 2 * pairs), generator=generator, dtype=torch.int8)
    packed = pack_nibbles(codes_OI)
    assert packed.shape == (rows * pairs, 1)
    assert torch.equal(unpack_nibbles(packed, codes_OI.shape), codes_OI)


def test_the_default_method_is_rtn_and_others_are_refused() -> None:
    for scheme in SCHEME_NAMES:
        assert QuantizeSettings(scheme=scheme).method == "rtn"
        assert QuantizeSettings(scheme=scheme).format_name == "bitsandbytes"
        for values in ({"method": "gptq"}, {"group_size": 32}, {"symmetric": False}, {"format": "gguf"}):
            with pytest.raises(Exception, match=scheme):
                QuantizeSettings(scheme=scheme, **values)  # type: ignore[arg-type]


def test_sizes_and_mixtures_that_bitsandbytes_cannot_hold_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    source = tiny_llama(tmp_path / "source", intermediate_size=96)
    with pytest.raises(RecipeError, match="down_proj has 96 inputs"):
        quantized(source, tmp_path / "out", "nf4")
    assert not (tmp_path / "out").exists()
    quantized(source, tmp_path / "out", "nf4", ignore=["lm_head", "down_proj"])
    report = verify_folder(tmp_path / "out", fresh_process=False)
    assert report["load"]["probe"]["rms_difference"] < 1e-5
    with pytest.raises(RecipeError, match="in one scheme"):
        quantized(
            source,
            tmp_path / "other",
            "nf4",
            ignore=["lm_head", "down_proj"],
            overrides=[{"layers": ["o_proj"], "scheme": "fp4"}],
        )


def test_a_killed_run_takes_its_blocks_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.quant.work import WorkFolder

    source = tiny_llama(tmp_path / "source", num_layers=3)
    quantized(source, tmp_path / "whole", "nf4")
    save = WorkFolder.save

    def stop_at_two(self: WorkFolder, index: int, *rest: Any) -> None:
        if index == 2:
            raise KeyboardInterrupt
        save(self, index, *rest)

    monkeypatch.setattr(WorkFolder, "save", stop_at_two)
    with pytest.raises(KeyboardInterrupt):
        quantized(source, tmp_path / "out", "nf4")
    monkeypatch.setattr(WorkFolder, "save", save)
    quantized(source, tmp_path / "out", "nf4")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_the_missing_package_is_named_with_its_install_line(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for act in (
        lambda: quantized(folders / "source", tmp_path / "out", "nf4"),
        lambda: load_model(folders / "nf4", dtype=torch.float32, device="cpu"),
    ):
        with pytest.raises(MissingDependencyError, match=r"pip install 'bitsandbytes>=0\.49'"):
            act()
    assert not (tmp_path / "out").exists()
