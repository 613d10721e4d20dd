"""What quantization costs the whole model, measured while it streams by: perplexity, KL divergence, top-1 agreement.

The same few sequences go through the unquantized blocks and, beside them, through the quantized ones of each variant.
Only their hidden states are kept, so memory doesn't grow with the model, and no model is loaded twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from finetune.quant.activations import exact_products
from finetune.quant.calibration import CalibrationSamples
from finetune.quant.decoder import StreamedDecoder
from finetune.quant.stream import Stream

EVALUATION_DTYPE = torch.bfloat16
"""Of the blocks' forwards, as in calibration: 2.5 times as fast as float32. Its own rounding is a KL of 0.001 nats: a
135M model with 8-bit weights has 0.0043, in float32 0.0032 (with 4-bit ones 0.355 and 0.356). Logits are float32, since
rounding them would add another 0.0004."""
POSITIONS_PER_CHUNK = 256
"""Positions whose logits exist at a time: 256 x 128k x 4 bytes = 128 MiB a variant."""


class EndToEnd:
    """The unquantized model and its quantized ``variants`` on one text, a block at a time.

    For every block in turn: ``advance_exact``, then ``advance`` of each variant; at the end ``figures``.
    """

    def __init__(self, decoder: StreamedDecoder, samples: CalibrationSamples, variants: Sequence[str]) -> None:
        self._decoder = decoder
        self._seconds = 0.0
        self._held_out = samples.held_out
        self._ids_ES = torch.from_numpy(samples.evaluation_ids).long()
        per_chunk = max(1, 2048 // self._ids_ES.shape[1])
        hidden, calls = decoder.embed(list(self._ids_ES.split(per_chunk)), dtype=EVALUATION_DTYPE)
        masks: list[Tensor | None] = [None] * len(hidden)
        self._exact = Stream(hidden, masks, calls, EVALUATION_DTYPE)
        # Streams replace their chunks and never write into them, so they may share the first.
        self._quantized = {name: Stream(list(hidden), masks, calls, EVALUATION_DTYPE) for name in variants}

    def advance_exact(self, index: int) -> None:
        """Through block ``index`` as it is in the source."""
        started = time.perf_counter()
        with self._decoder.block(index, self._decoder.load_block(index), dtype=EVALUATION_DTYPE) as block:
            self._exact.advance(block, index, self._decoder.device)
        self._seconds += time.perf_counter() - started

    def advance(self, variant: str, index: int, quantized_block: nn.Module) -> float:
        """Through a variant's block; returns how far its hidden states are from the exact ones behind the same block.

        That is the squared distance over the squared length, averaged over tokens. (A quotient of sums would be that
        of the first token alone, whose hidden state is a thousand times as long in many models.)
        """
        started = time.perf_counter()
        stream = self._quantized[variant]
        stream.advance(quantized_block, index, self._decoder.device)
        total, count = 0.0, 0
        for exact_BSD, hidden_BSD in zip(self._exact.hidden, stream.hidden, strict=True):
            exact_BSD = exact_BSD.float()
            error_BS = (hidden_BSD.float() - exact_BSD).square().sum(-1) / exact_BSD.square().sum(-1).clamp_min(1e-30)
            total += error_BS.sum().item()
            count += error_BS.numel()
        self._seconds += time.perf_counter() - started
        return total / count

    def figures(self) -> dict[str, dict[str, Any]]:
        """Of each variant: ``perplexity``, the ``unquantized_perplexity`` and their ratio, ``kl`` (unquantized ||
        quantized, nats a token), ``top1_agreement``; ``held_out`` says whether the text wasn't calibrated on,
        ``seconds`` what all of the measuring took."""
        started = time.perf_counter()
        sums = {name: _Sums() for name in self._quantized}
        exact_nll, num_tokens = 0.0, 0
        with self._decoder.head(dtype=torch.float32) as head:
            for chunk, row, positions, targets_C in self._spans():

                def log_probabilities(
                    stream: Stream, chunk: int = chunk, row: int = row, positions: slice = positions
                ) -> Tensor:
                    with exact_products(EVALUATION_DTYPE):
                        logits_1CV = head(stream.hidden[chunk][row : row + 1, positions])
                    return logits_1CV[0].log_softmax(dim=-1)

                exact_CV = log_probabilities(self._exact)
                exact_nll -= exact_CV.gather(1, targets_C.unsqueeze(1)).sum().item()
                num_tokens += len(targets_C)
                for name, stream in self._quantized.items():
                    sums[name].add(exact_CV, log_probabilities(stream), targets_C)
        unquantized = perplexity(exact_nll / num_tokens)
        self._seconds += time.perf_counter() - started
        return {
            name: {
                "held_out": self._held_out,
                "num_sequences": len(self._ids_ES),
                "num_tokens": num_tokens,
                "unquantized_perplexity": unquantized,
                "perplexity": perplexity(total.nll / num_tokens),
                "perplexity_ratio": perplexity(total.nll / num_tokens) / unquantized,
                # Rounding can make the sum of two equal models' KL a negative zero-and-a-bit.
                "kl": max(total.kl / num_tokens, 0.0),
                "top1_agreement": total.agreeing / num_tokens,
                "seconds": round(self._seconds, 2),
            }
            for name, total in sums.items()
        }

    def _spans(self) -> Iterator[tuple[int, int, slice, Tensor]]:
        """(chunk, row in it, positions, the tokens that those predict): all positions but each sequence's last."""
        ids_by_chunk = self._ids_ES.split([len(hidden_BSD) for hidden_BSD in self._exact.hidden])
        for chunk, ids_BS in enumerate(ids_by_chunk):
            for row, ids_S in enumerate(ids_BS):
                for start in range(0, len(ids_S) - 1, POSITIONS_PER_CHUNK):
                    targets_C = ids_S[start + 1 : start + 1 + POSITIONS_PER_CHUNK].to(self._decoder.device)
                    yield chunk, row, slice(start, start + len(targets_C)), targets_C


class _Sums:
    def __init__(self) -> None:
        self.nll, self.kl, self.agreeing = 0.0, 0.0, 0

    def add(self, exact_CV: Tensor, quantized_CV: Tensor, targets_C: Tensor) -> None:
        """Of log-probabilities."""
        self.nll -= quantized_CV.gather(1, targets_C.unsqueeze(1)).sum().item()
        self.kl += (exact_CV.exp() * (exact_CV - quantized_CV)).sum().item()
        self.agreeing += int((exact_CV.argmax(-1) == quantized_CV.argmax(-1)).sum())


def perplexity(mean_nats: float) -> float:
    """exp, but the largest float where a hopeless model's loss would overflow it."""
    return math.exp(min(mean_nats, 709.0))
