"""Perplexity: exp of the mean negative log-likelihood of every token but each window's first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from finetune.errors import CheckpointError
from finetune.evaluate.windows import window_batches

POSITIONS_PER_CHUNK = 256
"""Positions whose logits stand in float32 at a time: 256 x 128k x 4 bytes = 128 MiB."""


def negative_log_likelihood(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> float:
    """The sum of -log p(target) in nats, in float32, a chunk of positions at a time; NaN when a logit is NaN.

    ``logits_NV`` (N, V) of any float dtype, ``targets_N`` (N,) int64.
    """
    total = 0.0
    for start in range(0, len(targets_N), POSITIONS_PER_CHUNK):
        chunk = slice(start, start + POSITIONS_PER_CHUNK)
        total += float(torch.nn.functional.cross_entropy(logits_NV[chunk].float(), targets_N[chunk], reduction="sum"))
    return total


def window_logits(model: Any, ids_BS: torch.Tensor) -> torch.Tensor:
    """(B * (S-1), V) logits, in the model's dtype, of the positions that predict a window's tokens but its first.

    Raises CheckpointError when one isn't finite.
    """
    logits_BSV: torch.Tensor = model(input_ids=ids_BS, use_cache=False).logits[:, :-1]
    require_finite(model, logits_BSV)
    return logits_BSV.reshape(-1, logits_BSV.shape[-1])


def require_finite(model: Any, logits: torch.Tensor) -> None:
    """A sum is finite only when all its terms are, and needs no array of their flags."""
    if not torch.isfinite(logits.sum(dtype=torch.float32)):
        raise CheckpointError(
            "the model's logits aren't finite (NaN or infinity), so it has no figures",
            where=model.config.name_or_path or type(model).__name__,
            fix="verify this folder (`finetune verify`) and the stage that made it",
        )


@torch.inference_mode()
def perplexity(model: Any, windows: Sequence[np.ndarray]) -> dict[str, float]:
    """``perplexity`` of a causal LM over ``windows`` (see ``text_windows``) and ``num_tokens``, the number scored."""
    total, num_tokens = 0.0, 0
    batches = list(window_batches(windows))
    for batch in tqdm(batches, desc="perplexity", unit="batch", disable=None):
        ids_BS = torch.from_numpy(batch).to(model.device)
        targets_N = ids_BS[:, 1:].reshape(-1)
        total += negative_log_likelihood(window_logits(model, ids_BS), targets_N)
        num_tokens += targets_N.numel()
    return {"perplexity": to_perplexity(total / num_tokens), "num_tokens": num_tokens}


def to_perplexity(mean_nats: float) -> float:
    """exp, but the largest float where a hopeless model's loss (above 709 nats) would overflow it."""
    return math.exp(min(mean_nats, 709.0))
