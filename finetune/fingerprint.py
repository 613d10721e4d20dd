"""What decides a stage's result, as one hash: its settings, its data's content and its parents' fingerprints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.artifact import read_manifest
from finetune.engine.settings import world_size
from finetune.files import sha256_file, sha256_json, write_json
from finetune.recipe import LoadedRecipe, Stage, data_files
from finetune.stages.base import BASE_MODEL

HASH_CACHE_NAME = ".hashes.json"


class Fingerprints:
    """Fingerprints of a recipe's stages. Hashes of files are kept by path, size and time in the run's folder."""

    def __init__(self, loaded: LoadedRecipe) -> None:
        self._loaded = loaded
        self._stages = {stage.name: stage for stage in loaded.stages}
        self._known: dict[str, str] = {}
        self._cache_path = loaded.run_dir / HASH_CACHE_NAME
        self._cache: dict[str, list[Any]] = {}
        if self._cache_path.is_file():
            try:
                self._cache = json.loads(self._cache_path.read_text(encoding="utf-8"))
            except ValueError:
                self._cache = {}  # a cache that can't be read is only slower

    def of(self, name: str) -> str:
        if name not in self._known:
            if name == BASE_MODEL:
                self._known[name] = self._base_model()
            else:
                stage = self._stages[name]
                parents = {parent: self.of(parent) for parent in parent_names(stage)}
                self._known[name] = sha256_json({"deciding": self.deciding(stage), "parents": parents})
        return self._known[name]

    def deciding(self, stage: Stage) -> dict[str, Any]:
        """Everything but the parents that decides the stage's result, as plain values to show and compare."""
        implementation, recipe = stage.implementation, self._loaded.recipe
        skipped = stage.settings.not_deciding
        value: dict[str, Any] = {
            "kind": stage.kind,
            "seed": recipe.seed,
            "settings": {key: value for key, value in stage.settings.resolved().items() if key not in skipped},
            "data": {name: self._hash(Path(name)) for name in data_files(self._loaded, stage)},
        }
        if implementation.run_rank is not None:
            # Neither `zero` nor the number of ranks: a training goes on, and gives the same, on other machines.
            value |= implementation.batch(stage.settings, world_size(recipe.launch))
            value["attn_implementation"] = recipe.model.attn_implementation
        if stage.input is None:
            value["scratch"] = recipe.model.resolved()["scratch"]
        return value

    def parents_content(self, stage: Stage) -> dict[str, str]:
        """Hashes of what the parents hold now; "" for one that isn't done."""
        contents = {}
        for name in parent_names(stage):
            if name == BASE_MODEL:
                contents[name] = self.of(BASE_MODEL)
                continue
            manifest = read_manifest(self._loaded.run_dir / self._stages[name].folder_name)
            files = {} if manifest is None else {path: record.sha256 for path, record in manifest.files.items()}
            # Timings and logs differ from one run to the next; the model is what a later stage reads.
            models = {path: digest for path, digest in files.items() if path.startswith("model/")}
            contents[name] = sha256_json(models or files) if manifest is not None else ""
        return contents

    def save(self) -> None:
        if self._loaded.run_dir.is_dir():
            write_json(self._cache_path, self._cache)

    def _base_model(self) -> str:
        path = self._loaded.recipe.model.path
        assert path is not None
        folder = Path(path)
        # A Hub id is its own fingerprint; a folder's is its content, since a retrained model keeps every size.
        return self._hash(folder) if folder.exists() else sha256_json({"hub": path})

    def _hash(self, path: Path) -> str:
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.is_file())
            return sha256_json({p.relative_to(path).as_posix(): self._hash(p) for p in files})
        if not path.exists():
            return ""
        stat, key = path.stat(), str(path.resolve())
        known = self._cache.get(key)
        if known is None or known[:2] != [stat.st_size, stat.st_mtime_ns]:
            known = [stat.st_size, stat.st_mtime_ns, sha256_file(path)]
            self._cache[key] = known
        return str(known[2])


def parent_names(stage: Stage) -> list[str]:
    return list(dict.fromkeys([*([stage.input] if stage.input else []), *stage.extra_inputs]))


def changes(before: Any, after: Any, prefix: str = "") -> tuple[str, ...]:
    """The differences of two plain values, one line each: ``settings.learning_rate: 0.001 → 0.0001``."""
    if isinstance(before, dict) and isinstance(after, dict):
        lines: list[str] = []
        for key in [*before, *(key for key in after if key not in before)]:
            lines += changes(before.get(key), after.get(key), f"{prefix}.{key}" if prefix else str(key))
        return tuple(lines)
    if before == after:
        return ()
    return (f"{prefix}: {_shown(before)} → {_shown(after)}",)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
