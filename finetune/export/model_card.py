"""README.md of an exported folder: the Hub's YAML front matter, and the figures that were measured, nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from finetune.text_table import figure_of

TRAINING_KINDS = ("pretrain", "sft", "dpo")

FIGURES = {
    "perplexity": "Perplexity",
    "perplexity_ratio": "Ratio to reference",
    "kl": "KL to reference (nats/token)",
    "top1_agreement": "Top-1 agreement",
    "exact_match": "Exact match",
    "size_bytes": "Weights (MB)",
}
TRAINING_SETTINGS = (
    "max_seq_length",
    "packing",
    "train_on",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_schedule",
    "warmup_ratio",
    "weight_decay",
    "epochs",
    "max_steps",
    "mixed_precision",
)
METHOD_PACKAGES = {"gptq": "optimum gptqmodel"}
"""What plain transformers needs to load a quantization method, where that isn't a package of its name."""
GGUF_QUANTIZATION = {"quant_method": "gguf", "gguf_file": "model.gguf"}
"""How a GGUF folder is described to the card: the folder's own config.json says nothing of it."""
QUANTIZATION_SETTINGS = ("scheme", "method", "group_size", "symmetric", "ignore")


@dataclass(frozen=True)
class CardFacts:
    """What is known of the model. Whatever is left at its default does not appear in the card."""

    title: str
    license: str | None = None
    base_model: str | None = None
    """A Hub id."""
    datasets: Sequence[str] = ()
    tags: Sequence[str] = ()
    language: Sequence[str] = ()
    stages: Sequence[Mapping[str, Any]] = ()
    """What made the model, in order: each with name, kind, settings and metrics, as the manifests have them."""
    evaluation: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """{model: figures}, as ``evaluate_models`` returns them."""
    evaluated_as: str | None = None
    """Which row of ``evaluation`` is this model."""
    reference: str | None = None
    """Which row of ``evaluation`` the others are compared with."""
    evaluation_settings: Mapping[str, Any] = field(default_factory=dict)


def model_card(facts: CardFacts, *, config: Mapping[str, Any], has_chat_template: bool, repo_id: str | None) -> str:
    """The whole README.md. ``config`` is the model's config.json; ``repo_id`` is what a reader loads it by."""
    sections = [
        _front_matter(facts, config),
        f"# {facts.title}",
        _about(facts, config),
        _evaluation(facts),
        _quantization_cost(facts),
        _usage(repo_id or "PATH_OF_THIS_FOLDER", config, has_chat_template),
        _recipe(facts),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(facts: CardFacts, config: Mapping[str, Any]) -> str:
    method = _quantization_method(config)
    tags = ["finetune", *([method] if method else []), *facts.tags]
    header: dict[str, Any] = {
        "license": facts.license,
        "base_model": facts.base_model,
        "base_model_relation": _relation(facts, method is not None) if facts.base_model else None,
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "language": list(facts.language) or None,
        "tags": list(dict.fromkeys(tags)),
        "datasets": list(facts.datasets) or None,
    }
    header = {key: value for key, value in header.items() if value is not None}
    return f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---"


def _quantization_method(config: Mapping[str, Any]) -> str | None:
    quantization = config.get("quantization_config")
    return None if quantization is None else str(quantization.get("quant_method", "compressed-tensors"))


def _relation(facts: CardFacts, quantized: bool) -> str:
    """The Hub's word for how this model comes from its base: a trained and then quantized one is a finetune."""
    trained = any(stage.get("kind") in TRAINING_KINDS for stage in facts.stages)
    return "quantized" if quantized and not trained else "finetune"


def _about(facts: CardFacts, config: Mapping[str, Any]) -> str:
    lines = []
    architecture = (config.get("architectures") or [None])[0]
    if architecture:
        sizes = [
            f"{config[key]} {words}"
            for key, words in (("num_hidden_layers", "layers"), ("hidden_size", "hidden"), ("vocab_size", "tokens"))
            if key in config
        ]
        lines.append(f"- Architecture: {architecture} ({', '.join(sizes)})")
    if config.get("dtype") or config.get("torch_dtype"):
        lines.append(f"- Stored dtype: {config.get('dtype') or config.get('torch_dtype')}")
    quantization = config.get("quantization_config")
    if quantization:
        method = _quantization_method(config)
        if method == "bitsandbytes":
            kind = "llm_int8" if quantization.get("load_in_8bit") else quantization.get("bnb_4bit_quant_type")
            lines.append(f"- Quantization: {kind} (bitsandbytes)")
            if quantization.get("llm_int8_skip_modules"):
                lines.append(f"- Not quantized: {_shorten(quantization['llm_int8_skip_modules'])}")
        elif method == "gptq":
            size = quantization.get("group_size", -1)
            group = "output channel" if size == -1 else f"group of {size}"
            symmetric = "symmetric" if quantization.get("sym") else "asymmetric"
            bits = quantization.get("bits")
            lines.append(f"- Quantization: {bits}-bit weights per {group}, {symmetric} (GPTQ format)")
        elif method == "gguf":
            lines.append(f"- Quantization: in the blocks of `{quantization['gguf_file']}`")
        for group in quantization.get("config_groups", {}).values():
            lines.append(f"- Quantization: {_quantization(group)} (format {quantization.get('format')})")
        if quantization.get("ignore"):
            lines.append(f"- Not quantized: {_shorten(quantization['ignore'])}")
    return "\n".join(lines)


def _quantization(group: Mapping[str, Any]) -> str:
    parts = []
    for key, word in (("weights", "weights"), ("input_activations", "activations")):
        scheme = group.get(key)
        if not scheme:
            continue
        strategy = scheme.get("strategy")
        size = f" of {scheme['group_size']}" if strategy == "group" else ""
        symmetric = "symmetric" if scheme.get("symmetric") else "asymmetric"
        dynamic = ", dynamic" if scheme.get("dynamic") else ""
        parts.append(
            f"{scheme.get('num_bits')}-bit {scheme.get('type')} {word} per {strategy}{size}, {symmetric}{dynamic}"
        )
    return "; ".join(parts)


def _evaluation(facts: CardFacts) -> str:
    if not facts.evaluation:
        return ""
    shown = [key for key in FIGURES if any(key in figures for figures in facts.evaluation.values())]
    lines = ["## Evaluation", "", "| Model | " + " | ".join(FIGURES[key] for key in shown) + " |"]
    lines.append("|---" + "|---:" * len(shown) + "|")
    for name, figures in facts.evaluation.items():
        cells = [figure_of(key, figures.get(key)) for key in shown]
        label = f"**{_cell(name)} (this model)**" if name == facts.evaluated_as else _cell(name)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    notes = _evaluation_notes(facts)
    return "\n".join([*lines, "", notes] if notes else lines)


def _evaluation_notes(facts: CardFacts) -> str:
    settings, notes = facts.evaluation_settings, []
    scored = {int(figures["num_tokens"]) for figures in facts.evaluation.values() if "num_tokens" in figures}
    if settings.get("perplexity") and settings.get("window"):
        over = f" ({scored.pop():,} tokens scored)" if len(scored) == 1 else ""
        notes.append(
            f"Perplexity on {_file_name(settings['perplexity'])}{over}, "
            f"in non-overlapping windows of {settings['window']} tokens."
        )
    answers = {int(figures["num_answers"]) for figures in facts.evaluation.values() if "num_answers" in figures}
    if settings.get("exact_match") and len(answers) == 1:
        notes.append(
            f"Exact match: {answers.pop():,} greedily generated replies compared with those of "
            f"{_file_name(settings['exact_match']['path'])}."
        )
    if facts.reference:
        notes.append(f"The reference is {facts.reference}.")
    return " ".join(notes)


def quantize_stage(report: Mapping[str, Any]) -> dict[str, Any]:
    """What ``quantization_report.json`` says of a model, as one of ``CardFacts.stages``."""
    return {"name": "quantize", "kind": "quantize", "settings": report["settings"], "metrics": report}


def _quantization_cost(facts: CardFacts) -> str:
    """Size and figures before and after the last quantization, as its report has them."""
    stage = next((stage for stage in reversed(facts.stages) if stage.get("kind") == "quantize"), None)
    report = (stage or {}).get("metrics") or {}
    figures = report.get("end_to_end") or {}
    agreement = figures.get("top1_agreement")
    rows = [
        f"| {heading} | {before} | {after} |"
        for heading, before, after in (
            ("Weights (MB)", *(figure_of(key, report.get(key)) for key in ("source_bytes", "output_bytes"))),
            ("Bits a quantized weight", "", figure_of("bits_per_weight", report.get("bits_per_weight"))),
            (
                "Perplexity",
                *(figure_of("perplexity", figures.get(key)) for key in ("unquantized_perplexity", "perplexity")),
            ),
            ("Perplexity ratio", "", figure_of("perplexity_ratio", figures.get("perplexity_ratio"))),
            ("KL (nats/token)", "", figure_of("kl", figures.get("kl"))),
            ("Top-1 agreement", "", "" if agreement is None else f"{agreement:.1%}"),
        )
        if after
    ]
    if not rows:
        return ""
    table = "\n".join(["## What quantization cost", "", "| | Before | After |", "|---|---:|---:|", *rows])
    if not figures:
        return table
    text = "calibration text that was held out" if figures.get("held_out") else "the text it was calibrated on"
    count = f"{figures['num_tokens']:,} tokens of " if "num_tokens" in figures else ""
    return f"{table}\n\nMeasured on {count}{text}."


def _usage(name: str, config: Mapping[str, Any], has_chat_template: bool) -> str:
    method = _quantization_method(config)
    needs = "pip install transformers" + (f" {METHOD_PACKAGES.get(method, method)}" if method else "")
    options = before = ""
    if method == "gptq":
        before = (
            f"vLLM and SGLang load the GPTQ format as it is: `vllm serve {name}`. transformers needs the packages "
            "below; `finetune generate` and `finetune evaluate` unpack the weights into floats and need none.\n\n"
        )
    if method == "gguf":
        file = config["quantization_config"]["gguf_file"]
        before = f"With llama.cpp: `llama-cli -m {file}`. With transformers, which unpacks it into floats:\n\n"
        options = f', gguf_file="{file}"'
    if has_chat_template:
        prepare = (
            'messages = [{"role": "user", "content": "..."}]\n'
            "inputs = tokenizer.apply_chat_template(\n"
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"\n'
            ")"
        )
    else:
        prepare = 'inputs = tokenizer("...", return_tensors="pt")'
    return (
        f"## Use\n\n{before}```sh\n{needs}\n```\n\n```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'name = "{name}"\n'
        "tokenizer = AutoTokenizer.from_pretrained(name)\n"
        f"model = AutoModelForCausalLM.from_pretrained(name{options})\n"
        f"{prepare}\n"
        "output = model.generate(**inputs, max_new_tokens=128)\n"
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))\n'
        "```"
    )


def _recipe(facts: CardFacts) -> str:
    if not facts.stages:
        return ""
    lines = ["## How it was made", ""]
    for number, stage in enumerate(facts.stages, start=1):
        kind, name = stage.get("kind"), stage.get("name")
        heading = f"{number}. **{name}**" + (f" ({kind})" if kind and kind != name else "")
        details = _stage_details(str(kind), stage.get("settings") or {}, stage.get("metrics") or {})
        lines.append(heading + (": " + "; ".join(details) if details else ""))
    return "\n".join(lines)


def _stage_details(kind: str, settings: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[str]:
    details = []
    sources = settings.get("data") or (settings.get("calibration") or {}).get("data") or []
    paths = [_file_name(source["path"]) for source in sources if isinstance(source, Mapping) and source.get("path")]
    if paths:
        details.append(("calibrated on " if kind == "quantize" else "data ") + ", ".join(paths))
    calibration = settings.get("calibration") or {}
    if kind == "quantize" and calibration.get("num_samples") and calibration.get("max_seq_length"):
        details.append(f"{calibration['num_samples']} samples of {calibration['max_seq_length']} tokens")
    keys = QUANTIZATION_SETTINGS if kind == "quantize" else TRAINING_SETTINGS if kind in TRAINING_KINDS else ()
    details += [f"{key} {_shorten(settings[key])}" for key in keys if settings.get(key) is not None]
    if kind == "quantize" and metrics.get("format"):
        details.append(f"stored as {metrics['format']}")
    if kind in TRAINING_KINDS:
        for key, value in metrics.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and re.search(r"loss|num_steps", key):
                details.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return details


def _file_name(path: str) -> str:
    """A file is named, not located: whoever reads the card has another disk."""
    return str(path).replace("\\", "/").rsplit("/", 1)[-1]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _shorten(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(str(item) for item in value[:5])
        return shown + (f" and {len(value) - 5} more" if len(value) > 5 else "")
    return str(value) if not isinstance(value, float) else json.dumps(value)
