"""Consolidation: the plain model that comes out, what is refused, and the memory that it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from finetune.checkpoint.commit import save_checkpoint
from finetune.checkpoint.consolidate import consolidate
from finetune.checkpoint.plan import OutputTensor, split_files
from finetune.checkpoint.stored import StoredTensor
from finetune.errors import CheckpointError, RecipeError
from tests.buffered import BUFFERS, BufferedConfig, register_buffered
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_llama(folder / "tied", tied=True)
    tiny_llama(folder / "untied", tied=False)
    return folder


def weights(model: Path) -> dict[str, torch.Tensor]:
    return {f"model.{name}": tensor for name, tensor in load_file(model / "model.safetensors").items()}


def save(root: Path, state: dict[str, torch.Tensor], model: Path) -> Path:
    moments = {f"optimizer.exp_avg.{name}": torch.zeros_like(tensor) for name, tensor in state.items()}
    return save_checkpoint(root, step=1, state={**state, **moments}, extra={}, model_files=model)


def logits_of(model: Path) -> torch.Tensor:
    input_ids = AutoTokenizer.from_pretrained(model)("the quick fox", return_tensors="pt").input_ids
    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(input_ids).logits
    return logits


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_the_result_is_a_plain_model(models: Path, tmp_path: Path, kind: str) -> None:
    checkpoint = save(tmp_path / "run", weights(models / kind), models / kind)
    report = consolidate(checkpoint, out=tmp_path / "out", dtype="float32")
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(models / kind))
    expected = load_file(models / kind / "model.safetensors")
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert report["num_parameters"] == sum(tensor.numel() for tensor in expected.values())
    assert report["bytes"] == sum(tensor.nbytes for tensor in expected.values())
    assert report["num_shards"] == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert (tmp_path / "out/generation_config.json").is_file()
    assert AutoConfig.from_pretrained(tmp_path / "out").tie_word_embeddings == (kind == "tied")


def test_the_saved_precision_is_stated(models: Path, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "run", weights(models / "tied"), models / "tied")
    consolidate(checkpoint, out=tmp_path / "out")
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    written = load_file(tmp_path / "out/model.safetensors")
    for name, tensor in load_file(models / "tied/model.safetensors").items():
        assert torch.equal(written[name], tensor.bfloat16())


def test_files_are_split_and_indexed(models: Path, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "run", weights(models / "untied"), models / "untied")
    report = consolidate(checkpoint, out=tmp_path / "out", dtype="float32", max_shard_size_bytes=150_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert report["num_shards"] == len(names) > 2
    assert sorted(report["files"]) == sorted(set(index["weight_map"].values())) == names
    for name in names:
        with safe_open(tmp_path / "out" / name, framework="pt") as opened:
            assert all(index["weight_map"][tensor] == name for tensor in opened.keys())  # noqa: SIM118
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(models / "untied"))


def test_a_tensor_larger_than_a_file_gets_one_of_its_own() -> None:
    outputs = [
        OutputTensor(name, StoredTensor(name, (size,), torch.float32, ()), torch.float32)
        for name, size in (("a", 2), ("b", 2), ("c", 9), ("d", 1), ("e", 4))
    ]
    groups = split_files(outputs, max_shard_size_bytes=16)
    assert [[output.name for output in group] for group in groups] == [["a", "b"], ["c"], ["d"], ["e"]]


def test_buffers_are_bit_identical(models: Path, tmp_path: Path) -> None:
    register_buffered()
    model = tmp_path / "model"
    config = BufferedConfig(**{**LlamaConfig.from_pretrained(models / "tied").to_dict(), "model_type": None})
    config.save_pretrained(model)
    state = weights(models / "tied") | {f"buffer.{name}": buffer for name, buffer in BUFFERS.items()}
    checkpoint = save(tmp_path / "run", state | {"buffer.computed": torch.ones(4)}, model)
    consolidate(checkpoint, out=tmp_path / "out", dtype="bfloat16")
    written = load_file(tmp_path / "out/model.safetensors")
    for name, buffer in BUFFERS.items():
        assert written[name].dtype == buffer.dtype
        assert torch.equal(written[name], buffer)
        assert written[name].shape == buffer.shape
    assert "computed" not in written


def test_equal_copies_of_a_tied_parameter_become_one(models: Path, tmp_path: Path) -> None:
    state = weights(models / "tied")
    embedding = state["model.model.embed_tokens.weight"]
    checkpoint = save(tmp_path / "run", {**state, "model.lm_head.weight": embedding.clone()}, models / "tied")
    consolidate(checkpoint, out=tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")


def test_a_tied_parameter_is_found_under_its_other_name(models: Path, tmp_path: Path) -> None:
    state = weights(models / "tied")
    state["model.lm_head.weight"] = state.pop("model.model.embed_tokens.weight")
    consolidate(save(tmp_path / "run", state, models / "tied"), out=tmp_path / "out", dtype="float32")
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(models / "tied"))


def test_tied_parameters_that_differ_are_refused(models: Path, tmp_path: Path) -> None:
    state = weights(models / "tied")
    other = state["model.model.embed_tokens.weight"].clone()
    other[3, 5] += 1e-6  # Less than bfloat16 can tell apart.
    checkpoint = save(tmp_path / "run", {**state, "model.lm_head.weight": other}, models / "tied")
    with pytest.raises(CheckpointError, match=r"tied in config\.json but differ"):
        consolidate(checkpoint, out=tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_what_is_missing_left_over_or_misshapen_is_named(models: Path, tmp_path: Path) -> None:
    name = "model.model.norm.weight"

    def refused(change: dict[str, Any], words: str) -> None:
        state = {key: value for key, value in {**weights(models / "tied"), **change}.items() if value is not None}
        checkpoint = save(tmp_path / "run", state, models / "tied")
        with pytest.raises(CheckpointError, match=words):
            consolidate(checkpoint, out=tmp_path / "out")
        assert not list(tmp_path.glob("out*"))

    refused({name: None}, f"lacks {name}")
    refused({"model.extra.weight": torch.zeros(2)}, "holds model.extra.weight")
    refused({"buffer.extra": torch.zeros(2)}, "holds buffer.extra")
    refused({name: torch.zeros(63)}, rf"{name} is \[63\] in the checkpoint, \[64\]")


def test_an_older_result_stays_when_a_new_one_is_refused(models: Path, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "run", weights(models / "tied"), models / "tied")
    consolidate(checkpoint, out=tmp_path / "out")
    before = (tmp_path / "out/model.safetensors").read_bytes()
    (checkpoint / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        consolidate(checkpoint, out=tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == before


def test_one_flipped_byte_anywhere_publishes_nothing(models: Path, tmp_path: Path) -> None:
    """Weights, moments and the space between them: 20 places of the shard."""
    checkpoint = save(tmp_path / "run", weights(models / "untied"), models / "untied")
    path = checkpoint / "__0_0.distcp"
    content = path.read_bytes()
    for place in range(7, len(content), len(content) // 19):
        path.write_bytes(content[:place] + bytes([content[place] ^ 64]) + content[place + 1 :])
        with pytest.raises(CheckpointError, match="sha256") as caught:
            consolidate(checkpoint, out=tmp_path / "out")
        assert caught.value.where == str(path)
        assert not list(tmp_path.glob("out*"))
    path.write_bytes(content)
    consolidate(checkpoint, out=tmp_path / "out")


def test_bad_arguments_are_refused(models: Path, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "run", weights(models / "tied"), models / "tied")
    with pytest.raises(RecipeError, match="bfloat"):
        consolidate(checkpoint, out=tmp_path / "out", dtype="bfloat")
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        consolidate(tmp_path / "absent", out=tmp_path / "out")
    with pytest.raises(CheckpointError, match="it isn't one") as caught:
        consolidate(tmp_path / "run", out=tmp_path / "out")
    assert "step-00000001" in str(caught.value.fix)
    with pytest.raises(CheckpointError, match="isn't a checkpoint"):
        consolidate(models / "tied", out=tmp_path / "out")


_PEAK = """
import resource, sys, threading, time
from pathlib import Path
from finetune.checkpoint.consolidate import consolidate
import torch
consolidate(Path(sys.argv[1]), out=Path(sys.argv[3]) / "warm", dtype="bfloat16")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
consolidate(Path(sys.argv[2]), out=Path(sys.argv[3]) / "large", dtype="bfloat16")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_peak_memory_depends_on_no_file(models: Path, tmp_path: Path) -> None:
    """A model of 57 MB in one file, stored as 113 MB of float32."""
    small = save(tmp_path / "small-run", weights(models / "untied"), models / "untied")
    model = tiny_llama(tmp_path / "large", tied=False, hidden_size=512, intermediate_size=1536, num_layers=9)
    large = save_checkpoint(tmp_path / "large-run", step=1, state=weights(model), extra={}, model_files=model)
    result = subprocess.run(
        [sys.executable, "-c", _PEAK, str(small), str(large), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "large").glob("*.safetensors"))
    assert num_bytes > 55_000_000
    grown_bytes = int(result.stdout.splitlines()[-1]) * 1024
    # Bands of 1 MiB, and what the allocator and the larger model's names take.
    assert grown_bytes < 30_000_000
