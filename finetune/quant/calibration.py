"""Calibration samples: rows of tokens joined to sequences of one length, none silently dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from finetune.data.tokens import tokenize_dataset
from finetune.errors import DataError
from finetune.model.load import load_tokenizer
from finetune.quant.settings import CalibrationSettings


@dataclass(frozen=True)
class CalibrationSamples:
    input_ids: np.ndarray
    """int32 (N, S); every position holds a real token but those of the last row that ``mask`` leaves out."""
    mask: np.ndarray
    """bool (N, S); False where the last row is padded. Padding never enters a Hessian."""
    counts: dict[str, int] = field(default_factory=dict)


def load_calibration(model_folder: Path, settings: CalibrationSettings, *, seed: int) -> CalibrationSamples:
    """Tokenize the data with the model's own tokenizer (and chat template), in an order drawn from ``seed``.

    Raises DataError where the data holds no token.
    """
    dataset = tokenize_dataset(
        settings.data,
        tokenizer=load_tokenizer(model_folder),
        max_seq_length=None,
        overlong="split",
        train_on="all",
        seed=seed,
    )
    rows = [row.input_ids for row in dataset.rows]
    order = np.random.default_rng(seed).permutation(len(rows))
    samples = join_rows([rows[index] for index in order], settings.num_samples, settings.max_seq_length)
    return CalibrationSamples(samples.input_ids, samples.mask, {**dataset.counts, **samples.counts})


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
    counts = {
        "calibration_rows": len(rows),
        "calibration_tokens": int(stream.size),
        "samples": num_rows,
        "samples_asked_for": num_samples,
        "tokens_used": int(used.size),
        "tokens_left_over": int(stream.size - used.size),
    }
    return CalibrationSamples(padded.reshape(num_rows, -1), mask.reshape(num_rows, -1), counts)
