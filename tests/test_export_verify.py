"""verify: a sound folder passes, and each way of spoiling one fails with the file and the fault."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.artifact import Manifest, record_files, write_manifest
from finetune.errors import CheckpointError
from finetune.export.folder import export_model
from finetune.export.load_check import check_load
from finetune.export.model_card import CardFacts
from finetune.export.quantization_check import check_quantization
from finetune.export.verify import generation_stops, verify_folder
from finetune.export.weights import read_weights
from finetune.model.load import load_model
from finetune.model.probe import probe_input_ids, write_probe
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.tiny_quantized import tiny_quantized


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports of a sharded float model and its int8 and int4 quantizations, each with a probe."""
    root = tmp_path_factory.mktemp("exports")
    source = tiny_llama(root / "source", dtype="bfloat16", tied=False)
    model = load_model(source, dtype=torch.float32, device="cpu")
    ids = probe_input_ids(model.config.vocab_size)
    with torch.no_grad():
        write_probe(source, ids, model(torch.tensor([ids])).logits[0])
    model.to(torch.bfloat16).save_pretrained(root / "sharded", max_shard_size="60KB")
    sharded = root / "sharded"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "verification.json"):
        shutil.copy(source / name, sharded / name)
    sources = {
        "float": sharded,
        "w4a16": tiny_quantized(source, root / "int4", scheme="w4a16", max_shard_size="60KB"),
        "w8a8": tiny_quantized(source, root / "int8", scheme="w8a8"),
    }
    return {
        name: export_model(path, out=root / f"export-{name}", card=CardFacts(title=name), verify=False)
        for name, path in sources.items()
    }


@pytest.fixture
def spoil(exported: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    def copy(name: str, *, keep_record: bool = False) -> Path:
        """A copy to spoil; without the record of hashes, so that the check itself must find the fault."""
        folder = tmp_path / name
        shutil.copytree(exported[name], folder)
        if not keep_record:
            (folder / "finetune.json").unlink()
        return folder

    return copy


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_sound_folders_pass(exported: dict[str, Path]) -> None:
    for name, folder in exported.items():
        report = verify_folder(folder, fresh_process=False)
        assert report["warnings"] == []
        assert report["quantization"] == (None if name == "float" else "compressed-tensors")
        assert report["hashed_files"] >= 6
        assert report["load"]["probe"]["agrees"]
        # Compared in the probe's float32, whatever the model is stored in.
        assert report["load"]["dtype"] == "bfloat16"
        assert report["load"]["probe"]["rms_difference"] < 1e-3
    assert len(list(exported["float"].glob("*.safetensors"))) > 2


@pytest.mark.parametrize("name", ["w4a16", "w8a8"])
def test_a_lost_quantization_status_fails(spoil: Callable[..., Path], name: str) -> None:
    folder = spoil(name)
    edit_json(folder / "config.json", lambda config: config["quantization_config"].pop("quantization_status"))
    with pytest.raises(CheckpointError, match="quantization_status") as caught:
        verify_folder(folder, fresh_process=False)
    assert caught.value.where == str(folder / "config.json")
    # And a loader that doesn't look at the config finds it too: by name, or by the logits.
    with pytest.raises(CheckpointError):
        check_load(folder)


@pytest.mark.parametrize("name", ["float", "w4a16", "w8a8"])
def test_a_flipped_byte_fails_and_names_the_file(spoil: Callable[..., Path], name: str) -> None:
    folder = spoil(name, keep_record=True)
    shard = first_shard(folder)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="content differs") as caught:
        verify_folder(folder, fresh_process=False)
    assert caught.value.where == str(shard)


def test_a_stages_manifest_serves_as_the_record(spoil: Callable[..., Path], tmp_path: Path) -> None:
    stage = tmp_path / "01-sft"
    stage.mkdir()
    folder = spoil("float").rename(stage / "model")
    write_manifest(stage, Manifest("sft", "sft", "f", "r", {}, record_files(stage)))
    assert verify_folder(folder, fresh_process=False)["hashed_files"] >= 6
    shard = first_shard(folder)
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="content differs") as caught:
        verify_folder(folder, fresh_process=False)
    assert caught.value.where == str(shard)


@pytest.mark.parametrize("keep_bytes", [-1, -100, 20, 4, 0])
def test_a_truncated_shard_fails_and_names_the_file(spoil: Callable[..., Path], keep_bytes: int) -> None:
    folder = spoil("float")
    shard = first_shard(folder)
    shard.write_bytes(shard.read_bytes()[:keep_bytes])
    with pytest.raises(CheckpointError, match="can't be read") as caught:
        verify_folder(folder, fresh_process=False)
    assert caught.value.where == str(shard)


def test_a_missing_shard_fails_and_names_the_file(spoil: Callable[..., Path]) -> None:
    folder = spoil("float")
    shard = first_shard(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match="missing") as caught:
        verify_folder(folder, fresh_process=False)
    assert caught.value.where == str(shard)


def test_index_and_shards_must_hold_each_tensor_once(spoil: Callable[..., Path]) -> None:
    folder = spoil("float")
    index = folder / "model.safetensors.index.json"
    first, second = [path for path in sorted(folder.glob("*.safetensors")) if len(load_file(path)) > 1][:2]
    original = {path: path.read_bytes() for path in (index, first, second)}

    def fails(what: str, where: Path) -> None:
        with pytest.raises(CheckpointError, match=what) as caught:
            read_weights(folder)
        assert caught.value.where == str(where)
        for path, content in original.items():
            path.write_bytes(content)

    name = next(iter(load_file(first)))
    edit_tensors(second, lambda tensors: tensors.update({name: torch.zeros(2)}))
    fails("is in .* too", second)
    edit_json(index, lambda value: value["weight_map"].pop(name))
    fails("the index has it nowhere", index)
    edit_json(index, lambda value: value["weight_map"].update({"extra.weight": first.name}))
    fails("in the index but not in the shard", first)
    edit_tensors(first, lambda tensors: tensors.update({name: torch.zeros(0, 4)}))
    fails("no elements", first)
    index.write_text("[]")
    fails("can't be read", index)
    save_file({"stray": torch.zeros(1)}, folder / "stray.safetensors")
    fails("isn't in the index", folder / "stray.safetensors")
    (folder / "stray.safetensors").rename(folder / "model.safetensors")
    fails("would ignore the shards", folder)
    (folder / "model.safetensors").unlink()
    read_weights(folder)
    index.unlink()
    with pytest.raises(CheckpointError, match="without its index"):
        read_weights(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_in_a_tensor_fails_and_names_it(spoil: Callable[..., Path], value: float) -> None:
    folder = spoil("w4a16")
    shard = next(path for path in folder.glob("*.safetensors") if any("_scale" in name for name in load_file(path)))
    name = next(name for name in load_file(shard) if "_scale" in name)
    edit_tensors(shard, lambda tensors: tensors[name].view(-1)[-1].fill_(value))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        verify_folder(folder, fresh_process=False)
    assert caught.value.where == str(shard)


@pytest.mark.parametrize("name", ["float", "w4a16", "w8a8"])
def test_one_wrong_scale_or_weight_fails_against_the_probe(spoil: Callable[..., Path], name: str) -> None:
    folder = spoil(name)
    wanted = "layers.1.mlp.down_proj.weight" + ("" if name == "float" else "_scale")
    shard = next(path for path in folder.glob("*.safetensors") if any(wanted in key for key in load_file(path)))
    edit_tensors(shard, lambda tensors: tensors[f"model.{wanted}"].mul_(1.1))
    with pytest.raises(CheckpointError, match="isn't the one that was made"):
        verify_folder(folder, fresh_process=False)


def test_a_w8a8_probe_of_rounded_activations_only_tells_coarse_faults(spoil: Callable[..., Path]) -> None:
    folder = spoil("w8a8")
    model = load_model(folder, dtype=torch.float32, device="cpu")
    ids = probe_input_ids(model.config.vocab_size)
    with torch.no_grad():
        logits_TV = model(torch.tensor([ids])).logits[0]
    write_probe(folder, ids, logits_TV)
    probe = check_load(folder)["probe"]
    assert probe["rms_tolerance"] == 1.0
    # The stored bfloat16 against float32: rounding of activations makes that more than either's own error.
    assert probe["rms_difference"] > 0.01
    write_probe(folder, ids, logits_TV, float_activations=True)
    with pytest.raises(CheckpointError, match="isn't the one that was made"):
        check_load(folder)


def test_quantization_config_must_fit_the_tensors(exported: dict[str, Path]) -> None:
    for name, changes in {
        "w4a16": {
            "format is int-quantized": lambda config: _set_format(config, "int-quantized"),
            "has the shape": lambda config: _weights(config).update(group_size=16),
            "no config_groups": lambda config: config["quantization_config"].update(config_groups={}),
            "there is no quantization_config": lambda config: config.pop("quantization_config"),
        },
        "w8a8": {
            "weight_packed is missing": lambda config: _set_format(config, "pack-quantized"),
            "has the shape": lambda config: _weights(config).update(strategy="group", group_size=32),
        },
    }.items():
        tensors = read_weights(exported[name])
        for what, change in changes.items():
            config = json.loads((exported[name] / "config.json").read_text())
            assert check_quantization(exported[name], config, tensors) == "compressed-tensors"
            change(config)
            with pytest.raises(CheckpointError, match=what):
                check_quantization(exported[name], config, tensors)
    config = json.loads((exported["w8a8"] / "config.json").read_text())
    with pytest.raises(CheckpointError, match="no tensor is quantized"):
        check_quantization(exported["float"], config, read_weights(exported["float"]))


def _weights(config: Any) -> Any:
    return config["quantization_config"]["config_groups"]["group_0"]["weights"]


def _set_format(config: Any, name: str) -> None:
    config["quantization_config"]["format"] = name
    config["quantization_config"]["config_groups"]["group_0"]["format"] = name


def test_a_tensor_of_a_quantized_layer_that_is_missing_fails(spoil: Callable[..., Path]) -> None:
    folder = spoil("w8a8")
    edit_tensors(
        folder / "model.safetensors", lambda tensors: tensors.pop("model.layers.0.self_attn.q_proj.weight_scale")
    )
    with pytest.raises(CheckpointError, match="q_proj"):
        verify_folder(folder, fresh_process=False)


def test_a_tied_head_stored_twice_must_be_equal(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "tied")
    weights = folder / "model.safetensors"
    embedding = load_file(weights)["model.embed_tokens.weight"]
    edit_tensors(weights, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    verify_folder(folder, fresh_process=False)
    edit_tensors(weights, lambda tensors: tensors["lm_head.weight"].mul_(2))
    with pytest.raises(CheckpointError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight") as caught:
        verify_folder(folder, fresh_process=False)
    assert caught.value.where == str(weights)


def test_a_lost_head_of_an_untied_model_fails(spoil: Callable[..., Path]) -> None:
    folder = spoil("w8a8")
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        verify_folder(folder, fresh_process=False)


def test_a_tokenizer_larger_than_the_embedding_fails(spoil: Callable[..., Path]) -> None:
    folder = spoil("w8a8")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<extra_{index}>" for index in range(20)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(CheckpointError, match="embedding has"):
        verify_folder(folder, fresh_process=False)


def test_a_template_that_does_not_render_fails(spoil: Callable[..., Path]) -> None:
    folder = spoil("w8a8")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no users here') }}")
    with pytest.raises(CheckpointError, match="no users here"):
        verify_folder(folder, fresh_process=False)


def test_what_is_no_fault_is_a_warning(spoil: Callable[..., Path]) -> None:
    folder = spoil("w8a8", keep_record=True)
    with (folder / "README.md").open("a") as readme:
        readme.write("\nEdited on the Hub.\n")
    report = verify_folder(folder, fresh_process=False)
    assert report["warnings"] == ["README.md was changed after the export"]
    (folder / "finetune.json").unlink()
    (folder / "verification.json").unlink()
    edit_json(folder / "generation_config.json", lambda config: config.update(eos_token_id=0))
    warnings = "\n".join(verify_folder(folder, fresh_process=False)["warnings"])
    assert "doesn't stop on <|im_end|>" in warnings
    assert "only checked to be finite" in warnings
    assert "a changed byte can't be told" in warnings


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_that_is_missing_fails(spoil: Callable[..., Path], name: str) -> None:
    folder = spoil("w8a8", keep_record=True)
    (folder / name).unlink()
    with pytest.raises(CheckpointError):
        verify_folder(folder, fresh_process=False)


def test_a_fault_that_only_the_fresh_process_sees_comes_back_whole(spoil: Callable[..., Path]) -> None:
    folder = spoil("w4a16")
    edit_json(
        folder / "verification.json",
        lambda probe: probe.update(logits=[[value + 9 for value in row] for row in probe["logits"]]),
    )
    with pytest.raises(CheckpointError, match="isn't the one that was made") as caught:
        verify_folder(folder)
    assert caught.value.where == str(folder)
    assert caught.value.fix


def test_a_header_that_lies_about_its_length_fails(spoil: Callable[..., Path]) -> None:
    folder = spoil("w8a8")
    weights = folder / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", 2**60) + weights.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="cut short") as caught:
        verify_folder(folder, fresh_process=False)
    assert caught.value.where == str(weights)


def test_stops_come_from_the_config_where_there_are_no_generation_settings(spoil: Callable[..., Path]) -> None:
    folder = spoil("w8a8")
    (folder / "generation_config.json").unlink()
    assert generation_stops(folder) == [2]
