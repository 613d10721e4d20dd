"""Row formats, one a file: each turns a raw row into a Conversation or a Document, and registers itself here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finetune.config.registry import Registry
from finetune.errors import DataError


@dataclass(frozen=True)
class Conversation:
    """Chat messages in order, each a dict with ``role`` and ``content`` as a chat template takes them."""

    messages: list[dict[str, Any]]
    trained: tuple[int, ...]
    """Positions in ``messages`` of the assistant's turns that are learnt."""


@dataclass(frozen=True)
class Document:
    text: str


Example = Conversation | Document


@dataclass(frozen=True)
class RowFormat:
    required: tuple[str, ...]
    """Columns by which the format is recognised."""
    optional: tuple[str, ...]
    parse: Callable[[dict[str, Any], str], Example]
    """(row, ``file:line``) -> example. Raises DataError for a field that is missing, null or of the wrong type."""


FORMATS: Registry[RowFormat] = Registry("data format", package=__name__)


def recognise_format(row: dict[str, Any], place: str) -> str:
    """The name of the one format whose required columns ``row`` has. Raises DataError when none or several fit."""
    names = [name for name in FORMATS if set(FORMATS[name].required) <= row.keys()]
    if len(names) == 1:
        return names[0]
    columns = ", ".join(map(str, row)) or "none"
    known = "; ".join(f"{name} ({', '.join(FORMATS[name].required)})" for name in FORMATS)
    if names:
        raise DataError(
            f"the columns {columns} fit several formats: {', '.join(names)}",
            where=place,
            fix="say `format:` in the recipe",
        )
    raise DataError(
        f"no format is known by the columns {columns}", where=place, fix=f"formats and the columns they need: {known}"
    )


def text_field(row: dict[str, Any], name: str, place: str, *, of: str = "the row") -> str:
    """``row[name]``, a string. Raises DataError naming the field and its place otherwise."""
    if name not in row:
        raise DataError(f"{of} has no field `{name}`", where=place, fix=f"add `{name}`, or remove the row")
    value = row[name]
    if value is None:
        raise DataError(f"the field `{name}` of {of} is null", where=place, fix="fill it in, or remove the row")
    if not isinstance(value, str):
        raise DataError(
            f"the field `{name}` of {of} must be text, not {type(value).__name__}", where=place, fix="correct the row"
        )
    return value
