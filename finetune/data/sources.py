"""From a recipe's data section to examples: rows read, their format recognised, each parsed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from finetune.data.columns import ROLES_FORMAT, apply_columns, are_roles
from finetune.data.files import find_data_files
from finetune.data.formats import FORMATS, Conversation, Example, Preference, recognise_format
from finetune.data.readers import Row
from finetune.data.rows import read_rows
from finetune.data.settings import DatasetSettings
from finetune.errors import DataError


def read_source(source: DatasetSettings) -> Iterator[Row | DataError]:
    """The rows of all files of a source, in order, under the columns' own names."""
    if source.split is not None:
        from finetune.data.hub import read_split

        yield from read_split(str(source.path), split=source.split, name=source.name, revision=source.revision)
        return
    for path in find_data_files(source.path):
        yield from read_rows(path, separator=source.separator)


def read_examples(
    source: DatasetSettings, parser: RowParser | None = None
) -> Iterator[tuple[Example | DataError, str]]:
    """Yield (example, ``file:line``) in file order, at most ``source.limit`` rows.

    A row that can't be used raises its DataError, or is yielded as that error where the source says to skip such rows.
    The first row that can be read decides the format of all; a ``parser`` that is given knows it afterwards.
    """
    parser = parser or RowParser(source)
    for row in islice(read_source(source), source.limit):
        try:
            if isinstance(row, DataError):
                raise row
            yield parser.parse(row), row.place
        except DataError as error:
            if source.invalid_rows == "error":
                error.fix = "; or ".join([*filter(None, [error.fix]), "skip and count such rows: `invalid_rows: skip`"])
                raise
            yield error, str(error.where)


class RowParser:
    """Rows of one source to examples, all in one format."""

    def __init__(self, source: DatasetSettings) -> None:
        self.columns = source.columns
        self.format = source.format
        if self.columns and are_roles(self.columns):
            self.format = ROLES_FORMAT
        self._use = source.use
        self._recognised_at: str | None = None

    def parse(self, row: Row) -> Example:
        value = apply_columns(row.value, self.columns, row.place) if self.columns else row.value
        if self.format is None:
            self.format, self._recognised_at = recognise_format(value, row.place), row.place
        row_format = FORMATS[self.format]
        try:
            example = row_format.parse(value, row.place)
        except DataError as error:
            if self._recognised_at and not set(row_format.required) <= value.keys():
                read_as = f"rows are read as `{self.format}`, by the columns of {self._recognised_at}"
                error.fix = f"{error.fix}; {read_as}"
            raise
        if self._use is None:
            return example
        if not isinstance(example, Preference):
            raise DataError(
                f"`use: {self._use}` is for rows of chosen and rejected answers, and this one is `{self.format}`",
                where=row.place,
                fix="take `use:` out of the recipe",
            )
        return learn_chosen(example)


def learn_chosen(example: Preference) -> Conversation:
    """The prompt and the chosen way on, of which the assistant's turns are learnt."""
    messages = [*example.prompt, *example.chosen]
    turns = range(len(example.prompt), len(messages))
    return Conversation(messages, tuple(i for i in turns if messages[i]["role"] == "assistant"), example.tools)
