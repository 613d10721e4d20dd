"""What a recipe says about one source of data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from finetune.config.section import Section
from finetune.data.columns import ROLES_FORMAT, are_roles, check_columns
from finetune.data.files import find_data_files
from finetune.data.formats import FORMATS
from finetune.errors import DataError, did_you_mean


class DatasetSettings(Section):
    path: str | list[str] = Field(min_length=1)
    """A data file, a folder of them, a pattern such as ``data/**/*.parquet``, or a list of these. With ``split``, the
    id of a data set on the Hugging Face Hub, or a folder laid out like one. Files are JSON, JSONL, CSV, TSV, Parquet,
    Arrow or txt, the text ones also compressed (.gz, .bz2, .xz, .zst)."""

    split: str | None = None
    """The split of a data set that the datasets library loads: ``train``, or a part of one: ``train[:1000]``."""

    name: str | None = None
    """Which configuration of that data set, where it has several."""

    revision: str | None = None
    """The branch, tag or commit of that data set on the Hub."""

    format: str | None = None
    """How a row is read: ``messages``, ``sharegpt``, ``alpaca``, ``question_answer``, ``prompt_completion``, ``text``,
    ``tokens`` or ``preference``; by default recognised by the columns of the first row."""

    columns: dict[str, str] | None = None
    """What the file's columns stand for, where their own names don't say it: a role of a chat of one question
    (``{question: user, answer: assistant}``; also ``system``, ``reasoning``), or a column of a format
    (``{body: text}``)."""

    use: Literal["chosen"] | None = None
    """Rows of chosen and rejected answers: learn the chosen ones, as conversations."""

    weight: float = Field(1.0, gt=0)
    """How many times an epoch uses the rows: 2.0 twice, 0.5 half of them, drawn anew each epoch."""

    limit: int | None = Field(None, ge=1)
    """Use only this many rows, from the start."""

    separator: str | None = Field(None, min_length=1)
    """txt files: what stands between two documents, for example "\\n\\n"; by default a file is one document. CSV files:
    what stands between two columns, by default a comma."""

    invalid_rows: Literal["error", "skip"] = "error"
    """Stop at a row that can't be used, or skip and count it."""

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: str | None) -> str | None:
        if value is not None and value not in FORMATS:
            raise ValueError(f"unknown data format; {did_you_mean(value, FORMATS)}")
        return value

    @field_validator("columns")
    @classmethod
    def _known_meanings(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        if value is not None:
            check_columns(value)
        return value

    @model_validator(mode="after")
    def _keys_that_go_together(self) -> DatasetSettings:
        for key in ("name", "revision"):
            if getattr(self, key) is not None and self.split is None:
                raise ValueError(f"`{key}` is of a data set with splits; set `split:` too, for example `split: train`")
        if self.split is not None and not isinstance(self.path, str):
            raise ValueError("a data set with splits has one path; set several sources instead of a list")
        if self.columns and are_roles(self.columns) and self.format not in (None, ROLES_FORMAT):
            raise ValueError(f"`columns` gives roles, and `format` is `{self.format}`; set one of the two")
        return self

    @property
    def shown(self) -> str:
        """The source in one line, as errors and tables name it."""
        path = self.path if isinstance(self.path, str) else ", ".join(self.path)
        return f"{path}[{self.split}]" if self.split else path

    def data_files(self) -> list[str]:
        """The files whose content decides the rows; none for a data set of the Hub. What isn't there, or can't be read
        as one data set, stands in the list as the recipe names it."""
        if self.split is not None:
            from finetune.data.hub import local_files

            return local_files(str(self.path))
        try:
            return find_data_files(self.path)
        except DataError:
            return [self.path] if isinstance(self.path, str) else self.path
