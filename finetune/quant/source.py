"""Read single tensors of a model folder's safetensors files, sharded or not, without opening the rest."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from finetune.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class SafetensorsSource:
    """The tensors of ``folder`` by name. Raises CheckpointError for a missing, cut or contradictory file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, str] = {}
        if (folder / INDEX_NAME).is_file():
            try:
                self._file_of = dict(json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as cause:
                raise CheckpointError(
                    "the index of the weight files can't be read", where=folder / INDEX_NAME, fix="fetch it again"
                ) from cause
        elif (folder / SINGLE_NAME).is_file():
            with self._open(SINGLE_NAME) as tensors:
                self._file_of = dict.fromkeys(tensors.keys(), SINGLE_NAME)
        else:
            raise CheckpointError(
                "there is no model.safetensors and no index of shards",
                where=folder,
                fix="convert the weights to safetensors (`save_pretrained` of transformers does)",
            )
        for name in self.files():
            if not (folder / name).is_file():
                raise CheckpointError("a weight file is missing", where=folder / name, fix="fetch it again")

    def _open(self, name: str) -> safe_open:
        try:
            return safe_open(self.folder / name, framework="pt", device="cpu")
        except (SafetensorError, OSError) as cause:
            raise CheckpointError(
                f"the weight file can't be read: {cause}", where=self.folder / name, fix="fetch it again"
            ) from cause

    def files(self) -> list[str]:
        return sorted(set(self._file_of.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        return list(self._file_of)

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies of the named tensors in memory; the files are closed again, so no mapped page stays behind."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of[name], []).append(name)
        loaded = {}
        for file, members in by_file.items():
            with self._open(file) as tensors:
                for name in members:
                    try:
                        loaded[name] = tensors.get_tensor(name).clone()
                    except SafetensorError as cause:
                        raise CheckpointError(
                            f"`{name}` isn't in the file that the index names: {cause}",
                            where=self.folder / file,
                            fix="fetch the model again",
                        ) from cause
        return loaded
