"""Model folders open, or say what is wrong with them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.errors import CheckpointError, HubError, RecipeError
from finetune.model.load import load_config, load_model, load_tokenizer, meta_model, resolve_model
from finetune.model.tied import tied_parameter_names
from tests.tiny import tiny_llama


@pytest.mark.parametrize("tied", [True, False])
def test_meta_model_has_real_buffers_and_tied_names_but_no_weights(tmp_path, tied):
    folder = tiny_llama(tmp_path, tied=tied)
    real, meta = load_model(folder, dtype=torch.float32, device="cpu"), meta_model(folder)
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert tied_parameter_names(meta) == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    buffers = dict(meta.named_buffers())
    assert buffers.keys() == dict(real.named_buffers()).keys() != set()
    for name, buffer in real.named_buffers():
        assert buffers[name].dtype == torch.float32
        assert buffers[name].equal(buffer)
    assert {n: p.shape for n, p in meta.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}


def test_parameters_get_the_dtype_and_buffers_keep_theirs(tmp_path):
    model = load_model(tiny_llama(tmp_path), dtype=torch.bfloat16, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_a_missing_or_misshapen_weight_is_named(tmp_path):
    folder = tiny_llama(tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in weights.items() if k != name}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        load_model(folder, dtype=torch.float32, device="cpu")
    save_file({**weights, "model.layers.9.extra": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.extra"):
        load_model(folder, dtype=torch.float32, device="cpu")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    load_model(folder, dtype=torch.float32, device="cpu")


def test_folders_that_are_no_models(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        resolve_model(tmp_path)
    with pytest.raises(RecipeError, match="no such model folder"):
        resolve_model(tmp_path / "absent")
    with pytest.raises(HubError, match="somebody/no-such-model"):
        resolve_model("somebody/no-such-model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    with pytest.raises(CheckpointError, match="can't read the configuration"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="isn't JSON"):
        load_config(tmp_path)


def test_resolve_model_returns_a_folder_as_it_is(tmp_path):
    assert resolve_model(tiny_llama(tmp_path)) == tmp_path.resolve()


def test_a_folder_without_a_tokenizer(tmp_path):
    folder = tiny_llama(tmp_path)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(folder)
