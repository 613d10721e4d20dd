"""Data sets with splits, as the datasets library loads them: from the Hugging Face Hub, or a folder laid out alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.data.readers import Row
from finetune.data.readers.arrow import BATCH_ROWS, rows_of_batches
from finetune.errors import DataError, HubError


def read_split(path: str, *, split: str, name: str | None, revision: str | None) -> Iterator[Row | DataError]:
    """The rows of one split, each with its place ``path[split]:row N``. Raises what ``load_split`` does."""
    rows = load_split(path, split=split, name=name, revision=revision)
    yield from rows_of_batches(rows.with_format("arrow").iter(BATCH_ROWS), f"{path}[{split}]")


def load_split(path: str, *, split: str, name: str | None, revision: str | None) -> Any:
    """One split as a ``datasets.Dataset``. What the Hub sends lies in the datasets library's cache, memory-mapped.

    Raises HubError where the Hub has no such data set or can't be reached, DataError for an unknown split or
    configuration and for a local folder that can't be read.
    """
    import datasets
    from datasets.exceptions import DatasetGenerationError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    where = f"{path}[{split}]"
    is_local = os.path.exists(path)
    try:
        if (Path(path) / "dataset_dict.json").is_file():  # saved by DatasetDict.save_to_disk
            splits = datasets.load_from_disk(path)
            if split not in splits:
                raise ValueError(f"Unknown split {split!r}. Should be one of {list(splits)}.")
            rows = splits[split]
        else:
            rows = datasets.load_dataset(path, name, split=split, revision=revision)
    except (ConnectionError, FileNotFoundError, HfHubHTTPError, HFValidationError) as cause:
        offline = datasets.config.HF_HUB_OFFLINE
        if is_local:
            raise DataError(
                f"the data set can't be loaded: {_told(cause)}", where=where, fix="correct the path"
            ) from cause
        raise HubError(
            "the data set isn't in the cache, and the Hub is switched off (HF_HUB_OFFLINE)"
            if offline
            else f"the Hub gave no such data set: {_told(cause)}",
            where=where,
            fix="unset HF_HUB_OFFLINE, or name a local file or folder without `split:`"
            if offline
            else "correct the id, log in with `hf auth login`, or try again when the Hub can be reached",
        ) from cause
    except (ValueError, DatasetGenerationError) as cause:
        raise DataError(
            f"the data set can't be loaded: {_told(cause)}", where=where, fix="correct `split:`, `name:` or the files"
        ) from cause
    if not len(rows):
        raise DataError("the split holds no rows", where=where, fix="take it out of the recipe")
    return rows


def split_fingerprint(path: str, *, split: str, name: str | None, revision: str | None) -> str:
    """What the datasets library calls this content of the split: another one for another commit of the data set."""
    return str(load_split(path, split=split, name=name, revision=revision)._fingerprint)


def local_files(path: str) -> list[str]:
    """All files of a local data set's folder; none for one of the Hub, whose id and revision are in the recipe."""
    if not os.path.isdir(path):
        return [path] if os.path.isfile(path) else []
    return [str(file) for file in sorted(Path(path).rglob("*")) if file.is_file()]


def _told(cause: Exception) -> str:
    """The first line of the library's message, of its own cause where it only says that something failed."""
    inner = cause.__cause__ if isinstance(cause.__cause__, Exception) else cause
    lines = str(inner).splitlines() or [type(inner).__name__]
    return lines[0][:300]
