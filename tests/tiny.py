"""Tiny models and tokenizers, made in milliseconds, for every test that needs a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "a ship leaves the harbour at nine and comes back at noon",
    "user asks and assistant answers: 0 1 2 3 4 5 6 7 8 9",
    "What is the capital of France? It is Paris. Is it far? Yes, it is.",
]


def tiny_tokenizer(*, vocab_size: int = 384, chat_template: str | None = CHATML_TEMPLATE, **special: str) -> Any:
    """A byte-level BPE PreTrainedTokenizerFast with <|im_start|>, <|im_end|> (eos), <|endoftext|> (bos and pad).

    ``special`` overrides bos_token, eos_token, pad_token by name.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **special}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    fast.chat_template = chat_template
    return fast


def tiny_llama(
    folder: Path,
    *,
    tied: bool = True,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 128,
    seed: int = 0,
    dtype: str = "float32",
    tokenizer: Any = None,
) -> Path:
    """Write a randomly initialised Llama with its tokenizer to ``folder`` and return the folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizer or tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # A larger spread than the default 0.02, so that a wrong weight shows in the logits.
        initializer_range=0.1,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
