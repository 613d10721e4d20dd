"""Sizes as people write them."""

from __future__ import annotations

from pydantic import ByteSize, TypeAdapter, ValidationError

from finetune.errors import RecipeError

_BYTES = TypeAdapter(ByteSize)


def parse_size(text: str | int, *, where: str, needs_unit: bool = False) -> int:
    """``5GB`` or ``80GiB`` as bytes, or a number of them unless it ``needs_unit``.

    Raises RecipeError for anything else and for zero.
    """
    try:
        num_bytes = int(_BYTES.validate_python(text))
        if needs_unit and not str(text).strip()[-1].isalpha():
            num_bytes = 0
    except (ValidationError, OverflowError, ValueError):
        num_bytes = 0
    if num_bytes <= 0:
        raise RecipeError(f"`{text}` is not a size", where=where, fix="write it like 5GB, 500MB or 80GiB")
    return num_bytes
