"""finetune: one recipe from data to a published, quantized causal language model."""

__version__ = "0.1.0"
