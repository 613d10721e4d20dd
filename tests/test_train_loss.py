"""The chunked cross-entropy and the module around it: against torch's own on whole logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GPTJConfig, GraniteConfig

from finetune.errors import RecipeError
from finetune.model.load import load_model
from finetune.train.loss import CausalLMLoss, LogitTransform, chunked_cross_entropy
from tests.tiny import tiny_llama
from tests.training import joined, num_targets, packed_row, random_row

TRANSFORMS = [LogitTransform(), LogitTransform(scale=0.25), LogitTransform(softcap=3.0), LogitTransform(0.5, 2.0)]


def problem(dtype=torch.float32):
    torch.manual_seed(0)
    hidden_BSH = torch.randn(2, 7, 16, dtype=dtype, requires_grad=True)
    weight_VH = torch.randn(50, 16, dtype=dtype, requires_grad=True)
    targets_BS = torch.randint(0, 50, (2, 7))
    targets_BS[torch.rand(2, 7) < 0.4] = -100
    return hidden_BSH, weight_VH, targets_BS


@pytest.mark.parametrize("block_elements", [1, 150, 10**6])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_loss_and_gradients_equal_those_of_whole_logits(transform, block_elements):
    hidden, weight, targets = problem()
    loss = chunked_cross_entropy(
        hidden, weight, targets, denominator=5.0, transform=transform, block_elements=block_elements
    )
    grads = torch.autograd.grad(loss, (hidden, weight))
    logits = (hidden @ weight.T) * transform.scale
    if transform.softcap:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum") / 5.0
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for grad, wanted in zip(grads, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_scaled_by_what_comes_from_above():
    hidden, weight, targets = problem()
    plain = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets, denominator=1.0), weight)[0]
    tripled = torch.autograd.grad(3 * chunked_cross_entropy(hidden, weight, targets, denominator=1.0), weight)[0]
    torch.testing.assert_close(tripled, 3 * plain)


def test_the_parts_of_a_softmax_are_those_of_the_whole(monkeypatch):
    hidden, weight, targets = problem()
    whole = chunked_cross_entropy(hidden, weight, targets, denominator=1.0)
    monkeypatch.setattr("finetune.train.loss.SOFTMAX_ELEMENTS", 150)
    parts = chunked_cross_entropy(hidden, weight, targets, denominator=1.0)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(parts, weight), torch.autograd.grad(whole, weight))


def test_bfloat16_blocks_add_up_in_float32():
    hidden, weight, targets = problem(torch.bfloat16)
    one, many = (
        torch.autograd.grad(
            chunked_cross_entropy(hidden, weight, targets, denominator=4.0, block_elements=size), weight
        )[0]
        for size in (10**6, 50)
    )
    assert one.dtype == many.dtype == torch.bfloat16
    torch.testing.assert_close(one, many, rtol=2**-7, atol=2e-3)


def test_without_any_target_loss_and_gradients_are_zero():
    hidden, weight, targets = problem()
    loss = chunked_cross_entropy(hidden, weight, torch.full_like(targets, -100), denominator=3.0)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 0.0
    assert all(not grad.any() for grad in grads)


class LargestLogits(TorchDispatchMode):
    """Records the largest tensor whose last dimension is the vocabulary."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.num_elements = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.ndim and result.shape[-1] == self.vocabulary:
            self.num_elements = max(self.num_elements, result.numel())
        return result


def test_the_logits_are_never_whole():
    hidden = torch.randn(4, 32, 4, requires_grad=True)
    weight = torch.randn(501, 4, requires_grad=True)
    targets = torch.randint(0, 501, (4, 32))
    with LargestLogits(501) as recorded:
        chunked_cross_entropy(hidden, weight, targets, denominator=1.0, block_elements=501 * 8).backward()
    assert 0 < recorded.num_elements <= 501 * 8


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_loss_over_packed_documents_is_that_of_each_alone(tmp_path, attention):
    """Documents of 3 and 5 tokens, whose first tokens are nobody's targets, against transformers' own loss on each."""
    model = load_model(tiny_llama(tmp_path), dtype=torch.float32, device="cpu", attn_implementation=attention)
    documents = [[5, 6, 7], [8, 9, 10, 11, 12]]
    row = packed_row(documents, length=10)
    assert num_targets(row) == 2 + 4
    loss = CausalLMLoss(model)(**row, denominator=6.0)
    sums = [model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss * (len(ids) - 1) for ids in documents]
    torch.testing.assert_close(loss, sum(sums) / 6, rtol=1e-6, atol=1e-6)


def test_micro_batches_of_3_and_9_targets_equal_one_batch_of_12_and_a_mean_of_means_does_not(tmp_path):
    module = CausalLMLoss(load_model(tiny_llama(tmp_path), dtype=torch.float32, device="cpu"))
    few, many = random_row(1, num_targets=3), random_row(2, num_targets=9)

    def gradient(*losses):
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(sum(losses), list(module.parameters()))])

    whole = module(**joined([few, many]), denominator=12.0)
    parts = [module(**few, denominator=12.0), module(**many, denominator=12.0)]
    torch.testing.assert_close(sum(parts), whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        gradient(*parts), gradient(module(**joined([few, many]), denominator=12.0)), rtol=0, atol=1e-6
    )
    mean_of_means = (module(**few, denominator=3.0) + module(**many, denominator=9.0)) / 2
    assert abs((mean_of_means - whole).item()) > 1e-3


SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.5,
}


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0, query_pre_attn_scalar=8),
        GraniteConfig(**SMALL, logits_scaling=8.0),
        CohereConfig(**SMALL, logit_scale=0.0625),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_scale_or_cap_their_logits(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = [3, 4, 5, 6, 7, 8]
    row = packed_row([ids], length=6)
    module = CausalLMLoss(model)
    assert module.transform != LogitTransform()
    assert module(**row, compare_logits=True).item() < 1e-5
    expected = model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss
    torch.testing.assert_close(module(**row, denominator=5.0), expected, rtol=1e-5, atol=1e-6)
    module.transform = LogitTransform()
    assert module(**row, compare_logits=True).item() > 0.05


def test_a_head_with_a_bias_is_refused():
    config = GPTJConfig(vocab_size=40, n_embd=16, n_layer=1, n_head=2, rotary_dim=4, n_positions=32)
    with pytest.raises(RecipeError, match="isn't a matrix without bias"):
        CausalLMLoss(AutoModelForCausalLM.from_config(config))
