"""The probe: a few logits written beside a model when it is made, so that whoever loads it can tell if it is right.

``verification.json`` in a model folder holds token ids and, for each probed position, the 8 largest logits that the
maker of the model computed. A folder that loads without an error but with wrong weights (a lost scale, a quantized
tensor read as if it were not, a head that is no longer tied) gives other logits.

Models that quantize their activations (W8A8) need care. Rounding to int8 is discontinuous, so a difference of 1e-6
between two float32 kernels flips codes in every layer, and the logits move as far as quantization itself moves them.
Such a model's probe should be computed with its activations left in floats (``float_activations``), as is the check.

Differences are measured in units of the logits' spread (their standard deviation over the vocabulary), so that one
tolerance serves models of any scale.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.errors import CheckpointError
from finetune.files import write_json

PROBE_NAME = "verification.json"
PROBE_FORMAT = 1
NUM_TOP_LOGITS = 8
MAX_POSITIONS = 64
MIN_SPREAD = 1e-3
"""A floor for a model whose logits are all but equal, where every difference would be infinitely many spreads."""


@dataclass(frozen=True)
class Tolerance:
    """The largest differences that still count as the same model, in units of the logits' spread."""

    rms: float
    """Root mean square over all compared logits."""
    worst_position: float
    """Root mean square over the 8 logits of the position where it is largest."""


# Measured on a 135M Llama, 48 tokens, of random ids / of English text. Between two bfloat16 kernels (sdpa and eager
# attention; oneDNN on and off), or bfloat16 and float32, the RMS difference is up to 0.10 / 0.04 and the worst one's
# 0.30 / 0.12. That hides a down projection off by 10% (0.05 / 0.04) or one group of a value projection doubled (0.10 /
# 0.05), which a float32 probe tells: two float32 kernels differ by 4e-6. In bfloat16 only coarse faults show: a layer's
# output projection lost is 0.39 / 0.34, a down projection doubled 0.40 / 0.39, lost tensors 1 and more.
TOLERANCES = {
    torch.float32: Tolerance(rms=0.01, worst_position=0.03),
    torch.bfloat16: Tolerance(rms=0.25, worst_position=0.75),
    torch.float16: Tolerance(rms=0.05, worst_position=0.15),
}

# The 135M Llama as W8A8 with quantized activations: between float32 sdpa and eager attention 0.28 (worst one 0.89),
# between bfloat16 and float32 0.66 (2.31). That hides one layer's lost down projection (0.80). What shows: a permuted
# vocabulary (4.2), a lost quantization_status (9.9), untrained weights (9.8).
QUANTIZED_ACTIVATIONS = Tolerance(rms=1.0, worst_position=4.0)


@dataclass(frozen=True)
class Probe:
    input_ids: list[int]
    """T token ids, one document from its start."""
    dtype: str
    """The dtype the logits were computed in: ``float32``, ``bfloat16`` or ``float16``."""
    positions: list[int]
    """The P positions compared."""
    spreads: list[float]
    """(P,) standard deviation of each position's logits over the vocabulary."""
    token_ids: list[list[int]]
    """(P, 8) the tokens with the largest logits, largest first."""
    logits: list[list[float]]
    """(P, 8) their logits."""
    float_activations: bool = False
    """Whether activations were left in floats although the model's scheme quantizes them."""


def probe_input_ids(vocab_size: int, *, num_tokens: int = 32) -> list[int]:
    """Token ids for a probe where no text is at hand: spread over the vocabulary, the same on every machine."""
    # Knuth's multiplicative hash; the weights decide the logits of any ids, so these needn't be language.
    return [(2654435761 * (index + 1)) % 2**32 % vocab_size for index in range(num_tokens)]


def write_probe(
    folder: Path,
    input_ids: list[int],
    logits_TV: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    float_activations: bool = False,
) -> None:
    """Store the probe in ``folder``.

    ``dtype`` is what the model computed in, by default the dtype of ``logits_TV``; whoever checks the probe computes in
    it too. Prefer float32: see TOLERANCES for how much finer its check is. Raises CheckpointError for logits that
    aren't finite. ``float_activations`` says that a model whose scheme quantizes activations was run without that.
    """
    dtype = dtype or logits_TV.dtype
    assert logits_TV.shape[:-1] == (len(input_ids),), "one row of logits a token"
    assert dtype in TOLERANCES, f"no tolerance is known for {dtype}"
    num_tokens = len(input_ids)
    if num_tokens > MAX_POSITIONS:
        step = (num_tokens - 1) / (MAX_POSITIONS - 1)
        positions = [round(index * step) for index in range(MAX_POSITIONS)]
    else:
        positions = list(range(num_tokens))
    logits_PV = logits_TV.detach()[positions].float().cpu()
    if not torch.isfinite(logits_PV).all():
        raise CheckpointError(
            "the model's logits aren't finite", where=folder, fix="look for NaN in the weights it was made from"
        )
    top = logits_PV.topk(min(NUM_TOP_LOGITS, logits_PV.shape[1]), dim=-1)
    probe = Probe(
        input_ids=[int(token) for token in input_ids],
        dtype=str(dtype).removeprefix("torch."),
        positions=positions,
        spreads=logits_PV.std(dim=-1).tolist(),
        token_ids=top.indices.tolist(),
        logits=top.values.tolist(),
        float_activations=float_activations,
    )
    write_json(folder / PROBE_NAME, {"format": PROBE_FORMAT, **asdict(probe)})


def read_probe(folder: Path) -> Probe | None:
    """The folder's probe; None where it has none. Raises CheckpointError when it can't be read."""
    path = folder / PROBE_NAME
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.pop("format") != PROBE_FORMAT:
            raise ValueError("unknown format")
        probe = Probe(**raw)
        if probe.dtype not in {str(dtype).removeprefix("torch.") for dtype in TOLERANCES}:
            raise ValueError(f"unknown dtype {probe.dtype}")
        shape = torch.tensor(probe.logits).shape
        if not shape[0] or torch.tensor(probe.token_ids).shape != shape or len(probe.positions) != shape[0]:
            raise ValueError("its lists differ in length")
        return probe
    except (ValueError, KeyError, TypeError, IndexError) as cause:
        raise CheckpointError(
            f"the probe can't be read: {cause}", where=path, fix="make the model again, or delete this file"
        ) from cause


def check_probe(
    folder: Path, logits_TV: torch.Tensor, *, dtype: torch.dtype | None = None, quantized_activations: bool = False
) -> dict[str, Any]:
    """Compare ``logits_TV``, computed in ``dtype`` on the probe's ``input_ids``, with what ``folder``'s probe says.

    The coarser of the two dtypes (the probe's and this one) decides the tolerance; ``quantized_activations``, on either
    side, leaves only the coarsest. Returns max_abs_difference (in
    logits), rms_difference and worst_position_difference (in spreads), their tolerances, top1_agreement, ``agrees``.
    Raises CheckpointError where there is no probe or its ids don't fit the vocabulary.
    """
    probe = read_probe(folder)
    if probe is None:
        raise CheckpointError("there is no probe", where=folder / PROBE_NAME, fix="make the model again")
    logits_PV = logits_TV.detach()[probe.positions].float().cpu()
    expected_P8 = torch.tensor(probe.logits)
    token_ids_P8 = torch.tensor(probe.token_ids)
    if int(token_ids_P8.max()) >= logits_PV.shape[1]:
        raise CheckpointError(
            f"the probe names token {int(token_ids_P8.max())}, the model's vocabulary has {logits_PV.shape[1]}",
            where=folder / PROBE_NAME,
            fix="this probe belongs to another model: make the model again",
        )
    # Both what the named tokens got and what the largest logits are: damage to other tokens' rows shows in these alone.
    largest_P8 = logits_PV.topk(expected_P8.shape[1], dim=-1).values
    difference_P8 = torch.stack([logits_PV.gather(-1, token_ids_P8), largest_P8]) - expected_P8
    difference_P8 = difference_P8.gather(0, difference_P8.abs().argmax(0, keepdim=True))[0]
    spread = max(sum(probe.spreads) / len(probe.spreads), MIN_SPREAD)
    square_P = difference_P8.square().mean(dim=-1)
    rms = float(square_P.mean().sqrt()) / spread
    worst = float(square_P.max().sqrt()) / spread
    probe_dtype = getattr(torch, probe.dtype)
    tolerance = max(
        (TOLERANCES[probe_dtype], TOLERANCES[dtype or logits_TV.dtype]), key=lambda candidate: candidate.rms
    )
    if quantized_activations:
        tolerance = QUANTIZED_ACTIVATIONS
    return {
        "max_abs_difference": float(difference_P8.abs().max()),
        "rms_difference": rms,
        "rms_tolerance": tolerance.rms,
        "worst_position_difference": worst,
        "worst_position_tolerance": tolerance.worst_position,
        "top1_agreement": float((logits_PV.argmax(dim=-1) == token_ids_P8[:, 0]).float().mean()),
        # A NaN fails both comparisons.
        "agrees": rms <= tolerance.rms and worst <= tolerance.worst_position,
    }
