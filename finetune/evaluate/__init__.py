"""Perplexity, KL to a reference, exact match by greedy generation, and the gate on them."""
