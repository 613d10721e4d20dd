"""The report: figures of the whole model against those that plain transformers gives, sizes, the picture, the check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import CheckpointError, QualityGateError
from finetune.export.verify import load_in_fresh_process
from finetune.quant import end_to_end
from finetune.quant.plots import errors_by_kind, plot_report, unbeaten
from finetune.quant.quantize import quantize_model
from finetune.quant.report import check_limits
from finetune.quant.settings import QuantizeSettings
from tests.tiny import CORPUS, tiny_llama


def settings_for(folder: Path, *, repeat: int = 12, **values: Any) -> QuantizeSettings:
    path = folder / "calibration.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS * repeat), encoding="utf-8")
    calibration = {"data": [{"path": str(path)}], "num_samples": 6, "max_seq_length": 32}
    return QuantizeSettings(**{"group_size": 32, "calibration": calibration, **values})


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "quantization_report.json").read_text(encoding="utf-8"))
    return report


def test_figures_are_those_of_plain_transformers_on_the_text_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    from finetune.quant.calibration import load_calibration

    monkeypatch.setattr(end_to_end, "EVALUATION_DTYPE", torch.float32)
    monkeypatch.setattr("finetune.quant.quantize.CALIBRATION_DTYPE", torch.float32)
    source, out = tiny_llama(tmp_path / "source", num_layers=3), tmp_path / "out"
    settings = settings_for(tmp_path)
    quantize_model(source, settings=settings, out=out, seed=3)
    figures = report_of(out)["end_to_end"]
    assert settings.calibration is not None
    samples = load_calibration(source, settings.calibration, seed=3)
    ids_ES = torch.from_numpy(samples.evaluation_ids).long()
    calibrated = {tuple(row) for row in samples.input_ids.tolist()}
    assert figures["held_out"]
    assert not calibrated & {tuple(row) for row in ids_ES.tolist()}
    assert figures["num_sequences"] == len(ids_ES) > 3
    log_probabilities = []
    for folder in (source, out):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            log_probabilities.append(model(ids_ES).logits[:, :-1].log_softmax(-1))
    exact, quantized = log_probabilities
    nll = [-values.gather(-1, ids_ES[:, 1:, None]).mean() for values in log_probabilities]
    assert figures["unquantized_perplexity"] == pytest.approx(nll[0].exp().item(), rel=1e-4)
    assert figures["perplexity"] == pytest.approx(nll[1].exp().item(), rel=1e-4)
    assert figures["perplexity_ratio"] == pytest.approx((nll[1] - nll[0]).exp().item(), rel=1e-4)
    kl = (exact.exp() * (exact - quantized)).sum(-1).mean().item()
    assert figures["kl"] == pytest.approx(kl, rel=1e-3)
    assert figures["top1_agreement"] == pytest.approx((exact.argmax(-1) == quantized.argmax(-1)).float().mean().item())
    assert figures["num_tokens"] == ids_ES[:, 1:].numel()


def test_eight_bits_cost_far_less_than_four_and_errors_grow_through_the_depth(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", num_layers=3)
    figures = {}
    for scheme, group_size in (("w8a16", None), ("w4a16", 32)):
        out = tmp_path / scheme
        settings = settings_for(tmp_path, scheme=scheme, group_size=group_size, method="rtn")
        quantize_model(source, settings=settings, out=out, seed=0)
        report = report_of(out)
        figures[scheme] = report["end_to_end"]
        errors = [entry["hidden_error"] for entry in report["blocks"]]
        assert [entry["block"] for entry in report["blocks"]] == [f"model.layers.{index}" for index in range(3)]
        assert 0 < errors[0] < errors[-1] < 0.3
    assert 0 <= figures["w8a16"]["kl"] < 0.1 * figures["w4a16"]["kl"]
    assert figures["w8a16"]["unquantized_perplexity"] == figures["w4a16"]["unquantized_perplexity"]


def test_without_text_left_over_the_calibrated_text_is_measured_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_llama(tmp_path / "source")
    settings = settings_for(tmp_path, repeat=1)
    summary = quantize_model(source, settings=settings, out=tmp_path / "out", seed=0)
    assert summary["end_to_end"]["held_out"] is False
    assert summary["calibration"]["samples"] < summary["calibration"]["samples_asked_for"] == 6
    told = capsys.readouterr().err
    assert f"{summary['calibration']['tokens_used']:,} tokens of the 192 asked for" in told
    assert "calibrated on" in told
    assert len(summary["notes"]) == 2
    without = QuantizeSettings(method="rtn", group_size=32)
    assert quantize_model(source, settings=without, out=tmp_path / "rtn", seed=0)["end_to_end"] is None


def test_layers_tell_what_is_stored_and_the_bits_are_those_of_the_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    source, out = tiny_llama(tmp_path / "source", dtype="bfloat16"), tmp_path / "out"
    overrides = [{"layers": ["down_proj"], "scheme": "w8a16"}]
    summary = quantize_model(source, settings=settings_for(tmp_path, overrides=overrides), out=out, seed=0)
    stored = load_file(out / "model.safetensors")
    num_weights = 0
    num_bytes = 0
    for entry in report_of(out)["layers"]:
        parts = [tensor for name, tensor in stored.items() if name.startswith(entry["layer"] + ".")]
        layer_bytes = sum(tensor.nbytes for tensor in parts)
        numel = entry["shape"][0] * entry["shape"][1]
        assert entry["bits_per_weight"] == pytest.approx(8 * layer_bytes / numel, abs=1e-4)
        is_down = entry["layer"].endswith("down_proj")
        assert (entry["num_bits"], entry["group_size"]) == ((8, None) if is_down else (4, 32))
        assert entry["shape"] == ([64, 128] if is_down else entry["shape"])
        num_bytes, num_weights = num_bytes + layer_bytes, num_weights + numel
    assert summary["bits_per_weight"] == pytest.approx(8 * num_bytes / num_weights)
    assert summary["output_bytes"] == sum(tensor.nbytes for tensor in stored.values())


def test_the_picture_is_drawn_with_and_without_figures_and_is_the_same_each_time(tmp_path: Path) -> None:
    source, out = tiny_llama(tmp_path / "source"), tmp_path / "out"
    quantize_model(source, settings=settings_for(tmp_path), out=out, seed=0)
    picture = (out / "quantization_report.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    report = report_of(out)
    plot_report(report, tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == picture
    plot_report({**report, "blocks": [], "end_to_end": None}, tmp_path / "bare.png")
    assert (tmp_path / "bare.png").read_bytes() != picture


def test_experts_of_a_kind_share_a_line() -> None:
    layers = [
        {"layer": f"model.layers.{block}.mlp.experts.{expert}.down_proj", "relative_error": block + expert / 10}
        for block in (0, 1)
        for expert in (0, 2)
    ] + [{"layer": "model.layers.1.mlp.shared.down_proj", "relative_error": 3.0}]
    found = errors_by_kind(layers)
    assert found["mlp.experts.*.down_proj"] == {0: pytest.approx(0.1), 1: pytest.approx(1.1)}
    assert found["mlp.shared.down_proj"] == {1: 3.0}


def test_unbeaten_variants_are_the_front() -> None:
    sizes = {"small": (1, 9.0), "beaten": (2, 9.5), "middle": (3, 2.0), "worse": (3, 4.0), "large": (8, 1.0)}
    variants = [{"name": name, "output_bytes": size, "kl": kl} for name, (size, kl) in sizes.items()]
    assert [variant["name"] for variant in unbeaten(variants, "kl")] == ["small", "middle", "large"]


def test_a_result_that_loads_otherwise_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that stores some scales by half: the folder loads without an error, and what was there before stays."""
    from finetune.quant.writers.compressed_tensors import CompressedTensorsWriter

    source, out = tiny_llama(tmp_path / "source"), tmp_path / "out"
    settings = settings_for(tmp_path)
    summary = quantize_model(source, settings=settings, out=out, seed=0, verify=load_in_fresh_process)
    assert summary["verified"]["probe"]["agrees"]
    assert report_of(out)["verified"] == summary["verified"]
    before = (out / "model.safetensors").read_bytes()
    tensors = CompressedTensorsWriter.tensors

    def halved(*args: Any) -> dict[str, torch.Tensor]:
        return {
            name: tensor / 2 if name.endswith("down_proj.weight_scale") else tensor
            for name, tensor in tensors(*args).items()
        }

    def faulty_read(*args: Any) -> Any:
        import dataclasses

        weight = read(*args)
        return dataclasses.replace(weight, scale=weight.scale * 2) if "down_proj" in args[1] else weight

    read = CompressedTensorsWriter.read
    monkeypatch.setattr(CompressedTensorsWriter, "tensors", halved)
    monkeypatch.setattr(CompressedTensorsWriter, "read", faulty_read)
    for target in (out, tmp_path / "new"):
        with pytest.raises(CheckpointError) as caught:
            quantize_model(source, settings=settings, out=target, seed=1, verify=load_in_fresh_process)
        assert "isn't kept" in str(caught.value)
        assert str(target) in str(caught.value)
    assert not (tmp_path / "new").exists()
    assert (out / "model.safetensors").read_bytes() == before
    unchecked = settings.model_copy(update={"verify": False})
    assert "verified" not in quantize_model(source, settings=unchecked, out=out, seed=1, verify=load_in_fresh_process)


def test_limits_name_each_figure_that_does_not_hold() -> None:
    figures = {"kl": 0.2, "perplexity_ratio": float("nan")}
    check_limits(figures, {"kl": 0.2, "perplexity_ratio": None}, where="out")
    with pytest.raises(QualityGateError) as caught:
        check_limits(figures, {"kl": 0.1, "perplexity_ratio": 2.0}, where="out")
    assert "kl is 0.2" in str(caught.value)
    assert "perplexity_ratio is nan" in str(caught.value)
