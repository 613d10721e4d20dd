"""What a recipe says about one data file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from finetune.config.section import Section
from finetune.data.formats import FORMATS
from finetune.errors import did_you_mean


class DatasetSettings(Section):
    path: str
    """A JSON, JSONL or txt file."""

    format: str | None = None
    """How a row is read: ``messages``, ``alpaca``, ``text``; by default recognised by the columns of the first row."""

    limit: int | None = Field(None, ge=1)
    """Use only this many rows, from the start of the file."""

    separator: str | None = Field(None, min_length=1)
    """txt files: what stands between two documents, for example "\\n\\n"; by default a file is one document."""

    invalid_rows: Literal["error", "skip"] = "error"
    """Stop at a row that can't be used, or skip and count it."""

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: str | None) -> str | None:
        if value is not None and value not in FORMATS:
            raise ValueError(f"unknown data format; {did_you_mean(value, FORMATS)}")
        return value
