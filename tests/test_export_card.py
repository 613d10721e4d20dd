"""The model card holds what was measured and set, and leaves out what is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from finetune.export.model_card import CardFacts, model_card, quantize_stage

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "vocab_size": 1500,
    "dtype": "bfloat16",
    "quantization_config": {
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 128,
                }
            }
        },
    },
}

FACTS = CardFacts(
    title="Arithmetic, 4 bit",
    license="apache-2.0",
    base_model="someone/base",
    datasets=["someone/sums"],
    stages=[
        {
            "name": "sft",
            "kind": "sft",
            "settings": {"data": [{"path": "/home/x/data/train.jsonl"}], "learning_rate": 2e-5, "epochs": 2.0},
            "metrics": {"final_loss": 0.123456, "peak_memory_bytes": 1},
        },
        {
            "name": "int4",
            "kind": "quantize",
            "settings": {
                "scheme": "w4a16",
                "method": "gptq",
                "group_size": 128,
                "calibration": {"data": [{"path": "data/text.jsonl"}], "num_samples": 64, "max_seq_length": 512},
            },
            "metrics": {},
        },
    ],
    evaluation={
        "sft": {"perplexity": 9.8765, "num_tokens": 32736, "exact_match": 0.915, "num_answers": 200},
        "int4": {"perplexity": 10.01, "num_tokens": 32736, "kl": 0.0123, "exact_match": 0.905, "num_answers": 200},
    },
    evaluated_as="int4",
    reference="sft",
    evaluation_settings={"perplexity": "data/heldout.txt", "window": 1024, "exact_match": {"path": "data/q.jsonl"}},
)


def card(facts: CardFacts, **keywords: Any) -> tuple[dict[str, Any], str]:
    text = model_card(facts, **{"config": CONFIG, "has_chat_template": True, "repo_id": None, **keywords})
    _, header, body = text.split("---\n", 2)
    return yaml.safe_load(header), body


def test_the_front_matter_is_what_the_hub_reads() -> None:
    header, _ = card(FACTS)
    assert header == {
        "license": "apache-2.0",
        "base_model": "someone/base",
        "base_model_relation": "finetune",
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "tags": ["finetune", "compressed-tensors"],
        "datasets": ["someone/sums"],
    }
    from huggingface_hub import ModelCardData

    ModelCardData(**header)


def test_a_model_that_was_only_quantized_is_the_bases_quantization() -> None:
    header, _ = card(CardFacts(title="q", base_model="someone/base", stages=FACTS.stages[1:]))
    assert header["base_model_relation"] == "quantized"


def test_figures_stand_in_the_table_as_measured() -> None:
    _, body = card(FACTS)
    rows = [line for line in body.splitlines() if line.startswith("|")]
    assert rows == [
        "| Model | Perplexity | KL to reference (nats/token) | Exact match |",
        "|---|---:|---:|---:|",
        "| sft | 9.877 |  | 91.5% |",
        "| **int4 (this model)** | 10.010 | 0.01230 | 90.5% |",
    ]
    assert "heldout.txt (32,736 tokens scored), in non-overlapping windows of 1024 tokens" in body
    assert "200 greedily generated replies" in body
    assert "The reference is sft." in body


def test_training_and_quantization_are_told_without_this_machines_paths() -> None:
    _, body = card(FACTS)
    assert "1. **sft**: data train.jsonl; learning_rate 2e-05; epochs 2.0; final_loss 0.1235" in body
    assert (
        "2. **int4** (quantize): calibrated on text.jsonl; 64 samples of 512 tokens; scheme w4a16; method gptq" in body
    )
    assert "4-bit int weights per group of 128, symmetric (format pack-quantized)" in body
    assert "/home" not in body
    assert "peak_memory" not in body


REPORT: dict[str, Any] = {
    "settings": FACTS.stages[1]["settings"],
    "format": "gptq",
    "source_bytes": 269_060_552,
    "output_bytes": 113_300_000,
    "bits_per_weight": 4.25,
    "end_to_end": {
        "held_out": True,
        "num_tokens": 8176,
        "unquantized_perplexity": 15.21,
        "perplexity": 16.4268,
        "perplexity_ratio": 1.08,
        "kl": 0.0912,
        "top1_agreement": 0.875,
    },
}


def test_what_quantization_cost_stands_in_a_table() -> None:
    _, body = card(CardFacts(title="it", stages=[quantize_stage(REPORT)]))
    assert [line for line in body.splitlines() if line.startswith("|")] == [
        "| | Before | After |",
        "|---|---:|---:|",
        "| Weights (MB) | 269.1 | 113.3 |",
        "| Bits a quantized weight |  | 4.25 |",
        "| Perplexity | 15.210 | 16.427 |",
        "| Perplexity ratio |  | 1.0800 |",
        "| KL (nats/token) |  | 0.09120 |",
        "| Top-1 agreement |  | 87.5% |",
    ]
    assert "Measured on 8,176 tokens of calibration text that was held out." in body
    assert "1. **quantize**: calibrated on text.jsonl; 64 samples of 512 tokens; scheme w4a16; method gptq" in body
    assert "stored as gptq" in body
    used = {**REPORT, "end_to_end": {**REPORT["end_to_end"], "held_out": False}}
    assert "of the text it was calibrated on." in card(CardFacts(title="it", stages=[quantize_stage(used)]))[1]
    _, body = card(CardFacts(title="it", stages=[quantize_stage({**REPORT, "end_to_end": None})]))
    assert "| Weights (MB) | 269.1 | 113.3 |" in body
    assert "Perplexity" not in body


def test_a_card_of_the_gptq_format_says_who_loads_it() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}
    config = {**CONFIG, "quantization_config": gptq}
    header, body = card(FACTS, config=config, repo_id="me/it")
    assert "- Quantization: 4-bit weights per group of 64, symmetric (GPTQ format)" in body
    assert "`vllm serve me/it`" in body
    assert "pip install transformers optimum gptqmodel" in body
    assert "gptq" in header["tags"]
    _, body = card(FACTS, config={**CONFIG, "quantization_config": {**gptq, "group_size": -1, "sym": False}})
    assert "4-bit weights per output channel, asymmetric" in body
    assert "vllm" not in card(FACTS)[1]


def test_nothing_is_invented_where_nothing_is_known() -> None:
    header, body = card(CardFacts(title="Bare"), config={"model_type": "llama"}, has_chat_template=False)
    assert header == {"pipeline_tag": "text-generation", "library_name": "transformers", "tags": ["finetune"]}
    assert "|" not in body
    assert "## How it was made" not in body
    assert "## Evaluation" not in body
    assert "apply_chat_template" not in body
    assert "None" not in body


def test_titles_and_names_that_would_break_yaml_or_the_table(tmp_path: Path) -> None:
    header, body = card(CardFacts(title="a: b", tags=["x: y", "#z"], evaluation={"a|b": {"perplexity": 1.0}}))
    assert header["tags"][-2:] == ["x: y", "#z"]
    assert "| a\\|b | 1.000 |" in body
