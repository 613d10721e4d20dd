"""Attention by document equals masked attention: outputs, gradients, and the loss of each model that uses it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from finetune.model.attention import attention_mask
from finetune.model.documents import MODEL_TYPES, NAME, DocumentLayout, can_attend_by_document, document_attention
from finetune.train.loss import CausalLMLoss
from tests.training import joined, packed_row

# Documents of one token, of just over and just under a multiple of 64; padding in the middle, at the end, and alone.
DOCUMENT_IDS = torch.tensor(
    [
        [0] * 65 + [1] * 1 + [-1] * 4 + [2] * 60,
        [0] * 130,
        [0] * 63 + [1] * 64 + [-1] * 3,
        [-1] * 130,
    ],
    dtype=torch.int32,
)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (4, 4), (3, 1)])
def test_outputs_and_gradients_equal_masked_attention(num_heads, num_kv_heads):
    torch.manual_seed(0)
    is_real = (DOCUMENT_IDS >= 0)[:, None, :, None]
    query, key, value = (
        torch.randn(4, 130, heads, 8).transpose(1, 2).requires_grad_()
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    weight = torch.randn(4, num_heads, 130, 8) * is_real
    ours = document_attention(query, key, value, layout=DocumentLayout(DOCUMENT_IDS), scaling=0.3)
    assert ours.equal(ours * is_real)
    mask = attention_mask(DOCUMENT_IDS, dtype=torch.float32, implementation="sdpa")
    theirs = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(ours, theirs * is_real, rtol=1e-5, atol=1e-6)
    got = torch.autograd.grad((ours * weight).sum(), (query, key, value))
    expected = torch.autograd.grad((theirs * weight).sum(), (query, key, value))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_loss_and_gradients_of_each_model_equal_eager_attention(model_type):
    config = CONFIG_MAPPING[model_type](
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.3,
    )
    rows = joined([packed_row([[5, 6, 7], [8, 9, 10, 11, 12]], length=10), packed_row([[9] * 3], length=10)])
    results = []
    for attention in ("eager", NAME):
        torch.manual_seed(0)
        module = CausalLMLoss(AutoModelForCausalLM.from_config(config, attn_implementation=attention))
        loss = module(**rows, denominator=8.0)
        results.append([loss, *torch.autograd.grad(loss, list(module.parameters()))])
        assert module(**rows, compare_logits=True).item() < 1e-5
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_only_models_and_devices_that_it_is_made_for():
    assert can_attend_by_document(LlamaConfig(), device="cpu", max_seq_length=1024)
    assert not can_attend_by_document(LlamaConfig(), device="cuda", max_seq_length=1024)
    assert not can_attend_by_document(LlamaConfig(), device="cpu", max_seq_length=2048)
    assert not can_attend_by_document(LlamaConfig(attention_dropout=0.1), device="cpu", max_seq_length=64)
    assert not can_attend_by_document(CONFIG_MAPPING["gemma2"](), device="cpu", max_seq_length=64)
