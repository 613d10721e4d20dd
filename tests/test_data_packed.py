"""Rows packed together train as rows apart: the same summed loss and the same gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from finetune.data.dataset import TokenDataset, TokenRow
from finetune.data.loader import Batch, StepLoader
from finetune.model import documents
from finetune.model.load import load_model
from finetune.train.loss import CausalLMLoss
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def dataset() -> TokenDataset:
    """Forty conversations of 2 to 60 tokens: about half of the tokens are targets, in one to three runs."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(40):
        length = int(random.integers(2, 61))
        mask = np.repeat(random.integers(0, 2, -(-length // 7)).astype(np.bool_), 7)[:length]
        mask[0], mask[-1] = False, True
        rows.append(TokenRow(random.integers(3, 300, length).astype(np.int32), mask))
    return TokenDataset(rows, {})


def epoch(dataset: TokenDataset, *, packing: bool) -> list[Batch]:
    loader = StepLoader(
        dataset,
        packing=packing,
        max_seq_length=128,
        micro_batch_size=3,
        gradient_accumulation_steps=2,
        world_size=1,
        rank=0,
        seed=0,
        epochs=1,
        max_steps=None,
        pad_token_id=0,
    )
    return [batch for step in range(loader.num_steps) for batch in loader.batches(step)]


@pytest.mark.parametrize("attention", ["eager", "sdpa", documents.NAME])
def test_packed_training_equals_unpacked(tmp_path: Path, dataset: TokenDataset, attention: str) -> None:
    model = load_model(tiny_llama(tmp_path), dtype=torch.float32, device="cpu", attn_implementation=attention)
    module = CausalLMLoss(model)
    targets = float(dataset.supervised.sum())
    results = []
    for packing in (True, False):
        batches = epoch(dataset, packing=packing)
        assert sum(batch.num_supervised_tokens for batch in batches) == targets
        module.zero_grad()
        total = 0.0
        for batch in batches:
            loss = module(
                input_ids=batch.input_ids,
                targets=batch.targets,
                position_ids=batch.position_ids,
                document_ids=batch.document_ids,
                denominator=targets,
            )
            loss.backward()
            total += float(loss.detach().double())
        gradients = {name: value.grad.clone() for name, value in module.named_parameters() if value.grad is not None}
        results.append((total, gradients, [batch.document_ids.max().item() for batch in batches]))
    (packed, packed_gradients, depth), (apart, gradients, alone) = results
    assert max(depth) >= 3, "several documents share a row"
    assert max(alone) == 0
    assert packed == pytest.approx(apart, rel=1e-5)
    assert packed_gradients.keys() == gradients.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(packed_gradients[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()))
