"""The small files of a model folder that go with its weights: configuration, tokenizer, chat template."""

from __future__ import annotations

import shutil
from pathlib import Path

from finetune.errors import CheckpointError

MODEL_FILES = "model_files"

_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
_NOT_OF_THE_MODEL = {
    *("manifest.json", "verification.json", "quantization_report.json"),
    *("trainer_state.json", "zero_to_fp32.py"),
}
"""What our own stages leave in a model folder about that folder's weights, and transformers' Trainer and DeepSpeed in a
checkpoint's: it isn't true of the new weights."""
_FOLDERS = {"additional_chat_templates"}


def copy_model_files(source: Path, target: Path) -> list[str]:
    """Copy them from the model folder ``source`` to the new folder ``target``; return their relative names, sorted.

    Weights and their index stay behind. Raises CheckpointError when ``source`` has no config.json.
    """
    if not (source / "config.json").is_file():
        raise CheckpointError("there is no config.json", where=source, fix="give a Hugging Face model folder")
    names = []
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if len(relative.parts) > 1 and relative.parts[0] not in _FOLDERS:
            continue
        of_the_model = path.suffix in _SUFFIXES and not path.name.endswith(".index.json")
        if path.is_file() and of_the_model and path.name not in _NOT_OF_THE_MODEL:
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / relative)
            names.append(relative.as_posix())
    return names
