"""``.parquet``, and ``.arrow`` as the datasets library saves it, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from finetune.data.readers import READERS, Row
from finetune.errors import DataError

BATCH_ROWS = 256
BUFFER_BYTES = 1 << 20


def read_parquet(path: str, separator: str | None) -> Iterator[Row | DataError]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    # Read in pages, through a buffer: by default a row group is held whole, and many files are one row group.
    try:
        with ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES) as file:
            yield from rows_of_batches(file.iter_batches(BATCH_ROWS), path)
    except (ArrowException, OSError) as cause:
        raise _broken(path, "Parquet", cause) from cause


def read_arrow(path: str, separator: str | None) -> Iterator[Row | DataError]:
    from pyarrow import ArrowException, ipc, memory_map

    try:
        with memory_map(path) as source:
            yield from rows_of_batches(_batches(ipc, source), path)
    except (ArrowException, OSError) as cause:
        raise _broken(path, "Arrow", cause) from cause


def _batches(ipc: Any, source: Any) -> Iterator[Any]:
    """Of the stream format, or the file format, which begins with ARROW1."""
    if source.read(6) == b"ARROW1":
        file = ipc.open_file(source)
        whole = (file.get_batch(index) for index in range(file.num_record_batches))
    else:
        source.seek(0)
        whole = ipc.open_stream(source)
    for batch in whole:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def rows_of_batches(batches: Iterator[Any], name: str) -> Iterator[Row | DataError]:
    """The rows of Arrow record batches or tables. ``name`` begins their places."""
    number = 0
    try:
        for batch in batches:
            for value in batch.to_pylist():
                number += 1
                yield Row({column: without_absent(cell) for column, cell in value.items()}, f"{name}:row {number}")
    except UnicodeDecodeError as cause:
        raise DataError(
            f"a text is not UTF-8 ({cause.reason})", where=f"{name}:row {number + 1} or later", fix="write it again"
        ) from cause


def without_absent(value: Any) -> Any:
    """``value`` without the null fields of objects inside it.

    All structs of an Arrow column have the same fields, so those that one of them lacked when it was written are null:
    a tool call would get the arguments of every other tool.
    """
    if isinstance(value, dict):
        return {key: without_absent(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_absent(item) if isinstance(item, dict | list) else item for item in value]
    return value


def _broken(path: str, kind: str, cause: Exception) -> DataError:
    return DataError(f"the file is not {kind}, or broken: {cause}", where=path, fix="write it again, or download it")


READERS.register(".parquet")(read_parquet)
READERS.register(".arrow")(read_arrow)
