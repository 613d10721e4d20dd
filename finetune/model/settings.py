"""What a recipe says about the model it starts from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from finetune.config.section import Section


class TokenizerDataSettings(Section):
    path: str
    """A file of training text for the tokenizer."""
    format: str | None = None
    """Its row format; recognised by its columns where it is absent."""


class ScratchTokenizerSettings(Section):
    vocab_size: int = Field(4096, ge=260)
    """Entries of the vocabulary: 256 bytes, 3 special tokens, the rest learned merges."""
    data: list[TokenizerDataSettings] | None = None
    """Text to learn the merges from; the first training stage's data where it is absent."""
    chat_template: str | None = None
    """A file with a Jinja chat template; ChatML where it is absent."""


class ScratchSettings(Section):
    config: dict[str, Any] = Field(default_factory=dict)
    """The model's configuration as in its config.json: ``model_type`` (default llama), ``hidden_size``, and so on.
    Vocabulary size and special tokens come from the tokenizer."""
    tokenizer: ScratchTokenizerSettings = Field(default_factory=ScratchTokenizerSettings)


class ModelSettings(Section):
    path: str | None = None
    """A Hugging Face model folder, or an id on the Hub."""
    scratch: ScratchSettings | None = None
    """A randomly initialised model with a tokenizer of its own, instead of ``path``."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """The attention code that training and evaluation run."""

    @model_validator(mode="after")
    def _one_of_two(self) -> ModelSettings:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("give exactly one of `path` and `scratch`")
        return self
