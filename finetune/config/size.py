"""Sizes as people write them."""

from __future__ import annotations

from pydantic import ByteSize, TypeAdapter, ValidationError

from finetune.errors import RecipeError

_BYTES = TypeAdapter(ByteSize)


def parse_size(text: str | int, *, where: str) -> int:
    """``5GB`` or ``80GiB`` or a number of bytes, as bytes. Raises RecipeError for anything else and for zero."""
    try:
        num_bytes = int(_BYTES.validate_python(text))
    except ValidationError:
        num_bytes = 0
    if num_bytes <= 0:
        raise RecipeError(f"`{text}` is not a size", where=where, fix="write it like 5GB, 500MB or 80GiB")
    return num_bytes
