"""A Llama whose buffers are part of its weight files, of the types that a cast or a partition would break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


class BufferedConfig(LlamaConfig):
    model_type = "buffered_llama_for_tests"


class BufferedLlama(LlamaForCausalLM):
    config_class = BufferedConfig

    def __init__(self, config: BufferedConfig) -> None:
        super().__init__(config)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("scale", torch.zeros(()))
        self.register_buffer("computed", torch.zeros(4), persistent=False)


BUFFERS = {
    "count": torch.tensor([2**62 + 1, -1]),
    "flags": torch.tensor([True, False, True]),
    "scale": torch.tensor(1.0 / 3),
}


def register_buffered() -> None:
    AutoConfig.register(BufferedConfig.model_type, BufferedConfig, exist_ok=True)
    AutoModelForCausalLM.register(BufferedConfig, BufferedLlama, exist_ok=True)


def odd_config(*, tied: bool, **changes: Any) -> BufferedConfig:
    """Sizes of which few divide by two: 15 x 97 embeddings, 25 x 15 projections, norms of 15."""
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 15,
        "intermediate_size": 25,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
    }
    return BufferedConfig(**{**sizes, **changes})


def odd_model(*, tied: bool, seed: int = 0) -> BufferedLlama:
    torch.manual_seed(seed)
    model = BufferedLlama(odd_config(tied=tied))
    for name, buffer in BUFFERS.items():
        getattr(model, name).copy_(buffer)
    return model


def odd_model_folder(folder: Path, *, tied: bool) -> Path:
    """A folder with the configuration alone, as a training script's base model has it."""
    odd_config(tied=tied).save_pretrained(folder)
    return folder
