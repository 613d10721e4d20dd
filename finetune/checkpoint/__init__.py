"""Sharded checkpoints: the commit protocol, exact resume, streaming consolidation to safetensors."""
