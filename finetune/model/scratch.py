"""A randomly initialised model, written as a plain Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from finetune.errors import RecipeError, did_you_mean
from finetune.files import published_folder


def scratch_config(config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The configuration of a recipe's ``model.scratch.config``; vocabulary and special tokens are the tokenizer's.

    Raises RecipeError for an unknown model type, a key that this model type doesn't have, or sizes that don't fit.
    """
    values = dict(config)
    model_type = str(values.pop("model_type", "llama"))
    where = "model.scratch.config"
    if model_type not in CONFIG_MAPPING:
        raise RecipeError(
            f"unknown model type `{model_type}`", where=where, fix=did_you_mean(model_type, CONFIG_MAPPING.keys())
        )
    config_class: Callable[..., PreTrainedConfig] = CONFIG_MAPPING[model_type]
    known = config_class().to_dict()
    for key in values:
        if key not in known:
            raise RecipeError(f"a {model_type} has no `{key}`", where=where, fix=did_you_mean(key, known))
    for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        if key in values:
            raise RecipeError(f"`{key}` comes from the tokenizer", where=where, fix=f"remove `{key}`")
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise RecipeError(
            f"{heads} attention heads can't share {kv_heads} key/value heads",
            where=where,
            fix="num_attention_heads must be a multiple of num_key_value_heads",
        )
    try:
        return config_class(
            **values,
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    except (ValueError, TypeError, StrictDataclassError) as cause:
        raise RecipeError(f"transformers refuses the configuration: {cause}", where=where, fix="correct it") from cause


def create_model(config: dict[str, Any], tokenizer: PreTrainedTokenizerBase, *, seed: int, out: Path) -> Path:
    """Write a model with fresh weights, its tokenizer and generation config to folder ``out``, in float32.

    The weights depend on ``config``, the vocabulary's size and ``seed`` alone; the caller's random state is left as
    it was. Raises RecipeError as ``scratch_config`` does.
    """
    model_config = scratch_config(config, tokenizer)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    except (ValueError, RuntimeError, KeyError) as cause:
        raise RecipeError(
            f"no causal language model can be built from this configuration: {cause}",
            where="model.scratch.config",
            fix="correct the sizes or the model type",
        ) from cause
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    if not torch.cuda.is_available():
        # As it saves, transformers imports a DeepSpeed that is installed, which would warn that it found no GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with published_folder(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return out
