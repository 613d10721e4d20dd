"""Sharded state through DeepSpeed (an extra)."""
