"""Whole tiny models through the quantizer: what plain transformers loads, resume, shards, and refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from finetune.artifact import record_files
from finetune.errors import CheckpointError, FinetuneError, RecipeError
from finetune.export.load_check import check_load
from finetune.model.probe import check_probe, read_probe
from finetune.quant.quantize import quantize_model
from finetune.quant.settings import QuantizeSettings
from tests.tiny import CORPUS, tiny_llama, tiny_tokenizer

IDS = [5, 90, 17, 300, 41, 8, 260, 77, 120, 33, 64, 2]

LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM
for folder, out, dtype in json.loads(sys.argv[1]):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    probe = json.load(open(folder + "/verification.json"))["input_ids"]
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0].float() for ids in (json.loads(sys.argv[2]), probe)]
    faults = {key: sorted(map(str, value)) for key, value in info.items() if value}
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    torch.save({"logits": logits[0], "probe": logits[1], "faults": faults, "tied": tied}, out)
"""


def load_in_a_fresh_process(folders: dict[str, Path], tmp_path: Path, *, dtype: str = "float32") -> dict[str, Any]:
    """What plain transformers, which never heard of finetune, computes from each folder."""
    jobs = [(str(folder), str(tmp_path / f"{name}.loaded"), dtype) for name, folder in folders.items()]
    command = [sys.executable, "-c", LOAD, json.dumps(jobs), json.dumps(IDS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: torch.load(tmp_path / f"{name}.loaded") for name in folders}


def settings_for(folder: Path, **values: Any) -> QuantizeSettings:
    """Settings for tiny models; gptq calibrates on the tiny corpus."""
    if values.get("method", "gptq") == "gptq":
        path = folder / "calibration.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS * 3), encoding="utf-8")
        calibration = {"data": [{"path": str(path)}], "num_samples": 6, "max_seq_length": 24, "micro_batch_size": 4}
        values = {"calibration": calibration, "tuning_steps": 2, **values}
    if values.get("scheme", "w4a16") == "w4a16":
        values = {"group_size": 32, **values}
    return QuantizeSettings(**values)


def expected_logits(source: Path, *, num_bits: int, group_size: int | None, round_inputs: bool = False) -> Tensor:
    """Logits of ``source`` with its decoder's Linear weights rounded to nearest in place, written out plainly."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    low, high = -(2 ** (num_bits - 1)), 2 ** (num_bits - 1) - 1

    def rounded(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        step = args[0].abs().amax(-1, keepdim=True) / 127.5
        return ((args[0] / step).clamp(-128, 127).round() * step,)

    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.data.unflatten(1, (-1, group_size or module.in_features))
            extreme = weight.gather(-1, weight.abs().argmax(-1, keepdim=True))
            scale = extreme / low
            module.weight.data = ((weight / scale).round().clamp(low, high) * scale).flatten(1)
            if round_inputs:
                module.register_forward_pre_hook(rounded)
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


def test_a_plain_load_in_a_fresh_process_computes_the_fake_quantized_model(tmp_path: Path) -> None:
    """RTN against the formula, GPTQ against the probe; tied and untied, every scheme."""
    outs, expected = {}, {}
    for tied in (True, False):
        source = tiny_llama(tmp_path / f"tied={tied}", tied=tied)
        for scheme, num_bits, group_size in (("w4a16", 4, 32), ("w8a16", 8, None), ("w8a8", 8, None)):
            for method in ("rtn", "gptq"):
                name = f"{scheme} {method} tied={tied}"
                outs[name] = tmp_path / name
                settings = settings_for(tmp_path, scheme=scheme, method=method)
                quantize_model(source, settings=settings, out=outs[name], seed=3)
                if method == "rtn":
                    expected[name] = expected_logits(
                        source, num_bits=num_bits, group_size=group_size, round_inputs=scheme == "w8a8"
                    )
    loaded = load_in_a_fresh_process(outs, tmp_path)
    for name, folder in outs.items():
        assert loaded[name]["faults"] == {}, name
        assert loaded[name]["tied"] == ("tied=True" in name)
        assert ("lm_head.weight" in load_file(folder / "model.safetensors")) == ("tied=False" in name)
        if name.startswith("w8a8"):
            # The probe is of float inputs, which verify knows how to compute: rounded ones tip over at a breath.
            checked = check_load(folder)["probe"]
            assert checked["rms_tolerance"] == 0.01
        else:
            checked = check_probe(folder, loaded[name]["probe"])
        assert checked["max_abs_difference"] < 1e-4, name
        if name in expected:
            torch.testing.assert_close(loaded[name]["logits"], expected[name], atol=2e-4, rtol=0)
        quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert quantization["quantization_status"] == "compressed"
        assert quantization["ignore"] == ["lm_head"]
        assert quantization["format"] == quantization["config_groups"]["group_0"]["format"]


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2"])
def test_other_families_of_decoders(family: str, tmp_path: Path) -> None:
    """Biases, sliding windows of all or of alternating layers, scaled embeddings, softcapped logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    extra = {"sliding_window": 8} if family != "qwen2" else {}
    config = AutoConfig.for_model(
        family,
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        pad_token_id=0,
        initializer_range=0.1,
        **extra,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "source")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    out = tmp_path / "out"
    report = quantize_model(tmp_path / "source", settings=settings_for(tmp_path), out=out, seed=0)
    assert report["num_layers"] == 4 * 7
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    probe = read_probe(out)
    assert probe is not None
    assert len(probe.input_ids) > 8, "longer than the sliding window"
    with torch.no_grad():
        logits_TV = loaded(torch.tensor([probe.input_ids])).logits[0]
    assert check_probe(out, logits_TV)["max_abs_difference"] < 1e-4
    assert loaded.dtype == torch.float32
    scales = [tensor for name, tensor in load_file(out / "model.safetensors").items() if name.endswith("weight_scale")]
    assert {scale.dtype for scale in scales} == {torch.bfloat16}


def test_same_command_same_bytes_and_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    """The source may be sharded too; a shard limit changes files, not tensors."""
    from transformers import AutoModelForCausalLM

    source = tiny_llama(tmp_path / "source", tied=False)
    sharded_source = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(sharded_source, max_shard_size="100KB")
    tiny_tokenizer().save_pretrained(sharded_source)
    assert (sharded_source / "model.safetensors.index.json").is_file()
    outs = [tmp_path / name for name in ("first", "second", "third")]
    for out, folder, limit in zip(outs, (source, source, sharded_source), ("5GB", "5GB", "60KB"), strict=True):
        settings = settings_for(tmp_path, max_shard_size=limit)
        quantize_model(folder, settings=settings, out=out, seed=1)
    first, second = (record_files(out, exclude=("quantization_report.json",)) for out in outs[:2])
    assert {name: record.sha256 for name, record in first.items()} == {
        name: record.sha256 for name, record in second.items()
    }
    index = json.loads((outs[2] / "model.safetensors.index.json").read_text())
    shards = {name: load_file(outs[2] / name) for name in set(index["weight_map"].values())}
    whole = load_file(outs[0] / "model.safetensors")
    assert set(index["weight_map"]) == set(whole)
    assert len(shards) > 2
    for name, file in index["weight_map"].items():
        assert torch.equal(shards[file][name], whole[name])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    loaded = load_in_a_fresh_process({"sharded": outs[2]}, tmp_path)["sharded"]
    assert check_probe(outs[2], loaded["probe"])["max_abs_difference"] < 1e-4


KILLED = """
import os, signal, sys
from pathlib import Path
from finetune.quant.quantize import quantize_model
from finetune.quant.settings import QuantizeSettings
from finetune.quant.work import WorkFolder
class DyingFolder(WorkFolder):
    def save(self, index, *rest, **more):
        if index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super().save(index, *rest, **more)
import torch
import finetune.quant.quantize as module
torch.set_num_threads(int(sys.argv[4]))
module.WorkFolder = DyingFolder
settings = QuantizeSettings.model_validate_json(sys.argv[2])
quantize_model(Path(sys.argv[1]), settings=settings, out=Path(sys.argv[3]), seed=0)
"""


def test_a_killed_run_goes_on_at_its_block_with_the_bytes_of_an_undisturbed_one(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", num_layers=4, dtype="bfloat16")
    settings = settings_for(tmp_path)
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(source), settings.model_dump_json(), str(out)]
    command.append(str(torch.get_num_threads()))
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    work = tmp_path / "out.work"
    blocks = sorted(work.glob("block-*.safetensors"))
    assert [path.name for path in blocks] == ["block-00000.safetensors", "block-00001.safetensors"]
    assert not out.exists()
    # Proof that finished blocks are taken over: the second run reports what is written in them.
    quantize_model(source, settings=settings, out=out, seed=0)
    quantize_model(source, settings=settings, out=tmp_path / "undisturbed", seed=0)
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "undisturbed" / "model.safetensors").read_bytes()
    assert not work.exists()


def test_another_setting_is_refused_where_blocks_lie_and_restart_takes_none_over(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", num_layers=4)
    command = [
        sys.executable,
        "-c",
        KILLED,
        str(source),
        settings_for(tmp_path).model_dump_json(),
        str(tmp_path / "out"),
        str(torch.get_num_threads()),
    ]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    other = settings_for(tmp_path, damp=0.1)
    with pytest.raises(CheckpointError, match=r"(?s)damp: 0\.01 then, 0\.1 now.*--force"):
        quantize_model(source, settings=other, out=tmp_path / "out", seed=0)
    quantize_model(source, settings=other, out=tmp_path / "out", seed=0, restart=True)
    quantize_model(source, settings=other, out=tmp_path / "fresh", seed=0)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "fresh/model.safetensors").read_bytes()


def test_the_report_tells_each_layer_and_the_totals(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", dtype="bfloat16")
    totals = quantize_model(source, settings=settings_for(tmp_path), out=tmp_path / "out", seed=0)
    report = json.loads((tmp_path / "out/quantization_report.json").read_text())
    assert len(report["layers"]) == totals["num_layers"] == 14
    for entry in report["layers"]:
        assert 0 < entry["relative_error"] < 0.05
        assert entry["damp"] == 0.01
        assert 0 < entry["clip"]["mean_ratio"] <= 1.15
    assert totals["output_bytes"] < 0.5 * totals["source_bytes"]
    assert totals["calibration"]["samples"] == 6
    assert totals["peak_memory_bytes"] > 0
    assert totals["relative_error"] == pytest.approx(
        sum(entry["relative_error"] for entry in report["layers"]) / len(report["layers"])
    )


@pytest.mark.parametrize("true_sequential", [True, False])
def test_later_blocks_make_up_for_the_error_of_earlier_ones(true_sequential: bool, tmp_path: Path) -> None:
    """GPTQ brings the whole model's logits closer to the original's than rounding to nearest does."""
    from transformers import AutoModelForCausalLM

    source = tiny_llama(tmp_path / "source", num_layers=3)
    rtn, gptq = settings_for(tmp_path, method="rtn"), settings_for(tmp_path, true_sequential=true_sequential)
    for name, settings in (("rtn", rtn), ("gptq", gptq)):
        quantize_model(source, settings=settings, out=tmp_path / name, seed=0)
    ids = torch.tensor([read_probe(tmp_path / "gptq").input_ids])  # type: ignore[union-attr]
    with torch.no_grad():
        whole, rounded, compensated = (
            AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)(ids).logits
            for name in ("source", "rtn", "gptq")
        )
    assert (compensated - whole).square().mean() < 0.7 * (rounded - whole).square().mean()


def test_models_that_cannot_be_quantized_are_refused(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    rtn = settings_for(tmp_path, method="rtn")
    quantize_model(source, settings=rtn, out=tmp_path / "out", seed=0)

    def refusal(folder: Path, kind: type[FinetuneError], **options: Any) -> str:
        with pytest.raises(kind) as caught:
            quantize_model(folder, **{"settings": rtn, "out": tmp_path / "other", "seed": 0, **options})
        assert not (tmp_path / "other").exists()
        return str(caught.value)

    assert "quantized already" in refusal(tmp_path / "out", RecipeError)
    assert "replace its source" in refusal(source, RecipeError, out=source)
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    from safetensors.torch import save_file

    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.0.mlp" in refusal(source, CheckpointError, settings=settings_for(tmp_path))
    assert "model.layers.0.mlp.up_proj" in refusal(source, CheckpointError)
    whole = weights["model.layers.0.mlp.up_proj.weight"].nan_to_num()
    for wrong, told in ((whole[:, 1:].contiguous(), "float32 [128, 63]"), (whole.to(torch.int8), "int8 [128, 64]")):
        save_file({**weights, "model.layers.0.mlp.up_proj.weight": wrong}, source / "model.safetensors")
        assert f"mlp.up_proj.weight is {told}" in refusal(source, CheckpointError)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(source, CheckpointError)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_what_a_block_computed_is_used_again_and_gives_the_same_bytes(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    import finetune.quant.memo as memo

    source = tiny_llama(tmp_path / "source", dtype="bfloat16")
    settings = settings_for(tmp_path, scheme=scheme, tuning_steps=0, smoothing=None)
    forward, calls = LlamaAttention.forward, []

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append(None)
        return forward(*arguments, **more)

    monkeypatch.setattr(LlamaAttention, "forward", counted)
    num_calls = {}
    for name, limit in (("kept", memo.MAX_BYTES), ("anew", 0)):
        monkeypatch.setattr(memo, "MAX_BYTES", limit)
        calls.clear()
        quantize_model(source, settings=settings, out=tmp_path / name, seed=0)
        num_calls[name] = len(calls)
    assert (tmp_path / "kept/model.safetensors").read_bytes() == (tmp_path / "anew/model.safetensors").read_bytes()
    # Two chunks: in the first block without it, passes for o, for gate and up, for down, and onward; with it, for o.
    assert num_calls["anew"] - num_calls["kept"] == 2 * (3 + 2)
    # With it, of two blocks: the passes for q, k, v and for o (8), that through the unquantized block (4), looks at a
    # first chunk (6 in all), the probe and the two evaluation streams (6). Any other pass would be 4 more.
    assert num_calls["kept"] <= 24
