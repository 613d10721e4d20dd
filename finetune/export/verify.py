"""Whether a model folder is whole and right: its files, its configuration, its tokenizer, and what it computes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import torch

from finetune.artifact import RECORD_NAME, FileRecord, check_files, read_manifest
from finetune.data.template import stop_token_ids
from finetune.errors import CheckpointError, ResourceError
from finetune.export.quantization_check import check_quantization
from finetune.export.weights import TensorHeader, check_finite, read_weights, tensors_equal
from finetune.files import sha256_file
from finetune.model.load import load_config, load_tokenizer, meta_model
from finetune.model.tied import tied_parameter_names

EDITABLE_FILES = {"README.md", ".gitattributes"}
"""Files that are meant to be changed after the export: a difference is a warning."""


def verify_folder(folder: Path, *, fresh_process: bool = True) -> dict[str, Any]:
    """Check a model folder and report what was found. Raises CheckpointError naming the file and its fault.

    In order: configuration; weight files (headers, index, every tensor once); no NaN; quantization_config against the
    tensors; tied weights; tokenizer and chat template; hashes against finetune.json or a manifest; then the folder is
    loaded with plain transformers, in a process of its own where ``fresh_process``, and its logits are
    compared with the probe.

    Returns {"folder", "num_tensors", "weights_bytes", "hashed_files" (how many), "quantization" (method or None),
    "chat_template" (whether there is one), "load" (of ``load_check.check_load``), "warnings"}.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError("there is no such folder", where=folder, fix="give a Hugging Face model folder")
    warnings: list[str] = []
    config = read_config(folder)
    tensors = read_weights(folder)
    hashed, changed = 0, None
    try:
        hashed = _check_hashes(folder, warnings)
    except CheckpointError as error:
        changed = error  # raised where no check below says more exactly what is wrong
    check_finite(folder, tensors)
    quantization = check_quantization(folder, config, tensors)
    num_rows = _check_embeddings(folder, tensors)
    has_template = _check_tokenizer(folder, num_rows, warnings)
    if changed is not None:
        raise changed
    load = load_in_fresh_process(folder) if fresh_process else _load_here(folder)
    if load["probe"] is None:
        warnings.append("no verification.json: the logits were only checked to be finite")
    if not hashed:
        warnings.append(f"no {RECORD_NAME} or manifest: a changed byte can't be told")
    return {
        "folder": str(folder),
        "num_tensors": len(tensors),
        "weights_bytes": sum((folder / file).stat().st_size for file in {header.file for header in tensors.values()}),
        "hashed_files": hashed,
        "quantization": quantization,
        "chat_template": has_template,
        "load": load,
        "warnings": warnings,
    }


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError("there is no config.json", where=folder, fix="give a Hugging Face model folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as cause:
        raise CheckpointError(f"it isn't JSON: {cause}", where=path, fix="copy or make it again") from cause
    if not isinstance(config, dict) or "model_type" not in config:
        raise CheckpointError("it names no model_type", where=path, fix="copy or make it again")
    return config


def _check_hashes(folder: Path, warnings: list[str]) -> int:
    """Compare files with the record of the export, or with the manifest of the stage; return how many were hashed."""
    record_path = folder / RECORD_NAME
    if record_path.is_file():
        try:
            files = json.loads(record_path.read_text(encoding="utf-8"))["files"]
            records = {name: FileRecord(mtime_ns=0, **entry) for name, entry in files.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise CheckpointError(
                f"the record can't be read: {cause}", where=record_path, fix="export again"
            ) from cause
        for name in sorted(EDITABLE_FILES & set(records)):
            path, record = folder / name, records.pop(name)
            if not path.is_file() or sha256_file(path) != record.sha256:
                warnings.append(f"{name} was changed after the export")
        check_files(folder, records, trust_mtime=False)
        return len(records)
    for root in (folder, folder.parent):
        manifest = read_manifest(root)
        if manifest is None:
            continue
        prefix = "" if root == folder else f"{folder.name}/"
        records = {name: record for name, record in manifest.files.items() if name.startswith(prefix)}
        check_files(root, records, trust_mtime=False)
        return len(records)
    return 0


def _check_embeddings(folder: Path, tensors: dict[str, TensorHeader]) -> int:
    """The rows of the input embedding. Raises CheckpointError for a tied weight that is stored twice and differs."""
    model = meta_model(folder)
    for alias, canonical in tied_parameter_names(model).items():
        if alias in tensors and canonical in tensors and not tensors_equal(folder, tensors, alias, canonical):
            raise CheckpointError(
                f"config.json ties {alias} to {canonical}, but the file holds two different tensors; "
                "one would be dropped at loading",
                where=folder / tensors[alias].file,
                fix='set `"tie_word_embeddings": false` if they are meant to differ, or make the model again',
            )
    return int(cast(torch.Tensor, model.get_input_embeddings().weight).shape[0])


def _check_tokenizer(folder: Path, num_rows: int, warnings: list[str]) -> bool:
    """Whether there is a chat template. Raises CheckpointError when tokenizer or template can't serve the model."""
    tokenizer = load_tokenizer(folder)
    largest = max(tokenizer.get_vocab().values())
    if largest >= num_rows:
        raise CheckpointError(
            f"the tokenizer's largest token id is {largest}, the embedding has {num_rows} rows",
            where=folder,
            fix="use the model's own tokenizer",
        )
    if not tokenizer.chat_template:
        warnings.append("no chat template: this model continues text, it can't be chatted with")
        return False
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello."}], tokenize=False, add_generation_prompt=True
        )
        stop_ids = set(stop_token_ids(tokenizer))
    except Exception as cause:  # jinja raises its own, the template may raise anything
        raise CheckpointError(
            f"the chat template doesn't render a user's message: {cause}", where=folder, fix="correct the chat template"
        ) from cause
    missing = sorted(stop_ids - set(generation_stops(folder)))
    if missing:
        tokens = ", ".join(tokenizer.convert_ids_to_tokens(missing))
        warnings.append(
            f"generation_config.json doesn't stop on {tokens}, which ends a turn (`finetune export` adds it)"
        )
    return True


def generation_stops(folder: Path) -> list[int]:
    """The token ids on which plain ``generate`` stops: those of generation_config.json, without one of config.json."""
    path = folder / "generation_config.json"
    if path.is_file():
        try:
            stops = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as cause:
            raise CheckpointError(f"it isn't a JSON object: {cause}", where=path, fix="make it again") from cause
    else:
        stops = getattr(load_config(folder), "eos_token_id", None)
    return [] if stops is None else list(stops) if isinstance(stops, list) else [int(stops)]


def _load_here(folder: Path) -> dict[str, Any]:
    from finetune.export.load_check import check_load

    return check_load(folder)


def load_in_fresh_process(folder: Path) -> dict[str, Any]:
    """The report of ``finetune.export.load_check``. Raises CheckpointError, or ResourceError when it was killed."""
    process = subprocess.run(
        [sys.executable, "-m", "finetune.export.load_check", str(folder)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TQDM_DISABLE": "1",
        },
    )
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        raise ResourceError(
            f"the process that loads the model was ended by {name}",
            where=folder,
            fix="SIGKILL often means: out of memory. Verify it on a machine that holds the model in float32",
        )
    try:
        report: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError) as cause:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckpointError(
            f"the model doesn't run in plain transformers: {last}", where=folder, fix="make the model again"
        ) from cause
    if "error" in report:
        raise CheckpointError(report["error"]["what"], where=report["error"]["where"], fix=report["error"]["fix"])
    return report
