"""Write a folder ready for the Hub: weights, configuration, tokenizer, generation settings, model card, and what
quantization cost; no more."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune import __version__
from finetune.artifact import record_made_by, write_record
from finetune.data.template import stop_token_ids
from finetune.errors import CheckpointError, RecipeError
from finetune.export.model_card import GGUF_QUANTIZATION, CardFacts, model_card, quantize_stage
from finetune.export.verify import generation_stops, read_config, verify_folder
from finetune.export.weights import weight_files
from finetune.files import published_folder, require_free_bytes, write_json, write_text
from finetune.model.gguf import is_gguf_folder
from finetune.model.load import QUANTIZATION_PLOT, QUANTIZATION_REPORT, load_tokenizer
from finetune.model.probe import PROBE_NAME

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATE_FOLDER = "additional_chat_templates"
LICENSE_PATTERNS = ("LICENSE*", "NOTICE*", "USE_POLICY*")
"""Licences ask that they travel with the model."""


def export_model(
    model_folder: Path, *, out: Path, card: CardFacts, repo_id: str | None = None, verify: bool = True
) -> Path:
    """Copy a model folder to ``out``, ready for the Hub, verified in a fresh process before it appears there.

    generation_config.json is completed so that plain ``generate`` stops on the chat template's turn terminator and has
    a pad token. The report of a quantization goes along, and into the card. ``finetune.json`` holds size and sha256 of
    each file. Files are copied, not linked: a later change in ``out`` must not reach the stage that made the model.
    ``out`` may hold an earlier export, which is replaced at the end.

    Raises RecipeError for an ``out`` that holds anything else, CheckpointError for a model that is damaged or doesn't
    load, ResourceError when the disk is too full.
    """
    model_folder, out = Path(model_folder).resolve(), Path(out).resolve()
    _require_free_place(model_folder, out)
    config = read_config(model_folder)
    # Where a model was loaded from is nobody's business, and often a path of this machine.
    config.pop("_name_or_path", None)
    weights = weight_files(model_folder)
    require_free_bytes(out, sum((model_folder / name).stat().st_size for name in weights))
    tokenizer = load_tokenizer(model_folder)
    with published_folder(out) as folder:
        for name in [*weights, *_small_files(model_folder)]:
            shutil.copyfile(model_folder / name, folder / name)
        report = quantization_report(model_folder)
        if report is not None:
            write_json(folder / QUANTIZATION_REPORT, report)
            card = _with_quantization(card, report)
        if (model_folder / TEMPLATE_FOLDER).is_dir():
            shutil.copytree(model_folder / TEMPLATE_FOLDER, folder / TEMPLATE_FOLDER)
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", _generation_config(model_folder, tokenizer))
        described = {**config, "quantization_config": GGUF_QUANTIZATION} if is_gguf_folder(folder) else config
        text = model_card(card, config=described, has_chat_template=bool(tokenizer.chat_template), repo_id=repo_id)
        write_text(folder / "README.md", text)
        write_record(folder, made_by="export", version=__version__)
        if verify:
            _verify_copy(folder, model_folder)
    return out


def _verify_copy(folder: Path, model_folder: Path) -> None:
    """Errors name the model folder's file: the copy is gone when the user reads them."""
    try:
        verify_folder(folder)
    except CheckpointError as error:
        where = (error.where or "").replace(str(folder), str(model_folder))
        raise CheckpointError(error.what, where=where, fix=error.fix) from error


def _require_free_place(model_folder: Path, out: Path) -> None:
    if out == model_folder or out in model_folder.parents:
        raise RecipeError("the export would replace the model it is made from", where=out, fix="name another folder")
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and record_made_by(out) != "export"):
        raise RecipeError(
            "this exists and isn't an earlier export, so it isn't replaced", where=out, fix="name a new or empty folder"
        )


def _small_files(folder: Path) -> list[str]:
    """Tokenizer, template, probe and licence files that the folder has, and the picture of its quantization."""
    names = [name for name in (*TOKENIZER_FILES, PROBE_NAME, QUANTIZATION_PLOT) if (folder / name).is_file()]
    for pattern in LICENSE_PATTERNS:
        names += sorted(path.name for path in folder.glob(pattern) if path.is_file())
    return names


def quantization_report(folder: Path) -> dict[str, Any] | None:
    """What ``quantize`` has left in a folder, data files by their names alone; None where nothing can be read."""
    try:
        report: dict[str, Any] = json.loads((folder / QUANTIZATION_REPORT).read_text(encoding="utf-8"))
        calibration = (report.get("settings") or {}).get("calibration") or {}
        for source in calibration.get("data") or []:
            source["path"] = Path(source["path"]).name
        return report
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _with_quantization(card: CardFacts, report: dict[str, Any]) -> CardFacts:
    """The facts with the quantization that made this folder, where no stage of a recipe tells of it."""
    if "settings" not in report or any(stage.get("kind") == "quantize" for stage in card.stages):
        return card
    return replace(card, stages=[*card.stages, quantize_stage(report)])


def _generation_config(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """The model's own generation_config.json, with the tokens that end a reply as ``eos_token_id``, and a pad token."""
    path = folder / "generation_config.json"
    settings: dict[str, Any] = {}
    if path.is_file():
        settings = json.loads(path.read_text(encoding="utf-8"))
    settings.pop("_from_model_config", None)
    stops = list(dict.fromkeys([*stop_token_ids(tokenizer), *generation_stops(folder)]))
    if not stops:
        raise CheckpointError(
            "neither tokenizer nor generation_config.json names an end-of-sequence token, so no reply would end",
            where=folder,
            fix="set the tokenizer's eos_token",
        )
    settings["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    if settings.get("pad_token_id") is None:
        settings["pad_token_id"] = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0]
    if settings.get("bos_token_id") is None and tokenizer.bos_token_id is not None:
        settings["bos_token_id"] = tokenizer.bos_token_id
    return settings
