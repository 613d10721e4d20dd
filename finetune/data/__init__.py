"""Rows to batches: formats, the chat template's loss mask, tokens, packing, and the loader of one rank."""
