"""From a recipe's data section to examples: rows read, their format recognised, each parsed."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.data.formats import FORMATS, Example, recognise_format
from finetune.data.rows import read_rows
from finetune.data.settings import DatasetSettings
from finetune.errors import DataError


def read_examples(source: DatasetSettings) -> Iterator[tuple[Example | DataError, str]]:
    """Yield (example, ``file:line``) in file order, at most ``source.limit`` rows.

    A row that can't be used raises its DataError, or is yielded as that error where the source says to skip such rows.
    """
    name = source.format
    for count, row in enumerate(read_rows(source.path, separator=source.separator)):
        if source.limit is not None and count >= source.limit:
            return
        try:
            if isinstance(row, DataError):
                raise row
            name = name or recognise_format(row.value, row.place)
            example: Example | DataError = FORMATS[name].parse(row.value, row.place)
        except DataError as error:
            if source.invalid_rows == "error":
                raise
            yield error, str(error.where)
        else:
            assert not isinstance(row, DataError)
            yield example, row.place
