"""The memory model against known parameter counts, against what autograd really keeps, and against a real step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.engine.activation_memory import LOSS_BLOCK_ELEMENTS, Attention, block_activation_bytes
from finetune.engine.memory import BASE_BYTES, Workload, predict_disk, predict_memory
from finetune.engine.memory_parts import ModelSize
from finetune.engine.settings import OffloadSettings, ZeroSettings
from finetune.model.load import meta_model
from finetune.train.loss import BLOCK_ELEMENTS

LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
OFFLOAD = OffloadSettings(optimizer="cpu", parameters="cpu")


def plan(config: dict[str, Any], **changes: Any) -> Any:
    defaults: dict[str, Any] = {
        "zero": ZeroSettings(),
        "world_size": 1,
        "micro_batch_size": 1,
        "max_seq_length": 512,
    }
    return predict_memory(LlamaConfig(**config), Workload(**{**defaults, **changes}))


def held(found: Any, name: str) -> int:
    return sum(item.num_bytes for item in found.items if item.name == name)


@pytest.mark.parametrize(
    ("config", "num_parameters"), [(LLAMA_3_8B, 8_030_261_248), (SMOLLM2_135M, 134_515_008)], ids=["8b", "135m"]
)
def test_parameters_are_counted_once(config: dict[str, Any], num_parameters: int) -> None:
    size = ModelSize.of(meta_model(LlamaConfig(**config)))
    assert size.total == num_parameters
    embeddings = config["vocab_size"] * config["hidden_size"]
    assert size.largest_parameter == embeddings
    assert size.outside == embeddings * (1 if config["tie_word_embeddings"] else 2) + config["hidden_size"]
    assert size.outside + config["num_hidden_layers"] * size.largest_block == size.total


def test_states_follow_the_stage() -> None:
    num = 8_030_261_248
    whole = plan(LLAMA_3_8B, device="cuda", world_size=8)
    assert (held(whole, "masters"), held(whole, "optimizer"), held(whole, "gradients")) == (4 * num, 8 * num, 4 * num)
    assert held(whole, "parameters") == 2 * num
    peaks = [whole.device_bytes]
    for stage in (1, 2, 3):
        sharded = plan(LLAMA_3_8B, device="cuda", world_size=8, zero=ZeroSettings(stage=stage))
        assert held(sharded, "masters") == num / 2
        assert held(sharded, "optimizer") == num
        peaks.append(sharded.device_bytes)
    # Without accumulation stage 1 keeps no more than stage 2.
    assert peaks[0] > peaks[1] == peaks[2] > peaks[3]
    several = {"device": "cuda", "world_size": 8, "gradient_accumulation_steps": 4}
    assert held(plan(LLAMA_3_8B, zero=ZeroSettings(stage=1), **several), "accumulation") == 4 * num
    assert held(plan(LLAMA_3_8B, zero=ZeroSettings(stage=2), **several), "accumulation") == 0


def test_offload_moves_the_states_to_the_host() -> None:
    found = plan(LLAMA_3_8B, device="cuda", world_size=8, zero=ZeroSettings(stage=3, offload=OFFLOAD))
    assert found.engine == "fsdp2"
    places = {item.name: item.place for item in found.items}
    assert places["masters"] == places["optimizer"] == places["gradients"] == "host"
    assert places["activations"] == places["gathered"] == "device"
    assert found.host_bytes == BASE_BYTES + 16 * 8_030_261_248 // 8
    on_cpu = plan(LLAMA_3_8B, device="cpu", world_size=8, zero=ZeroSettings(stage=3, offload=OFFLOAD))
    assert on_cpu.device_bytes == 0
    assert on_cpu.host_bytes > found.host_bytes


def test_gradients_of_one_micro_batch_stay_in_bfloat16() -> None:
    num = 134_515_008
    assert held(plan(SMOLLM2_135M), "gradients") == 2 * num
    assert held(plan(SMOLLM2_135M, gradient_accumulation_steps=2), "gradients") == 4 * num
    assert held(plan(SMOLLM2_135M, mixed_precision="fp32"), "gradients") == 4 * num
    assert held(plan(SMOLLM2_135M, mixed_precision="fp32"), "parameters") == 0


def test_checkpointing_saves_activations() -> None:
    whole, half, full = (plan(SMOLLM2_135M, checkpointed_every=every) for every in (None, 2, 1))
    a_layer = held(whole, "activations") // 30
    assert held(half, "activations") == 15 * a_layer
    assert held(half, "layer inputs") == 15 * 512 * 2 * 576
    assert held(full, "activations") == 0
    assert held(full, "layer inputs") == 30 * 512 * 2 * 576
    assert held(full, "one layer whole") == held(half, "one layer whole") == a_layer


def test_offloaded_activations_wait_on_the_host() -> None:
    kept, moved = (plan(SMOLLM2_135M, device="cuda", activation_offload=offloads) for offloads in (False, True))
    assert held(moved, "activations") == held(kept, "activations")
    saved = held(kept, "activations") - held(moved, "one layer whole")
    at = "backward starts"
    assert kept.held_bytes("device", at) - moved.held_bytes("device", at) == saved
    assert moved.host_bytes - kept.host_bytes == held(kept, "activations")
    assert plan(SMOLLM2_135M, activation_offload=True) == plan(SMOLLM2_135M)


def test_an_offloaded_optimizer_leaves_the_weights_alone_on_the_device() -> None:
    num = 8_030_261_248
    zero = ZeroSettings(stage=2, offload=OffloadSettings(optimizer="cpu"))
    found = plan(LLAMA_3_8B, device="cuda", world_size=8, zero=zero, gradient_accumulation_steps=2)
    assert found.engine == "fsdp2"
    assert found.host_bytes - BASE_BYTES == pytest.approx((4 + 8 + 2 + 4) * num / 8, rel=0.03)
    places = {item.name: item.place for item in found.items}
    assert places["masters"] == places["optimizer"] == places["staging"] == places["gradients"] == "host"
    assert places["parameters"] == "device"


def test_nvme_is_a_place_of_its_own() -> None:
    offload = OffloadSettings(optimizer="nvme", parameters="nvme", nvme_path="/fast")
    found = plan(LLAMA_3_8B, device="cuda", zero=ZeroSettings(stage=3, offload=offload))
    assert found.engine == "deepspeed"
    assert found.nvme_bytes == 14 * 8_030_261_248
    ratio = ZeroSettings(stage=3, offload=OffloadSettings(optimizer="cpu", ratio=0.25))
    assert held(plan(LLAMA_3_8B, device="cuda", zero=ratio), "kept optimizer") == 9 * 8_030_261_248


def test_the_loss_is_counted_in_the_blocks_that_training_takes() -> None:
    assert LOSS_BLOCK_ELEMENTS == BLOCK_ELEMENTS
    one, several = (plan(LLAMA_3_8B, device="cuda", micro_batch_size=size) for size in (1, 4))
    assert held(one, "logits") == 2 * 512 * 128256
    assert held(several, "logits") == 2 * 523 * 128256
    assert held(one, "head gradient's sum") == 0
    assert held(several, "head gradient's sum") == 4 * 128256 * 4096


def test_disk_holds_one_checkpoint_more_than_is_kept() -> None:
    disk = predict_disk(LlamaConfig(**SMOLLM2_135M), keep_checkpoints=2)
    assert disk.checkpoint_bytes == 12 * 134_515_008
    assert disk.total_bytes == 3 * 12 * 134_515_008 + 2 * 134_515_008


def kept_by_autograd(config: LlamaConfig, *, dtype: torch.dtype, masked: bool, batch: int, seq_length: int) -> int:
    """Bytes of all tensors that a forward of the blocks saves for the backward, parameters left out."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype).train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    mask = None
    if masked:
        allowed = torch.ones(batch, 1, seq_length, seq_length, dtype=torch.bool).tril()
        mask = allowed
        if config._attn_implementation == "eager":
            mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    input_ids = torch.randint(0, config.vocab_size, (batch, seq_length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.model(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state
        assert hidden.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("attention", "masked"), [("sdpa", False), ("sdpa", True), ("eager", True)])
def test_activations_are_what_autograd_keeps(dtype: torch.dtype, attention: str, masked: bool) -> None:
    batch, seq_length = 2, 48

    def config(num_layers: int) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation=attention,
        )

    kept = [
        kept_by_autograd(config(num_layers), dtype=dtype, masked=masked, batch=batch, seq_length=seq_length)
        for num_layers in (2, 3)
    ]
    kind: Attention = "eager" if attention == "eager" else "masked" if masked else "causal"
    predicted = block_activation_bytes(config(1), compute_bytes=dtype.itemsize, seq_length=seq_length, attention=kind)
    assert kept[1] - kept[0] == predicted * batch * seq_length
