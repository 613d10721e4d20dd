"""One table over several models; its gate; its settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from finetune.errors import CheckpointError, QualityGateError, RecipeError
from finetune.evaluate.gate import check_gate
from finetune.evaluate.perplexity import perplexity, to_perplexity
from finetune.evaluate.run import Figures, evaluate_models, shared_window
from finetune.evaluate.settings import EvaluateSettings
from finetune.evaluate.table import format_table
from finetune.evaluate.windows import text_windows
from finetune.model.load import load_model, load_tokenizer
from tests.tiny import CORPUS, tiny_llama, tiny_tokenizer
from tests.tiny_quantized import tiny_quantized

RESULTS: dict[str, Figures] = {
    "base": {"perplexity": 20.0, "num_tokens": 9, "perplexity_ratio": 2.0, "kl": 1.5, "exact_match": 0.02,
             "exact_match_drop": 0.6},
    "sft": {"perplexity": 10.0, "num_tokens": 9, "exact_match": 0.62},
    "int4": {"perplexity": 10.4, "num_tokens": 9, "perplexity_ratio": 1.04, "kl": 0.031, "exact_match": 0.59,
             "exact_match_drop": 0.03},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    sft = tiny_llama(root / "sft", dtype="bfloat16")
    return {
        "base": tiny_llama(root / "base", seed=1, dtype="bfloat16"),
        "sft": sft,
        "int8": tiny_quantized(sft, root / "int8", scheme="w8a8"),
        "int4": tiny_quantized(sft, root / "int4", scheme="w4a16"),
    }


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EvaluateSettings:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("\n".join(CORPUS * 4))
    rows = [
        {"messages": [{"role": "user", "content": f"{a} + 1?"}, {"role": "assistant", "content": str(a + 1)}]}
        for a in range(5)
    ]
    (folder / "questions.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return EvaluateSettings.model_validate(
        {
            "perplexity": str(folder / "text.txt"),
            "window": 64,
            "exact_match": {"path": str(folder / "questions.jsonl"), "format": "messages"},
            "max_new_tokens": 4,
        }
    )


def test_all_figures_of_float_and_quantized_models(folders: dict[str, Path], settings: EvaluateSettings) -> None:
    results = evaluate_models(folders, reference="sft", settings=settings, device="cpu")
    assert list(results) == ["base", "sft", "int8", "int4"]
    assert "kl" not in results["sft"]
    assert {figures["num_answers"] for figures in results.values()} == {5}
    # More bits, closer to the reference; another model is far from it.
    assert 0 < results["int8"]["kl"] < results["int4"]["kl"] < results["base"]["kl"]
    assert results["int8"]["top1_agreement"] > results["base"]["top1_agreement"]
    assert results["int4"]["size_bytes"] < results["int8"]["size_bytes"] < results["sft"]["size_bytes"]
    ratio = results["int4"]["perplexity"] / results["sft"]["perplexity"]
    assert results["int4"]["perplexity_ratio"] == pytest.approx(ratio)
    for figures in results.values():
        json.dumps(figures, allow_nan=False)
    # Alone and without a reference a model gets the same perplexity.
    alone = evaluate_models({"int4": folders["int4"]}, reference=None, settings=settings, device="cpu")
    assert alone["int4"]["perplexity"] == pytest.approx(results["int4"]["perplexity"], rel=1e-6)
    assert "kl" not in alone["int4"]


def test_activations_of_w8a8_are_quantized_when_it_is_evaluated(
    folders: dict[str, Path], settings: EvaluateSettings
) -> None:
    """Loaded with dequantized weights the activations would stay in floats, and the figure would flatter the model."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    windows = text_windows(Path(str(settings.perplexity)), load_tokenizer(folders["int8"]), window=64)
    as_evaluated = load_model(folders["int8"], dtype=torch.float32, device="cpu")
    dequantized = AutoModelForCausalLM.from_pretrained(
        folders["int8"], dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    figures = [perplexity(model, windows)["perplexity"] for model in (as_evaluated, dequantized)]
    assert abs(figures[0] / figures[1] - 1) > 1e-6


def test_a_model_that_gives_nan_is_an_error(tmp_path: Path, settings: EvaluateSettings) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_llama(tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="finite") as caught:
        evaluate_models({"broken": folder}, reference=None, settings=settings, device="cpu")
    assert caught.value.where == str(folder)


def test_a_model_with_missing_weights_is_an_error(tmp_path: Path, settings: EvaluateSettings) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_llama(tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        evaluate_models({"broken": folder}, reference=None, settings=settings, device="cpu")


def test_a_reference_with_another_tokenizer_is_refused(
    tmp_path: Path, folders: dict[str, Path], settings: EvaluateSettings
) -> None:
    # The same number of tokens, other ids: the shapes alone would let it through.
    other = tiny_tokenizer()
    vocab = other.get_vocab()
    swapped = json.loads(other.backend_tokenizer.to_str())
    first, second = sorted(vocab, key=vocab.__getitem__)[10:12]
    swapped["model"]["vocab"] |= {first: vocab[second], second: vocab[first]}
    folder = tiny_llama(tmp_path / "other")
    (folder / "tokenizer.json").write_text(json.dumps(swapped))
    with pytest.raises(RecipeError, match="different tokenizers"):
        evaluate_models({"sft": folders["sft"], "other": folder}, reference="sft", settings=settings, device="cpu")


def gate(**limits: object) -> EvaluateSettings:
    base = {"perplexity": "text.txt", "exact_match": {"path": "q.jsonl"}, "reference": "sft"}
    return EvaluateSettings.model_validate(base | limits)


@pytest.mark.parametrize(
    ("limits", "shown"),
    [
        ({"max_kl": 0.03}, "int4: kl is 0.031, must be at most 0.03"),
        ({"max_perplexity_ratio": 1.02}, "int4: perplexity_ratio is 1.04, must be at most 1.02"),
        ({"min_exact_match": 0.6}, "int4: exact_match is 0.59, must be at least 0.6"),
        ({"max_exact_match_drop": 0.02}, "int4: exact_match_drop is 0.03, must be at most 0.02"),
    ],
)
def test_the_gate_names_figure_limit_and_model(limits: dict[str, float], shown: str) -> None:
    with pytest.raises(QualityGateError) as caught:
        check_gate(RESULTS, settings=gate(gate=["sft", "int4"], **limits), reference="sft")
    assert caught.value.what == shown
    assert caught.value.exit_code == 8


def test_limits_that_hold_pass_to_the_last_decimal() -> None:
    limits = {"max_kl": 0.031, "max_perplexity_ratio": 1.04, "min_exact_match": 0.59, "max_exact_match_drop": 0.03}
    results = {**RESULTS, "int4": {**RESULTS["int4"], "exact_match_drop": 0.62 - 0.59}}
    check_gate(results, settings=gate(gate=["sft", "int4"], **limits), reference="sft")


def test_without_a_list_the_gate_is_for_every_model_but_comparisons_spare_the_reference() -> None:
    with pytest.raises(QualityGateError) as caught:
        check_gate(RESULTS, settings=gate(max_kl=0.01, min_exact_match=0.7), reference="sft")
    assert [part.split(": ")[0] for part in caught.value.what.split("; ")] == ["base", "base", "sft", "int4", "int4"]


def test_the_table_is_aligned_and_leaves_absent_figures_blank() -> None:
    lines = format_table(RESULTS).splitlines()
    assert len(lines) == 5
    assert lines[0].split() == ["model", "perplexity", "ratio", "KL", "(nats/token)", "exact", "match"]
    assert lines[3].split() == ["sft", "10.000", "62.0%"]
    assert lines[4].split() == ["int4", "10.400", "1.0400", "0.03100", "59.0%"]
    assert len({len(line) for line in lines}) == 1


def test_a_hopeless_model_does_not_fill_the_table_with_digits() -> None:
    hopeless: Figures = {"perplexity": to_perplexity(1000.0), "perplexity_ratio": 49152.1234, "kl": 10.8}
    results = {"random": hopeless, "lost": {"perplexity": float("nan")}, "poor": {"perplexity": 49152.123456}}
    lines = [line.split() for line in format_table(results).splitlines()[2:]]
    assert lines == [["random", "8.22e+307", "49,152", "10.80000"], ["lost", "nan"], ["poor", "49,152"]]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({}, "nothing to evaluate"),
        ({"perplexity": "a.txt", "max_kl": 0.1}, "`max_kl` needs `reference`"),
        ({"exact_match": {"path": "q.jsonl"}, "reference": "sft", "max_kl": 0.1}, "`max_kl` needs `perplexity`"),
        ({"perplexity": "a.txt", "min_exact_match": 0.1}, "`min_exact_match` needs `exact_match`"),
        ({"perplexity": "a.txt", "models": ["sft"], "gate": ["int4"]}, "`gate` names `int4`"),
    ],
)
def test_settings_that_can_not_hold_are_refused(values: dict[str, object], shown: str) -> None:
    with pytest.raises(ValidationError, match=shown):
        EvaluateSettings.model_validate(values)


def test_windows_stay_within_every_model_s_context(tmp_path: Path) -> None:
    short, long = tiny_llama(tmp_path / "short"), tiny_llama(tmp_path / "long")
    for folder, context in ((short, 96), (long, 4096)):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": context}))
    assert shared_window([long], None) == 1024
    assert shared_window([long, short], None) == 96
    assert shared_window([long, short], 96) == 96
    with pytest.raises(RecipeError, match="longer than the context") as caught:
        shared_window([long, short], 97)
    assert "at most 96" in str(caught.value)
