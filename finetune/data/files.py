"""Which files a recipe's ``path`` means: one file, a folder's, those that match a pattern, or all of a list."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from finetune.data.readers import COMPRESSIONS, READERS, kind_of
from finetune.errors import DataError

_HELD_OUT = re.compile(r"(^|[-_./])(test|valid|validation|val|dev|eval)([-_.]|$)")
_TRAIN = re.compile(r"(^|[-_./])train([-_.]|$)")


def find_data_files(path: str | Sequence[str]) -> list[str]:
    """The data files in the order they are read: a list's in its order, a folder's and a pattern's by name.

    A folder's own files count, not those of folders in it. Raises DataError where there is none, where one is named
    twice, and for a folder whose files aren't one data set: of several kinds, or both train and test.
    """
    names = [path] if isinstance(path, str) else list(path)
    files = [file for name in names for file in _files_of(name)]
    seen: set[str] = set()
    for file in files:
        real = os.path.realpath(file)
        if real in seen:
            raise DataError("the data file is named twice", where=file, fix="to use its rows more often, give a weight")
        seen.add(real)
    return files


def is_pattern(path: str) -> bool:
    return glob.has_magic(path) and not os.path.exists(path)


def _files_of(path: str) -> list[str]:
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        return _files_in(Path(path))
    if is_pattern(path):
        found = sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
        if not found:
            raise DataError("no file matches the pattern", where=path, fix="correct it, or make the files")
        return found
    fix = "correct the path (paths start at the current directory)"
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and kind_of(path) not in READERS:
        fix += "; for a data set of the Hugging Face Hub say its `split:` too"
    raise DataError("there is no such data file", where=path, fix=fix)


def _files_in(folder: Path) -> list[str]:
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        raise DataError(
            f"the folder holds a data set of several splits: {', '.join(splits)}",
            where=folder,
            fix=f"name one of them: path: {folder}/{splits[0]}",
        )
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():  # saved by datasets
        saved = json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
        return [str(folder / entry["filename"]) for entry in saved]
    files = [entry for entry in sorted(folder.iterdir()) if entry.is_file() and not entry.name.startswith((".", "_"))]
    files = [entry for entry in files if kind_of(entry.name) in READERS]
    if not files:
        below = any(entry.is_dir() and not entry.name.startswith(".") for entry in folder.iterdir())
        known = f"{', '.join(READERS)}, or those with {', '.join(COMPRESSIONS)}"
        raise DataError(
            "the folder holds no data files",
            where=folder,
            fix=f"name a folder in it, or a pattern: {folder}/**/*.parquet" if below else f"data files are {known}",
        )
    kinds = sorted({kind_of(entry.name) for entry in files})
    if len(kinds) > 1:
        raise DataError(
            f"the folder holds several kinds of data files: {', '.join(kinds)}",
            where=folder,
            fix=f"choose by a pattern: path: {folder}/*{kinds[0]}",
        )
    train = next((entry for entry in files if _TRAIN.search(entry.name.lower())), None)
    held_out = next((entry for entry in files if _HELD_OUT.search(entry.name.lower())), None)
    if train and held_out:
        raise DataError(
            f"the folder holds files to train and to test on: {train.name}, {held_out.name}",
            where=folder,
            fix=f"choose by a pattern: path: {folder}/train*{kinds[0]}",
        )
    return [str(entry) for entry in files]
