"""Packed documents see themselves alone; models that the mask can't serve are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3NextConfig

from finetune.errors import RecipeError
from finetune.model.attention import attention_mask, require_exact_attention
from finetune.model.load import load_model
from tests.tiny import tiny_llama
from tests.training import packed_row

DOCUMENTS = [[5, 6, 7], [8, 9, 10, 11, 12]]


@pytest.mark.parametrize("with_ones", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_logits_equal_unpacked_logits(tmp_path, attention, with_ones):
    model = load_model(tiny_llama(tmp_path), dtype=torch.float32, device="cpu", attn_implementation=attention)
    row = packed_row(DOCUMENTS, length=11)
    mask = attention_mask(row["document_ids"], dtype=torch.float32, implementation=attention)
    packed = model(input_ids=row["input_ids"], attention_mask=mask, position_ids=row["position_ids"]).logits[0]
    assert torch.isfinite(packed).all()
    start = 0
    for ids in DOCUMENTS:
        alone = torch.tensor([ids])
        expected = model(input_ids=alone, attention_mask=torch.ones_like(alone) if with_ones else None).logits[0]
        torch.testing.assert_close(packed[start : start + len(ids)], expected, rtol=1e-4, atol=1e-5)
        start += len(ids)


def test_mask_allows_exactly_the_same_documents_past():
    ids = torch.tensor([[0, 0, 1, 1, -1]], dtype=torch.int32)
    mask = attention_mask(ids, dtype=torch.float32, implementation="sdpa")
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    assert mask[0, 0].int().tolist() == expected
    additive = attention_mask(ids, dtype=torch.bfloat16, implementation="eager")
    assert (additive == 0).equal(mask)
    assert torch.isfinite(additive).all()


def test_no_mask_is_needed_for_one_document_with_padding_behind_it():
    rows = torch.tensor([[0, 0, 0, -1], [0, 0, 0, 0]], dtype=torch.int32)
    assert attention_mask(rows, dtype=torch.float32, implementation="sdpa") is None
    padding_first = torch.tensor([[-1, 0, 0, 0]], dtype=torch.int32)
    assert attention_mask(padding_first, dtype=torch.float32, implementation="sdpa") is not None


def test_windows_shorter_than_a_row_and_recurrent_layers_are_refused():
    require_exact_attention(LlamaConfig(), max_seq_length=4096, packing=True)
    require_exact_attention(MistralConfig(sliding_window=64), max_seq_length=64, packing=True)
    require_exact_attention(Qwen2Config(use_sliding_window=False), max_seq_length=10**6, packing=True)
    with pytest.raises(RecipeError, match="sliding_window"):
        require_exact_attention(MistralConfig(sliding_window=64), max_seq_length=65, packing=False)
    recurrent = Qwen3NextConfig()
    with pytest.raises(RecipeError, match="leak"):
        require_exact_attention(recurrent, max_seq_length=64, packing=True)
    require_exact_attention(recurrent, max_seq_length=64, packing=False)
