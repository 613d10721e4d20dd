"""The replicated engine in one process: masters, accumulation, AdamW, state; what the settings refuse."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.engine.adamw import AdamW
from finetune.engine.choice import choose_engine
from finetune.engine.protocol import AdamWSettings
from finetune.engine.settings import LaunchSettings, ZeroSettings
from finetune.errors import CheckpointError, RecipeError
from finetune.model.load import load_model
from finetune.train.loss import CausalLMLoss
from tests.tiny import tiny_llama
from tests.training import make_engine, random_row, whole_state


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"))


def test_small_updates_move_a_bfloat16_weight_of_one():
    """100 steps of 6e-6: each is far below bfloat16's spacing at 1.0 (2^-8 below it), together they aren't."""
    master = torch.ones(4)
    optimizer = AdamW([master], is_matrix=[False], settings=AdamWSettings())
    copy = master.bfloat16()
    for _ in range(100):
        optimizer.step([torch.full((4,), 0.5, dtype=torch.bfloat16)], learning_rate=6e-5, clip_coefficient=1.0)
        copy.copy_(master)
    assert master[0].item() == pytest.approx(1 - 100 * 6e-5, abs=1e-5)
    assert copy[0].item() < 1.0
    lost = torch.ones(4, dtype=torch.bfloat16)
    for _ in range(100):
        lost -= 6e-5
    assert lost[0].item() == 1.0


def test_engine_trains_float32_masters_under_bfloat16_compute(model):
    engine, _ = make_engine(model, dtype="bf16")
    name = "model.model.layers.0.input_layernorm.weight"
    for step in range(40):
        engine.forward_backward([random_row(step % 3, num_targets=9)], denominator=9)
        engine.clip_and_step(max_norm=1.0, learning_rate=1e-5)
    moved = engine.state()[name] - 1
    assert engine.state()[name].dtype == torch.float32
    # A weight of 1.0 that is stepped in bfloat16 can't move by less than 2^-8.
    assert 1e-5 < moved.abs().max().item() < 2**-8
    assert dict(engine.module.named_parameters())[name].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_equals_torchs_own_in_slices_of_any_size(dtype, monkeypatch):
    monkeypatch.setattr("finetune.engine.adamw.SLICE_ELEMENTS", 7)
    torch.manual_seed(0)
    shapes = [(5, 4), (3,), (2, 2), (0, 4), (6,)]
    masters = [torch.randn(shape) for shape in shapes]
    expected = [torch.nn.Parameter(master.clone()) for master in masters]
    settings = AdamWSettings(betas=(0.8, 0.9), epsilon=1e-6, weight_decay=0.3)
    ours = AdamW(masters, is_matrix=[len(shape) > 1 for shape in shapes], settings=settings)
    decayed, plain = [p for p in expected if p.ndim > 1 and p.numel()], [p for p in expected if p.ndim == 1]
    theirs = torch.optim.AdamW(
        [{"params": decayed}, {"params": plain, "weight_decay": 0.0}], betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3
    )
    for step in range(4):
        grads = [None if step == 2 and i == 4 else torch.randn(shape).to(dtype) for i, shape in enumerate(shapes)]
        for parameter, grad in zip(expected, grads, strict=True):
            parameter.grad = None if grad is None else grad.float() * 0.25
        for group in theirs.param_groups:
            group["lr"] = 0.01 * (step + 1)
        theirs.step()
        ours.step(
            [None if g is None else g.clone() for g in grads], learning_rate=0.01 * (step + 1), clip_coefficient=0.25
        )
    for master, parameter in list(zip(masters, expected, strict=True))[:4]:
        torch.testing.assert_close(master, parameter.data, rtol=1e-5, atol=1e-6)


def test_the_step_is_the_one_of_torchs_autograd_and_adamw(model):
    engine, _ = make_engine(model, weight_decay=0.1)
    reference = CausalLMLoss(load_model(model, dtype=torch.float32, device="cpu"))
    rows = [random_row(1, num_targets=3), random_row(2, num_targets=9)]
    sum(reference(**row, denominator=12.0) for row in rows).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    groups = [
        {"params": [p for p in reference.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in reference.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8).step()
    engine.forward_backward(rows, denominator=12)
    result = engine.clip_and_step(max_norm=0.5, learning_rate=1e-2)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    state = engine.state()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(state[name], parameter.data, rtol=1e-4, atol=2e-5)
    # The forward sees the stepped weights.
    row = random_row(3, num_targets=4)
    torch.testing.assert_close(engine.forward(row), reference(**row).detach(), rtol=1e-4, atol=1e-4)


def test_kept_bfloat16_gradients_give_the_numbers_of_those_added_in_float32(model):
    kept, _ = make_engine(model, dtype="bf16")
    added, _ = make_engine(model, dtype="bf16")
    row, nothing = random_row(1, num_targets=9), random_row(1, num_targets=0)
    for _ in range(2):
        kept.forward_backward([row], denominator=9)
        added.forward_backward([row, nothing], denominator=9)
        results = [engine.clip_and_step(max_norm=1.0, learning_rate=1e-3) for engine in (kept, added)]
        assert results[0] == results[1]
    for name, value in whole_state(kept).items():
        assert value.equal(whole_state(added)[name]), name


def test_a_step_that_is_not_finite_changes_nothing(model):
    engine, _ = make_engine(model)
    before = {name: value.clone() for name, value in engine.state().items()}
    engine.forward_backward([random_row(1, num_targets=9)], denominator=float("nan"))
    assert not engine.clip_and_step(max_norm=1.0, learning_rate=1.0).is_finite
    assert all(value.equal(before[name]) for name, value in engine.state().items())
    engine.forward_backward([random_row(1, num_targets=9)], denominator=9)
    assert engine.clip_and_step(max_norm=1.0, learning_rate=1e-3).is_finite


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_state_is_live_and_another_engine_goes_on_from_it(model, dtype):
    first, _ = make_engine(model, dtype=dtype)
    second, _ = make_engine(model, dtype=dtype)

    def step(engine, number):
        engine.forward_backward([random_row(number, num_targets=9)], denominator=9)
        return engine.clip_and_step(max_norm=1.0, learning_rate=1e-2)

    step(first, 1)
    for name, value in second.state().items():
        value.copy_(first.state()[name])
    second.state_loaded()
    assert step(first, 2) == step(second, 2)
    assert step(first, 3) == step(second, 3)
    assert all(value.equal(second.state()[name]) for name, value in first.state().items())


def test_state_names_each_tensor_once_and_no_computed_buffer(model):
    state = make_engine(model)[0].state()
    assert "model.model.embed_tokens.weight" in state
    assert not any("lm_head" in name or "inv_freq" in name for name in state)
    masters = [name for name in state if name.startswith("model.")]
    assert len(state) == 3 * len(masters) + 1


def test_weights_that_do_not_fit_are_named(tmp_path):
    folder = tiny_llama(tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    save_file({**weights, name: torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[3\]"):
        make_engine(folder)
    save_file({k: v for k, v in weights.items() if k != name}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"hold no model\.norm\.weight"):
        make_engine(folder)


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"stage": 2, "offload": {"parameters": "cpu", "optimizer": "cpu"}}, "needs `stage: 3`"),
        ({"stage": 1, "offload": {"optimizer": "nvme", "nvme_path": "x"}}, "nvme` needs `stage: 3`"),
        ({"stage": 2, "offload": {"optimizer": "cpu", "ratio": 0.5}}, "`offload.ratio` below 1 needs `stage: 3`"),
        ({"stage": 3, "offload": {"optimizer": "nvme"}}, "offload.nvme_path"),
        ({"stage": 3, "offload": {"ratio": 0.5}}, "`offload.ratio` below 1"),
        ({"stage": 3, "engine": "fsdp2", "offload": {"parameters": "cpu"}}, "not `offload.parameters` alone"),
        ({"stage": 3, "engine": "fsdp2", "offload": {"optimizer": "cpu", "ratio": 0.5}}, "all of the optimizer"),
        ({"stage": 0, "engine": "fsdp2"}, "needs `stage: 1` or more"),
    ],
)
def test_what_no_engine_can_do_is_refused_with_the_reason(zero, message):
    with pytest.raises(ValueError, match=message):
        ZeroSettings.model_validate(zero)


def test_the_choice_of_engine_says_why():
    offload = {"parameters": "cpu", "optimizer": "cpu"}
    for zero, world_size, device, expected in [
        ({"stage": 0}, 2, "cpu", "replicated"),
        ({"stage": 3}, 1, "cpu", "replicated"),
        ({"stage": 1}, 2, "cpu", "fsdp2"),
        ({"stage": 3, "offload": offload}, 1, "cuda", "fsdp2"),
        ({"stage": 3, "offload": offload}, 1, "cpu", "replicated"),
        ({"stage": 2, "engine": "fsdp2"}, 1, "cpu", "fsdp2"),
        ({"stage": 1, "offload": {"optimizer": "cpu"}}, 2, "cpu", "fsdp2"),
        ({"stage": 3, "offload": {"optimizer": "cpu"}}, 1, "cuda", "replicated"),
        ({"stage": 3, "offload": {"parameters": "cpu"}}, 2, "cuda", "deepspeed"),
        ({"stage": 3, "offload": {"optimizer": "cpu", "ratio": 0.3}}, 2, "cuda", "deepspeed"),
        ({"stage": 3, "offload": {"optimizer": "nvme", "nvme_path": "x"}}, 2, "cuda", "deepspeed"),
        ({"stage": 2, "engine": "deepspeed"}, 1, "cpu", "deepspeed"),
    ]:
        name, why = choose_engine(ZeroSettings.model_validate(zero), world_size=world_size, device=device)
        assert name == expected
        assert "zero." in why


def test_launch_defaults_and_a_gpu_that_is_not_there(monkeypatch):
    from finetune.engine.device import resolve_launch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_launch(LaunchSettings()).model_dump(exclude={"timeout_seconds"}) == {
        "num_processes": 1,
        "device": "cpu",
    }
    assert resolve_launch(LaunchSettings(num_processes=3)).num_processes == 3
    with pytest.raises(RecipeError, match="no usable GPU"):
        resolve_launch(LaunchSettings(device="cuda"))
