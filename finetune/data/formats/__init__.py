"""Row formats, one a file: each turns a raw row into an example of one of five kinds, and registers itself here."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finetune.config.registry import Registry
from finetune.errors import DataError


@dataclass(frozen=True)
class Conversation:
    """Chat messages in order, as ``finetune.data.chat`` leaves them: ``content`` is text, an assistant's turn may have
    ``reasoning_content`` (text) and ``tool_calls``."""

    messages: list[dict[str, Any]]
    trained: tuple[int, ...]
    """Positions in ``messages`` of the assistant's turns that are learnt."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that may be called, as a chat template takes them."""


@dataclass(frozen=True)
class Document:
    text: str


@dataclass(frozen=True)
class Completion:
    """A plain text and what goes on from it, which alone is learnt."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class TokenIds:
    """A row that was tokenized elsewhere."""

    input_ids: list[int]
    labels: list[int] | None
    """As long as ``input_ids``; -100 where the token at that place is not learnt. None: all are."""


@dataclass(frozen=True)
class Preference:
    """A conversation so far and two ways on, the first of which people preferred."""

    prompt: list[dict[str, Any]]
    chosen: list[dict[str, Any]]
    rejected: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


Example = Conversation | Document | Completion | TokenIds | Preference


@dataclass(frozen=True)
class RowFormat:
    required: tuple[str, ...]
    """Columns by which the format is recognised."""
    optional: tuple[str, ...]
    parse: Callable[[dict[str, Any], str], Example]
    """(row, ``file:line``) -> example. Raises DataError for a field that is missing, null or of the wrong type."""


FORMATS: Registry[RowFormat] = Registry("data format", package=__name__)


def recognise_format(row: dict[str, Any], place: str) -> str:
    """The name of the one format whose required columns ``row`` has. Raises DataError when none or several fit.

    Where several fit, one that takes up the columns of all others is meant: chosen and rejected ways on from
    ``conversations`` are preferences.
    """
    names = [name for name in FORMATS if set(FORMATS[name].required) <= row.keys()]
    if len(names) > 1:
        names = [name for name in names if all(_takes_up(name, other) for other in names)] or names
    if len(names) == 1:
        return names[0]
    shown = [f"`{str(column)[:40]}`" for column in row]
    columns = ", ".join(shown[:20]) + (", …" if len(shown) > 20 else "") if shown else "none"
    if names:
        raise DataError(
            f"the columns {columns} fit several formats: {', '.join(names)}",
            where=place,
            fix="say which one by `format:` in the recipe",
        )
    known = "; ".join(f"{name} ({', '.join(FORMATS[name].required)})" for name in FORMATS)
    raise DataError(
        f"no format is known by the columns {columns}",
        where=place,
        fix=f"{_nearly(row)}name the columns by `columns:`, as in {{question: user, answer: assistant}}; "
        f"formats and the columns they need: {known}",
    )


def _takes_up(name: str, other: str) -> bool:
    return set(FORMATS[other].required) <= {*FORMATS[name].required, *FORMATS[name].optional}


def _nearly(row: dict[str, Any]) -> str:
    """What a row that fits no format lacks of one, or the columns that are misspelt."""
    columns = [str(column) for column in row]
    for name in FORMATS:
        missing = [column for column in FORMATS[name].required if column not in row]
        close = {column: difflib.get_close_matches(column, columns, n=1, cutoff=0.75) for column in missing}
        if all(close.values()):
            meant = ", ".join(f"`{column}` by `{found[0]}`" for column, found in close.items())
            return f"did you mean {meant}? "
    for name in FORMATS:
        missing = [column for column in FORMATS[name].required if column not in row]
        if len(missing) < len(FORMATS[name].required):
            return f"for {name} the row lacks {', '.join(f'`{column}`' for column in missing)}; "
    return ""


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
