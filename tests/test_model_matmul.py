"""Products that round alike on any number of threads: bit for bit, forward and backward, alone and in a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
from transformers.pytorch_utils import Conv1D

from finetune.model.documents import NAME
from finetune.model.matmul import bmm, matmul, round_alike
from finetune.train.loss import CausalLMLoss


@pytest.fixture(autouse=True)
def _restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def on_threads(number, compute):
    torch.set_num_threads(number)
    result = compute()
    assert torch.get_num_threads() == number
    return result


def bfloat16(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# Shapes of SmolLM2-135M for which oneDNN's own product differs between one and two threads, sizes that don't divide,
# and sizes that are too small to be cut.
SHAPES = [(512, 1536, 576), (512, 576, 576), (2048, 576, 1536), (333, 100, 77), (1, 64, 64), (1025, 64, 10), (5, 3, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_the_same_on_any_number_of_threads(shape):
    rows, inner, columns = shape
    left, right = bfloat16(rows, inner), bfloat16(columns, inner, seed=1).T
    alone = on_threads(1, lambda: matmul(left, right))
    exact = left.double() @ right.double()
    assert (alone.double() - exact).abs().max() <= 2**-7 * exact.abs().max()
    for threads in (2, 3):
        assert torch.equal(on_threads(threads, lambda: matmul(left, right)), alone)


def test_a_large_right_hand_side_is_cut_by_columns():
    left, right = bfloat16(70, 8300), bfloat16(8300, 576, seed=1)
    alone = on_threads(1, lambda: matmul(left, right))
    exact = left.double() @ right.double()
    assert (alone.double() - exact).abs().max() <= 2**-7 * exact.abs().max()
    assert torch.equal(on_threads(2, lambda: matmul(left, right)), alone)


@pytest.mark.parametrize("number", [1, 2, 9, 36])
def test_many_small_products_are_the_same_on_any_number_of_threads(number):
    left, right = bfloat16(number, 192, 64), bfloat16(number, 64, 320, seed=1)
    alone = on_threads(1, lambda: bmm(left, right))
    exact = left.double() @ right.double()
    assert (alone.double() - exact).abs().max() <= 2**-7 * exact.abs().max()
    assert torch.equal(on_threads(2, lambda: bmm(left, right)), alone)


def test_float32_is_torchs_own_product():
    left, right = torch.randn(64, 32), torch.randn(32, 16)
    assert torch.equal(matmul(left, right), left @ right)
    assert torch.equal(bmm(left[None], right[None]), torch.bmm(left[None], right[None]))


@pytest.mark.parametrize("layer", [nn.Linear(48, 80), nn.Linear(48, 80, bias=False), Conv1D(80, 48)])
def test_a_layer_and_its_gradients_are_torchs(layer):
    layer = layer.bfloat16()
    input, seen = bfloat16(2, 96, 48), []
    for patched in (False, True):
        if patched:
            round_alike(layer)
        x = input.clone().requires_grad_()
        layer.zero_grad()
        out = layer(x)
        out.float().square().sum().backward()
        seen.append([out, x.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
    for ours, torchs in zip(seen[1], seen[0], strict=True):
        assert ours.shape == torchs.shape
        assert (ours.float() - torchs.float()).abs().max() <= 0.02 * torchs.float().abs().max()


def test_layer_norms_gradients_are_exact():
    layer = nn.LayerNorm(48).bfloat16()
    with torch.no_grad():
        layer.weight.add_(bfloat16(48))
    exact = nn.LayerNorm(48).double()
    exact.load_state_dict(layer.state_dict())
    round_alike(layer)
    input, weights, seen = bfloat16(2, 96, 48), bfloat16(2, 96, 48, seed=2), []
    for module in (layer, exact):
        x = input.clone().to(module.weight.dtype).requires_grad_()
        out = module(x)
        out.backward(weights.to(out.dtype))
        seen.append([out, x.grad, module.weight.grad, module.bias.grad])
    for ours, wanted in zip(*seen, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - wanted).abs().max() <= 2**-7 * wanted.abs().max()


CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=9000,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
    "gpt2": GPT2Config(
        vocab_size=500,
        bos_token_id=0,
        eos_token_id=0,
        n_embd=192,
        n_layer=1,
        n_head=3,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    ),
}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_models_loss_and_gradients_are_the_same_on_one_thread_and_on_two(name):
    torch.manual_seed(0)
    implementation = NAME if name == "llama" else "sdpa"
    config = CONFIGS[name]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=implementation)
    round_alike(model)
    loss_of = CausalLMLoss(model)
    input_ids = torch.randint(0, config.vocab_size, (1, 512))
    documents = torch.tensor([0] * 200 + [1] * 100 + [2] * 212)[None]
    positions = torch.cat([torch.arange(200), torch.arange(100), torch.arange(212)])[None]

    def compute():
        loss_of.zero_grad()
        loss = loss_of(input_ids, input_ids, positions, documents, denominator=512.0)
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    for one, two in zip(on_threads(1, compute), on_threads(2, compute), strict=True):
        assert torch.equal(one, two)
