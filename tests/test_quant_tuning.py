"""What learns by gradients: scales and norms tuned through the whole model, and the rounding of a block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from finetune.quant.decoder import StreamedDecoder
from finetune.quant.layers import layer_schemes
from finetune.quant.methods import QuantizedWeight
from finetune.quant.quantize import calibration_stream, load_calibration, quantize_model
from finetune.quant.scales import weight_values
from finetune.quant.settings import QuantizeSettings
from finetune.quant.stream import BlockQuantizer, BlockResult, Stream
from finetune.quant.tuning import ScaleTuner
from tests.tiny import CORPUS, tiny_llama


def settings_for(folder: Path, **values: Any) -> QuantizeSettings:
    path = folder / "calibration.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS * 3), encoding="utf-8")
    calibration = {"data": [{"path": str(path)}], "num_samples": 6, "max_seq_length": 24, "micro_batch_size": 4}
    return QuantizeSettings(**{"calibration": calibration, "group_size": 32, "verify": False, **values})


class Blocks:
    """The blocks of a tiny model, rounded to nearest, in a tuner's hands."""

    def __init__(self, tmp_path: Path, **values: Any) -> None:
        source = tiny_llama(tmp_path / "source", num_layers=2, dtype="float32")
        settings = settings_for(tmp_path, method="rtn", **values)
        self.decoder = StreamedDecoder(source)
        schemes = layer_schemes(self.decoder, settings)
        self.quantizer = BlockQuantizer(
            self.decoder,
            schemes,
            dict.fromkeys(schemes.values(), torch.float32),
            method="rtn",
            damp=0.01,
            act_order=True,
            true_sequential=True,
            smoothing=None,
        )
        assert settings.calibration is not None
        samples = load_calibration(source, settings.calibration, seed=0)
        inputs = calibration_stream(self.decoder, samples, 4)
        # In float32, so that a gradient can be compared with differences of the loss.
        hidden, calls = self.decoder.embed(
            list(torch.from_numpy(samples.input_ids).long().split(4)), dtype=torch.float32
        )
        self.inputs = Stream(hidden, inputs.masks, calls, torch.float32)
        self.blocks = [self.quantizer.quantize(index, None) for index in range(2)]
        self.tuner = ScaleTuner(self.quantizer, self.inputs, load=self.blocks.__getitem__, folder=tmp_path / "tuning")

    def tune(self, steps: int) -> list[float]:
        return self.tuner.tune(steps=steps, seed=0, save=self.blocks.__setitem__)

    @torch.no_grad()
    def loss(self) -> float:
        """Mean KL over all samples, computed plainly: whole streams, whole logits."""
        exact, quantized = (
            Stream(list(self.inputs.hidden), self.inputs.masks, self.inputs.calls, torch.float32) for _ in range(2)
        )
        for index, result in enumerate(self.blocks):
            with self.decoder.block(index, self.decoder.load_block(index), dtype=torch.float32) as block:
                exact.advance(block, index, self.decoder.device)
            with self.quantizer.quantized_block(index, result, dtype=torch.float32) as block:
                quantized.advance(block, index, self.decoder.device)
        total, count = 0.0, 0
        with self.decoder.head(dtype=torch.float32) as head:
            for exact_BSD, hidden_BSD, mask_BS in zip(exact.hidden, quantized.hidden, exact.masks, strict=True):
                kept = torch.ones(hidden_BSD.shape[:2], dtype=torch.bool) if mask_BS is None else mask_BS
                target_NV, model_NV = (head(x).log_softmax(-1)[kept] for x in (exact_BSD, hidden_BSD))
                total += (target_NV.exp() * (target_NV - model_NV)).sum().item()
                count += len(target_NV)
        return total / count


def test_tuning_brings_the_predictions_nearer_and_leaves_the_codes(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path)
    before, codes = blocks.loss(), [result.quantized for result in blocks.blocks]
    norms = [result.tensors["input_layernorm.weight"].clone() for result in blocks.blocks]
    losses = blocks.tune(30)
    assert losses[0] == pytest.approx(before, rel=0.5), "the first step's loss is that of its own few samples"
    assert blocks.loss() < 0.8 * before
    for result, old, norm in zip(blocks.blocks, codes, norms, strict=True):
        for name, weight in result.quantized.items():
            assert torch.equal(weight.codes, old[name].codes)
            assert not torch.equal(weight.scale, old[name].scale)
            assert (weight.scale / old[name].scale - 1).abs().max() < 0.2
        assert not torch.equal(result.tensors["input_layernorm.weight"], norm)


def test_the_gradient_is_that_of_the_whole_models_loss(tmp_path: Path) -> None:
    """A step of Adam hides a gradient's size but not its sign: move one scale of each layer by hand and compare."""
    blocks = Blocks(tmp_path)
    seen: dict[tuple[int, str], Tensor] = {}
    step = ScaleTuner._store

    def note(tuner: ScaleTuner, index: int, tuned: Any) -> None:
        for name, mean in tuned.mean.items():
            seen[index, name] = mean.clone() / (1 - 0.9)
        step(tuner, index, tuned)

    ScaleTuner._store = note  # type: ignore[method-assign]
    # One step over all samples: six sequences of 24 tokens are fewer than a step takes.
    try:
        untouched = list(blocks.blocks)
        blocks.tune(1)
    finally:
        ScaleTuner._store = step  # type: ignore[method-assign]
    blocks.blocks[:] = untouched
    for index in range(2):
        for name in untouched[index].quantized:
            gradient_OG = seen[index, f"{name}.scale"]
            place = divmod(int(gradient_OG.abs().argmax()), gradient_OG.shape[1])
            measured = []
            for change in (1e-2, -1e-2):
                weight = untouched[index].quantized[name]
                scale_OG = weight.scale.clone()
                scale_OG[place] *= 1 + change
                moved = QuantizedWeight(weight.codes, scale_OG)
                quantized = {**untouched[index].quantized, name: moved}
                blocks.blocks[index] = BlockResult(untouched[index].tensors, quantized, [])
                measured.append(blocks.loss())
            blocks.blocks[index] = untouched[index]
            slope = (measured[0] - measured[1]) / 2e-2
            assert gradient_OG[place].item() == pytest.approx(slope, rel=0.05, abs=1e-6), (index, name)


@pytest.mark.parametrize(
    "values",
    [
        {"scheme": "w4a16"},
        {"scheme": "w4a16", "symmetric": False},
        {"scheme": "w8a8", "group_size": None},
        {"scheme": "w4a16", "format": "gptq"},
        {"scheme": "w4a16", "format": "gguf"},
    ],
)
def test_best_beats_its_start_in_every_format_and_same_command_same_bytes(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    if values.get("format") == "gguf":
        pytest.importorskip("gguf")
    source = tiny_llama(tmp_path / "source", num_layers=3, dtype="bfloat16")
    figures = {}
    for name, steps in (("start", 0), ("tuned", 24), ("again", 24)):
        # Without the correction of drift, which leaves int8 nothing to gain on a model this small.
        settings = settings_for(tmp_path, method="best", tuning_steps=steps, drift_correction=False, **values)
        report = quantize_model(source, settings=settings, out=tmp_path / name, seed=0)
        figures[name] = report["end_to_end"]["kl"], report["tuning"]
    assert figures["start"][1] is None
    assert len(figures["tuned"][1]["kl_of_each_step"]) == 24
    first, last = (sum(figures["tuned"][1]["kl_of_each_step"][part]) for part in (slice(3), slice(-3, None)))
    assert last < first
    for path in sorted((tmp_path / "tuned").glob("*.safetensors")):
        tuned, again = load_file(path), load_file(tmp_path / "again" / path.name)
        assert all(torch.equal(tensor, again[name]) for name, tensor in tuned.items())


def test_learned_rounding_beats_rounding_to_nearest(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", num_layers=2, dtype="bfloat16")
    error = {}
    for method in ("rtn", "learned"):
        settings = settings_for(tmp_path, method=method, rounding_iterations=60)
        report = quantize_model(source, settings=settings, out=tmp_path / method, seed=0)
        blocks = json.loads((tmp_path / method / "quantization_report.json").read_text())["blocks"]
        error[method] = blocks[0]["hidden_error"], report["end_to_end"]["kl"]
    # In the block's output, which learning looks at, and so in the whole model's.
    assert error["learned"][0] < 0.8 * error["rtn"][0]
    assert error["learned"][1] < 0.8 * error["rtn"][1]


def test_learning_that_gains_nothing_keeps_the_codes_it_began_with(tmp_path: Path) -> None:
    """Codes that are exact already: the weights are whole numbers of a scale."""
    from finetune.quant.learned_rounding import learn_rounding

    blocks = Blocks(tmp_path)
    result = blocks.blocks[0]
    weights = {name: weight_values(weight, torch.float32) for name, weight in result.quantized.items()}
    tensors = result.tensors | {f"{name}.weight": weight_OI for name, weight_OI in weights.items()}
    with blocks.decoder.block(0, tensors, dtype=torch.float32) as block:
        targets = list(blocks.inputs.forward(block, 0, blocks.decoder.device))
        learned = learn_rounding(
            blocks.quantizer, 0, block, weights, result.quantized, blocks.inputs, targets, iterations=5
        )
    for name, weight in result.quantized.items():
        assert torch.equal(learned[name].codes, weight.codes)
        assert torch.equal(learned[name].scale, weight.scale)


def test_awq_beats_rounding_to_nearest_where_few_inputs_matter_most(tmp_path: Path) -> None:
    """Outliers in a norm's weight make columns that matter; both computed by the same model afterwards."""
    from transformers import AutoModelForCausalLM

    source = tiny_llama(tmp_path / "source", num_layers=2)
    model = AutoModelForCausalLM.from_pretrained(source)
    for layer in model.model.layers:
        layer.input_layernorm.weight.data[::16] *= 16
        layer.post_attention_layernorm.weight.data[::16] *= 16
    model.save_pretrained(source)
    kl = {}
    for method in ("rtn", "awq"):
        report = quantize_model(source, settings=settings_for(tmp_path, method=method), out=tmp_path / method, seed=0)
        kl[method] = report["end_to_end"]["kl"]
    assert kl["awq"] < 0.7 * kl["rtn"]
