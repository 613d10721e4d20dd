"""Calibration samples: rows of tokens joined to sequences of one length, none silently dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.options import ChatOptions
from finetune.data.tokens import prepare_dataset
from finetune.errors import DataError, RecipeError
from finetune.model.load import load_tokenizer
from finetune.quant.settings import CalibrationSettings

EVALUATION_TOKENS = 8192
"""What the figures of a report are taken on, at most: 14 s for a 135M model on two cores in use. Rounded to 4 bits its
KL is 0.355 on these, 0.352 on four times as many."""

NOTHING_MEASURED = (
    "without calibration text nothing is measured: --calibration FILE (in a recipe `calibration:`) gives perplexity, "
    "KL and top-1 agreement"
)


@dataclass(frozen=True)
class CalibrationSamples:
    input_ids: np.ndarray
    """int32 (N, S); every position holds a real token but those of the last row that ``mask`` leaves out."""
    mask: np.ndarray
    """bool (N, S); False where the last row is padded. Padding never enters a Hessian."""
    evaluation_ids: np.ndarray
    """int32 (E, S), whole rows, to take figures on: those behind the last sample, or, where the tokens don't reach
    that far (``held_out`` False), the last samples themselves."""
    held_out: bool
    counts: dict[str, int] = field(default_factory=dict)


def load_calibration(model_folder: Path, settings: CalibrationSettings, *, seed: int) -> CalibrationSamples:
    """Tokenize the data with the model's own tokenizer (and chat template), in an order drawn from ``seed``; taken from
    the token cache where they have been before.

    Raises DataError where the data holds no token.
    """
    dataset, _ = prepare_dataset(
        settings.data,
        tokenizer=load_tokenizer(model_folder),
        max_seq_length=None,
        overlong="split",
        train_on="all",
        # What is calibrated is what the model computes: text that a template has rendered before is read as it means.
        chat=ChatOptions(allow_control_tokens=True),
    )
    rows = [row.input_ids for row in dataset.rows]
    order = np.random.default_rng(seed).permutation(len(rows))
    samples = join_rows([rows[index] for index in order], settings.num_samples, settings.max_seq_length)
    return replace(samples, counts={**dataset.counts, **samples.counts})


def join_rows(rows: Sequence[np.ndarray], num_samples: int, length: int) -> CalibrationSamples:
    """Join int rows end to end and cut them to at most ``num_samples`` sequences of ``length`` tokens.

    Where the tokens run out, the last sequence is shorter and padded behind; a causal model's other positions don't
    see that. ``counts`` says how many rows and tokens there were, were used, and were left over after the last sample.
    """
    stream = np.concatenate([np.asarray(row, dtype=np.int32) for row in rows]) if len(rows) else np.empty(0, np.int32)
    if not stream.size:
        raise DataError("there is no token to calibrate on", fix="give `calibration.data` a file with text")
    used = stream[: num_samples * length]
    num_rows = -(-used.size // length)
    padded = np.zeros(num_rows * length, dtype=np.int32)
    padded[: used.size] = used
    mask = np.arange(num_rows * length) < used.size
    if num_rows == 1:
        padded, mask = padded[: used.size], mask[: used.size]
    input_ids, mask_NS = padded.reshape(num_rows, -1), mask.reshape(num_rows, -1)
    counts = {
        "calibration_rows": len(rows),
        "calibration_tokens": int(stream.size),
        "samples": num_rows,
        "samples_asked_for": num_samples,
        "tokens_asked_for": num_samples * length,
        "tokens_used": int(used.size),
        "tokens_left_over": int(stream.size - used.size),
    }
    wanted = max(1, EVALUATION_TOKENS // length)
    rest = stream[used.size :][: wanted * length]
    held_out = rest.size >= length
    evaluation_ids = rest[: rest.size // length * length].reshape(-1, length)
    if not held_out:
        evaluation_ids = input_ids[mask_NS.all(axis=1)][-wanted:]
    return CalibrationSamples(input_ids, mask_NS, evaluation_ids, held_out, counts)


def check_length(settings: CalibrationSettings, config: Any) -> None:
    """Raise RecipeError for sequences longer than the model can read."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and settings.max_seq_length > context:
        raise RecipeError(
            f"calibration samples of {settings.max_seq_length} tokens are longer than the model's context, {context}",
            where="calibration.max_seq_length",
            fix=f"set it to at most {context}",
        )


def notes_on(samples: CalibrationSamples) -> list[str]:
    """What a user should know of the text: that it gave fewer tokens than were asked for, or none to hold out."""
    counts, notes = samples.counts, []
    if counts["tokens_used"] < counts["tokens_asked_for"]:
        notes.append(
            f"the calibration text gives {counts['tokens_used']:,} tokens of the {counts['tokens_asked_for']:,} asked "
            f"for ({counts['samples']} samples, not {counts['samples_asked_for']}); all of them are used"
        )
    if not samples.held_out:
        notes.append("no calibration text is left over to measure on: the figures are taken on text calibrated on")
    return notes
