"""One tiny random model of every decoder family that is known to quantize, for tests over all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny import tiny_tokenizer

_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_WINDOW = {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 4}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 16, "sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 16},
    "gemma2": {**_WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"pad_token_id": 0},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
    "olmo2": {},
    "gemma4_text": {**_WINDOW, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 376},
    "granite": {"residual_multiplier": 0.5},
    "smollm3": {"pad_token_id": 0, "no_rope_layer_interval": 2},
    "starcoder2": {"use_bias": True},
    "cohere": {"tie_word_embeddings": True},
    "gpt_neox": {"use_parallel_residual": True},
    "falcon": {"new_decoder_architecture": False, "parallel_attn": True, "bias": False},
    "bloom": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": True},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 96, "rotary_dim": 8},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 96},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
    },
    "deepseek_v3": {
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}
"""model_type → what its configuration says besides the sizes that all share."""

CONV1D = ("gpt2",)
OWN_LINEAR = ("falcon",)
"""Their layers are of a subclass of Linear."""
EXPERTS = ("mixtral", "qwen2_moe", "deepseek_v3", "qwen3_moe")


def tiny_model(
    family: str, folder: Path, *, dtype: str = "bfloat16", seed: int = 0, plain: bool = False, **extra: Any
) -> Path:
    """Write a random model of ``family`` with its tokenizer to ``folder``: no parameter is 0 or 1 throughout.

    ``plain``: its configuration holds ``extra`` alone, not the sizes of a Llama too.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    values = {**_LLAMA, "initializer_range": 0.1, **FAMILIES.get(family, {}), **extra}
    if plain:
        values = extra
    elif "n_embd" in values:
        values = {key: value for key, value in values.items() if key not in _LLAMA}
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **values)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                centre = 0.0 if name.endswith("bias") else parameter.float().mean().item()
                parameter.copy_(centre + 0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
