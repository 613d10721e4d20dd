"""A recipe's ``columns:``: what the columns of a file stand for, where their own names don't say it.

columns: {question: user, answer: assistant}              # roles of a chat of one question
columns: {instruction: user, context: user, response: assistant}   # two columns make up the question
columns: {body: text}                                      # a column of a known format, under another name
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.data.formats import FORMATS
from finetune.errors import DataError, did_you_mean

ROLE_COLUMNS = {"system": "system", "user": "question", "reasoning": "reasoning", "assistant": "answer"}
"""Roles to the columns of ``question_answer``."""
ROLES_FORMAT = "question_answer"


def check_columns(columns: Mapping[str, str]) -> None:
    """Raises ValueError for a meaning that isn't known, or meanings that don't go together."""
    known = {column for name in FORMATS for column in (*FORMATS[name].required, *FORMATS[name].optional)}
    for column, meaning in columns.items():
        if meaning not in known and meaning not in ROLE_COLUMNS:
            allowed = did_you_mean(meaning, {*known, *ROLE_COLUMNS})
            raise ValueError(f"the column `{column}` can't be read as `{meaning}`; {allowed}")
    meanings = list(columns.values())
    if are_roles(columns):
        others = [meaning for meaning in meanings if meaning not in ROLE_COLUMNS]
        if others:
            raise ValueError(f"roles and a column don't go together: `{others[0]}`; set roles alone, or columns alone")
        lacking = [role for role in ("user", "assistant") if role not in meanings]
        if lacking:
            raise ValueError(f"no column is the {lacking[0]}'s; set one to `{lacking[0]}`")
    elif len(set(meanings)) < len(meanings):
        raise ValueError("two columns are the same one of a format; set each to another")


def are_roles(columns: Mapping[str, str]) -> bool:
    return not {"user", "assistant"}.isdisjoint(columns.values())


def apply_columns(row: dict[str, Any], columns: Mapping[str, str], place: str) -> dict[str, Any]:
    """``row`` under the names of a format. Several columns of one role are joined by a blank line, empty ones left out.

    Raises DataError where a column is missing.
    """
    for column in columns:
        if column not in row:
            fix = f"correct `columns:`, or the row; {did_you_mean(column, map(str, row))}"
            raise DataError(f"the row has no column `{column}`, which `columns:` names", where=place, fix=fix)
    if not are_roles(columns):
        kept = {column: value for column, value in row.items() if column not in columns}
        return {**kept, **{meaning: row[column] for column, meaning in columns.items()}}
    values: dict[str, Any] = {}
    for role, name in ROLE_COLUMNS.items():
        found = {column: row[column] for column, meaning in columns.items() if meaning == role}
        for column, value in found.items():
            if not isinstance(value, str | None):
                what = f"the field `{column}` of the row must be text, not {type(value).__name__}"
                raise DataError(what, where=place, fix="correct the row")
        texts = [value for value in found.values() if value is not None]
        if role in ("user", "assistant") and not texts:
            what = f"the field `{next(iter(found))}` of the row is null"
            raise DataError(what, where=place, fix="fill it in, or remove the row")
        values[name] = texts[0] if len(texts) == 1 else "\n\n".join(filter(None, texts))
    return values
