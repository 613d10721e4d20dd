"""Hugging Face models: load, build from scratch, tokenizer, tied weights, attention mask, probe."""
