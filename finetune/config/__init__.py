"""Typed sections, the YAML loader that knows its line numbers, and the registry of kinds."""
