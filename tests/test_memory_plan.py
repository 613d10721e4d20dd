"""The memory model against known parameter counts, against what autograd really keeps, and against a real step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.engine.memory import (
    BASE_BYTES,
    ModelSize,
    block_activation_bytes,
    format_disk,
    format_plan,
    predict_disk,
    predict_memory,
)
from finetune.engine.settings import OffloadSettings, ZeroSettings
from finetune.model.load import meta_model
from tests.tiny import tiny_llama

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
    return predict_memory(LlamaConfig(**config), **{**defaults, **changes})


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
    assert held(whole, "compute copy") == 2 * num
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
    assert held(plan(SMOLLM2_135M, mixed_precision="fp32"), "compute copy") == 0


def test_checkpointing_saves_activations() -> None:
    full, saved = (plan(SMOLLM2_135M, checkpointed_every=every) for every in (None, 1))
    assert held(saved, "activations") < held(full, "activations") / 10


def test_disk_holds_one_checkpoint_more_than_is_kept() -> None:
    disk = predict_disk(LlamaConfig(**SMOLLM2_135M), keep_checkpoints=2)
    assert disk.checkpoint_bytes == 12 * 134_515_008
    assert disk.total_bytes == 3 * 12 * 134_515_008 + 2 * 134_515_008
    assert "3 checkpoints x 1.50 GiB + model 256.6 MiB" in format_disk(disk)


def test_the_plan_is_shown_with_its_peaks() -> None:
    text = format_plan(plan(LLAMA_3_8B, device="cuda", world_size=8, zero=ZeroSettings(stage=3, offload=OFFLOAD)))
    assert "8,030.3M parameters, fsdp2" in text
    assert [line.split()[-1] for line in text.splitlines() if "peak" in line] == ["device", "host"]


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
    predicted = block_activation_bytes(
        config(1), compute_bytes=dtype.itemsize, seq_length=seq_length, attn_implementation=attention, masked=masked
    )
    assert kept[1] - kept[0] == predicted * batch * seq_length


_STEP = """
import sys, threading, time
from pathlib import Path
import torch
from finetune.engine.build import build_engine
from finetune.engine.protocol import AdamWSettings
from finetune.engine.settings import ZeroSettings
from finetune.model.load import meta_model
from finetune.train.loss import CausalLMLoss

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def peak_of_step(folder, batch, seq_length):
    model = meta_model(folder)
    engine, _ = build_engine(
        CausalLMLoss(model), model, folder, zero=ZeroSettings(), device="cpu", compute_dtype=torch.bfloat16,
        adamw=AdamWSettings(),
    )
    ids = torch.randint(0, model.config.vocab_size, (batch, seq_length))
    halves = (torch.arange(seq_length) >= seq_length // 2).int().expand(batch, -1)
    positions = torch.arange(seq_length) % (seq_length // 2)
    positions = positions.expand(batch, -1)
    micro_batch = {"input_ids": ids, "targets": ids, "position_ids": positions, "document_ids": halves}
    peak, done = 0, False
    def watch():
        nonlocal peak
        while not done:
            peak = max(peak, resident())
            time.sleep(0.001)
    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(2):
        engine.forward_backward([micro_batch], denominator=1.0)
        engine.clip_and_step(max_norm=1.0, learning_rate=1e-4)
    done = True
    watcher.join()
    return peak

base = peak_of_step(Path(sys.argv[1]), 1, 16)
print(base, peak_of_step(Path(sys.argv[2]), 4, 256))
"""


def test_a_real_step_takes_what_is_predicted(tmp_path: Path) -> None:
    """A model of 25M parameters on 1,024 tokens; the prediction of what it adds to the process is within a fifth."""
    tiny_llama(tmp_path / "tiny")
    large = tiny_llama(
        tmp_path / "large",
        tied=False,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
    )
    result = subprocess.run(
        [sys.executable, "-c", _STEP, str(tmp_path / "tiny"), str(large)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    base, peak = (int(number) for number in result.stdout.split())
    assert abs(base - BASE_BYTES) < BASE_BYTES / 4
    found = predict_memory(
        LlamaConfig.from_pretrained(large),
        zero=ZeroSettings(),
        world_size=1,
        micro_batch_size=4,
        max_seq_length=256,
    )
    assert (found.host_bytes - BASE_BYTES) / (peak - base) == pytest.approx(1, abs=0.2)
