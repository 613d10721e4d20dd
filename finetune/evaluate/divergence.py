"""How far a model's next-token distributions are from a reference's: mean KL divergence and top-1 agreement.

Both models see the same window; only two windows' logits exist at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from finetune.errors import RecipeError
from finetune.evaluate.perplexity import (
    POSITIONS_PER_CHUNK,
    negative_log_likelihood,
    to_perplexity,
    window_logits,
)
from finetune.evaluate.windows import window_batches


def divergence_sums(reference_NV: torch.Tensor, logits_NV: torch.Tensor) -> tuple[float, int]:
    """(sum over positions of KL(reference || model) in nats, number of positions with the same most likely token).

    Both (N, V) logits of any float dtype; computed in float32, a chunk of positions at a time.
    """
    kl, agreeing = 0.0, 0
    for start in range(0, len(logits_NV), POSITIONS_PER_CHUNK):
        reference_CV = reference_NV[start : start + POSITIONS_PER_CHUNK].float().log_softmax(dim=-1)
        model_CV = logits_NV[start : start + POSITIONS_PER_CHUNK].float().log_softmax(dim=-1)
        agreeing += int((reference_CV.argmax(dim=-1) == model_CV.argmax(dim=-1)).sum())
        kl += float((reference_CV.exp() * (reference_CV - model_CV)).sum())
    return kl, agreeing


@torch.inference_mode()
def divergence(reference: Any, model: Any, windows: Sequence[np.ndarray]) -> dict[str, float]:
    """``kl`` (nats a token), ``top1_agreement``, and of the same passes the model's ``perplexity`` and ``num_tokens``.

    Raises RecipeError when the two have vocabularies of different sizes, CheckpointError for logits that aren't finite.
    """
    total_kl, total_nll, agreeing, num_tokens = 0.0, 0.0, 0, 0
    batches = list(window_batches(windows))
    for batch in tqdm(batches, desc="perplexity and KL", unit="batch", disable=None):
        ids_BS = torch.from_numpy(batch).to(model.device)
        targets_N = ids_BS[:, 1:].reshape(-1)
        reference_NV = window_logits(reference, ids_BS)
        logits_NV = window_logits(model, ids_BS)
        if reference_NV.shape != logits_NV.shape:
            raise RecipeError(
                f"the reference has a vocabulary of {reference_NV.shape[1]}, the model one of {logits_NV.shape[1]}",
                where=model.config.name_or_path,
                fix="compare models of one tokenizer",
            )
        kl, agree = divergence_sums(reference_NV, logits_NV)
        total_kl += kl
        agreeing += agree
        total_nll += negative_log_likelihood(logits_NV, targets_N)
        num_tokens += targets_N.numel()
    return {
        "perplexity": to_perplexity(total_nll / num_tokens),
        "num_tokens": num_tokens,
        # Rounding can make the sum of two equal models' KL a negative zero-and-a-bit.
        "kl": max(total_kl / num_tokens, 0.0),
        "top1_agreement": agreeing / num_tokens,
    }
