"""GGUF, llama.cpp's file format: what a model is called in it, and how to open one.

A folder in this format holds ``model.gguf`` besides the configuration and tokenizer files of the model, and no
safetensors. Names and keys: llama.cpp's ``gguf`` package; each architecture below is proven by transformers' reader and
by llama.cpp itself (``tests/test_writer_gguf.py``).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from finetune.errors import CheckpointError, MissingDependencyError

GGUF_NAME = "model.gguf"


@dataclass(frozen=True)
class GgufArchitecture:
    name: str
    """llama.cpp's."""
    permutes_rotary: bool = False
    """Whether the rows of q_proj and k_proj are stored as pairs of neighbours instead of halves of a head."""
    norm_offset: float = 0.0
    """Added to every norm's weight: transformers' Gemma computes with 1 + weight, llama.cpp with what is stored."""


ARCHITECTURES = {
    "llama": GgufArchitecture("llama", permutes_rotary=True),
    "mistral": GgufArchitecture("llama", permutes_rotary=True),
    "qwen2": GgufArchitecture("qwen2"),
    "qwen3": GgufArchitecture("qwen3"),
    "gemma2": GgufArchitecture("gemma2", norm_offset=1.0),
    "gemma3_text": GgufArchitecture("gemma3", norm_offset=1.0),
    "gpt2": GgufArchitecture("gpt2"),
}
"""By transformers' ``model_type``."""


def gguf_package() -> Any:
    """The package. Raises MissingDependencyError where it isn't installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError as cause:
        raise MissingDependencyError(
            f"GGUF files need the package gguf: {cause}", fix="pip install 'gguf>=0.17'"
        ) from cause


def is_gguf_folder(folder: Path) -> bool:
    return (folder / GGUF_NAME).is_file() and not any(folder.glob("*.safetensors"))


def read_gguf(path: Path) -> Any:
    """The file as ``gguf.GGUFReader``: metadata and tensors, mapped, not loaded.

    Raises CheckpointError for a file that is no GGUF, is cut short, or has something behind its last tensor.
    """
    package = gguf_package()
    fix = "copy the file again, or quantize the model again"
    try:
        reader = package.GGUFReader(path)
        end = max((tensor.data_offset + tensor.n_bytes for tensor in reader.tensors), default=0)
    except Exception as cause:  # a damaged length sends the reader anywhere
        raise CheckpointError(
            f"the GGUF file can't be read, it is damaged or cut short: {type(cause).__name__}: {cause}",
            where=path,
            fix=fix,
        ) from cause
    size, padded = path.stat().st_size, end + -end % reader.alignment
    if not reader.tensors or not end <= size <= padded:
        what = "it holds no tensor" if not reader.tensors else f"it has {size} bytes, its tensors end at {end}"
        raise CheckpointError(f"the GGUF file is damaged: {what}", where=path, fix=fix)
    return reader


def loading_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration to load a GGUF folder with: its own, but Mistral's as the Llama that llama.cpp takes it for.

    transformers' GGUF reader knows no Mistral; the two compute alike where there is no sliding window.
    """
    if config.model_type != "mistral":
        return config
    from transformers import LlamaConfig

    values = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "sliding_window")}
    return LlamaConfig(**values)


def rope_of(config: PreTrainedConfig, layer_type: str = "full_attention") -> dict[str, Any]:
    """``rope_theta``, ``rope_type`` and what the type needs, of the layers that attend to everything."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return dict(rope.get(layer_type) or {}) if layer_type in rope or "rope_theta" not in rope else rope


def hyperparameters(config: PreTrainedConfig) -> dict[str, int | float | str]:
    """The file's metadata on the model's shape, by key without the architecture's name before it."""
    values: dict[str, int | float | str] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "vocab_size": config.vocab_size,
    }
    if config.model_type == "gpt2":
        return {
            **values,
            "feed_forward_length": config.n_inner or 4 * config.n_embd,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    rope = rope_of(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values |= {
        "feed_forward_length": config.intermediate_size,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope.get("rope_type") == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    window = getattr(config, "sliding_window", None)
    if config.model_type == "mistral" and window is not None:
        # llama.cpp attends to everything, which is the same up to the window's length.
        values["context_length"] = min(window, config.max_position_embeddings)
    if config.model_type in ("gemma2", "gemma3_text"):
        values["attention.sliding_window"] = int(config.sliding_window)
    if config.model_type == "gemma2":
        values |= {
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
        }
    return values


def unsupported(config: PreTrainedConfig) -> str | None:
    """What about this configuration llama.cpp would compute otherwise; None where nothing is."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        return f"the architecture {kind} isn't among those proven ({', '.join(ARCHITECTURES)})"
    wanted: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    if kind == "gpt2":
        wanted = {
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        }
    elif kind == "gemma2":
        wanted |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": config.head_dim,
            "layer_types": [_windowed(index % 2 == 0) for index in range(config.num_hidden_layers)],
        }
    elif kind == "gemma3_text":
        wanted |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": config.head_dim,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": [_windowed((index + 1) % 6 != 0) for index in range(config.num_hidden_layers)],
        }
    else:
        wanted["hidden_act"] = "silu"
    for key, value in wanted.items():
        found = getattr(config, key, value)
        if found != value:
            return f"`{key}` is {found}, llama.cpp computes with {value}"
    if kind == "gemma3_text" and (local := rope_of(config, "sliding_attention").get("rope_theta")) != 10000:
        return f"the `rope_theta` of layers with a window is {local}, llama.cpp computes with 10000"
    rope_type = rope_of(config).get("rope_type", "default")
    if rope_type not in ("default", "linear", *(("llama3",) if kind == "llama" else ())):
        return f"`rope_type` is {rope_type}"
    return None


def _windowed(windowed: bool) -> str:
    return "sliding_attention" if windowed else "full_attention"
