"""Checkpoints of other tools: DCP folders in each manner of naming, DeepSpeed's of every stage, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from finetune.checkpoint.bands import BandReader, read_tensor
from finetune.checkpoint.consolidate import consolidate
from finetune.checkpoint.deepspeed_layout import INERT, read_deepspeed
from finetune.checkpoint.stored import StoredTensor
from finetune.checkpoint.torch_file import TorchFile
from finetune.cli import main
from finetune.errors import CheckpointError, RecipeError
from tests.buffered import odd_model_folder, register_buffered
from tests.deepspeed_ranks import RUNS
from tests.tiny import tiny_llama

State = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="module")
def weights(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def save_dcp(folder: Path, state: State) -> Path:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def equal(out: Path, expected: dict[str, torch.Tensor]) -> bool:
    written = load_file(out / "model.safetensors")
    return written.keys() == expected.keys() and all(torch.equal(written[name], expected[name]) for name in expected)


def optimizer_of(weights: dict[str, torch.Tensor]) -> State:
    state = {name: {"exp_avg": tensor * 0.1, "step": torch.tensor(3.0)} for name, tensor in weights.items()}
    return {"state": state, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99)}]}


MANNERS: dict[str, Any] = {
    "flat": lambda weights: weights,
    "nested": lambda weights: {"model": weights, "optim": optimizer_of(weights), "step": 5},
    "state_dict": lambda weights: {"state_dict": weights, "epoch": 2},
    "module": lambda weights: {"module." + name: tensor for name, tensor in weights.items()},
    "app": lambda weights: {"app": {"model": weights, "optim": optimizer_of(weights)}},
    "compiled": lambda weights: {"model": {"_orig_mod." + name: tensor for name, tensor in weights.items()}},
    "compiled blocks": lambda weights: {
        name.replace("layers.0.", "layers.0._orig_mod._checkpoint_wrapped_module."): tensor
        for name, tensor in weights.items()
    },
    "flat, optimizer beside": lambda weights: {**weights, "optimizer": optimizer_of(weights), "train_state": {"a": 1}},
}


@pytest.mark.parametrize("manner", MANNERS)
def test_names_of_other_tools_are_understood(
    model: Path, weights: dict[str, torch.Tensor], tmp_path: Path, manner: str
) -> None:
    checkpoint = save_dcp(tmp_path / "step-10", MANNERS[manner](weights))
    report = consolidate(checkpoint, out=tmp_path / "out", dtype="float32", model=model)
    assert report["kind"] == "dcp"
    assert equal(tmp_path / "out", weights)
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_the_configuration_above_the_checkpoint_serves(
    model: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    checkpoint = save_dcp(tmp_path / "pytorch_model_fsdp_0", {"model": weights})
    with pytest.raises(CheckpointError, match="nor the folder above") as caught:
        consolidate(checkpoint, out=tmp_path / "out")
    assert "--model" in str(caught.value.fix)
    shutil.copy(model / "config.json", tmp_path)
    (tmp_path / "trainer_state.json").write_text("{}")
    consolidate(checkpoint, out=tmp_path / "out", dtype="float32")
    assert equal(tmp_path / "out", weights)
    assert not (tmp_path / "out/trainer_state.json").exists()
    with pytest.raises(CheckpointError, match="it isn't one") as caught:
        consolidate(tmp_path, out=tmp_path / "other")
    assert "pytorch_model_fsdp_0" in str(caught.value.fix)


def test_a_model_of_another_configuration_is_refused(
    model: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    def refused(state: State, words: str) -> None:
        checkpoint = save_dcp(tmp_path / "checkpoint", state)
        with pytest.raises(CheckpointError, match=words):
            consolidate(checkpoint, out=tmp_path / "out", model=model)
        shutil.rmtree(checkpoint)
        assert not list(tmp_path.glob("out*"))

    name = "model.norm.weight"
    refused({"model": {**weights, "extra": torch.zeros(2)}}, "holds model.extra")
    refused({**weights, "extra": torch.zeros(2)}, "holds extra")
    refused({key: value for key, value in weights.items() if key != name}, f"lacks {name}")
    refused({**weights, name: torch.zeros(63)}, rf"{name} is \[63\]")
    refused({"tok_embeddings.weight": torch.zeros(2)}, "none of the checkpoint's tensors.*tok_embeddings.weight")
    refused({**weights, f"_orig_mod.{name}": weights[name]}, "are the same tensor")


def test_a_transposed_tensor_comes_out_right(model: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    strided = weights[name].t().contiguous().t()
    assert not strided.is_contiguous()
    checkpoint = save_dcp(tmp_path / "checkpoint", {**weights, name: strided})
    consolidate(checkpoint, out=tmp_path / "out", dtype="float32", model=model)
    assert equal(tmp_path / "out", weights)


def test_bands_join_boxes_of_every_cut(tmp_path: Path) -> None:
    whole = torch.randn(10, 7, 3)
    for cut in ([(0, 10, 0, 7)], [(0, 4, 0, 7), (4, 10, 0, 7)], [(0, 10, 0, 2), (0, 3, 2, 7), (3, 10, 2, 7)]):
        extents = []
        for number, (top, bottom, left, right) in enumerate(cut):
            torch.save(whole[top:bottom, left:right].clone(), tmp_path / f"{number}.pt")
            opened = TorchFile(tmp_path / f"{number}.pt")
            extents.append(opened.extent(opened.content, (top, left, 0)))
        stored = StoredTensor("a", (10, 7, 3), torch.float32, tuple(extents))
        assert torch.equal(read_tensor(stored), whole)
        for band_bytes in (1, 100, 10**6):
            reader = BandReader(stored, band_bytes=band_bytes)
            bands = [reader.read(start, end) for start, end in reader.bands()]
            assert torch.equal(torch.cat(bands).reshape(whole.shape), whole)
    assert len(bands) == 1


def test_values_that_float16_cannot_hold_are_refused(
    model: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    large = weights["model.norm.weight"].clone()
    large[3] = 1e6
    checkpoint = save_dcp(tmp_path / "checkpoint", {**weights, "model.norm.weight": large})
    for max_shard_size_bytes in (10**9, 10_000):  # Alone, and while other files are written.
        with pytest.raises(CheckpointError, match=r"model.norm.weight holds values that float16 can't"):
            consolidate(
                checkpoint,
                out=tmp_path / "out",
                dtype="float16",
                max_shard_size_bytes=max_shard_size_bytes,
                model=model,
            )
    assert not list(tmp_path.glob("out*"))


class Evil:
    """Its unpickling makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch '{self.target}'",)


def test_a_layout_with_code_is_refused_by_the_verb(
    model: Path, weights: dict[str, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = save_dcp(tmp_path / "checkpoint", weights)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "was here")))
    code = main(["consolidate", str(checkpoint), "--model", str(model), "--out", str(tmp_path / "out")])
    message = capsys.readouterr().err
    assert code == 4
    assert ".metadata" in message
    assert "posix.system" in message
    assert not list(tmp_path.glob("out*"))
    assert not (tmp_path / "was here").exists()


def test_a_flipped_byte_is_found_without_a_manifest(
    model: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    checkpoint = save_dcp(tmp_path / "checkpoint", weights)
    path = checkpoint / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    place = content.find(weights["model.embed_tokens.weight"].numpy().tobytes()[:64])
    content[place + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="crc32") as caught:
        consolidate(checkpoint, out=tmp_path / "out", model=model)
    assert caught.value.where == str(path)
    assert not list(tmp_path.glob("out*"))


def test_files_without_crc32_are_read(model: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        checkpoint = save_dcp(tmp_path / "checkpoint", weights)
    finally:
        torch.serialization.set_crc32_options(True)
    consolidate(checkpoint, out=tmp_path / "out", dtype="float32", model=model)
    assert equal(tmp_path / "out", weights)


@pytest.fixture(scope="module")
def deepspeed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks of DeepSpeed, all stages; see tests/deepspeed_ranks.py."""
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("deepspeed")
    subprocess.run(
        [sys.executable, "-m", "tests.deepspeed_ranks", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[1],
        timeout=400,
        check=True,
        capture_output=True,
    )
    register_buffered()
    for tied in (True, False):
        odd_model_folder(folder / f"model-{tied}", tied=tied)
    return folder


def model_of(folder: Path, name: str) -> Path:
    return folder / f"model-{RUNS[name]['tied']}"


def test_deepspeed_checkpoints_give_the_true_masters(deepspeed_folder: Path, tmp_path: Path) -> None:
    for name, run in RUNS.items():
        true = torch.load(deepspeed_folder / f"{name}.true.pt", weights_only=True)
        del true["computed"]
        if run["tied"]:
            true.pop("lm_head.weight", None)
        # ZeRO 0 names no masters; its rounded weights are exact in their own type alone.
        dtype = "bfloat16" if name == "stage0-bf16" else "float32"
        checkpoint = deepspeed_folder / name
        report = consolidate(checkpoint, out=tmp_path / name, dtype=dtype, model=model_of(deepspeed_folder, name))
        written = load_file(tmp_path / name / "model.safetensors")
        assert (report["kind"], report["step"]) == ("deepspeed", 2)
        assert written.keys() == true.keys()
        buffers = {"count", "flags", "scale"}
        for key, tensor in true.items():
            assert written[key].dtype == (tensor.dtype if key in buffers else getattr(torch, dtype)), (name, key)
            assert torch.equal(written[key], tensor.to(written[key].dtype)), (name, key)
        if name != "stage0-bf16":
            # A frozen parameter has no master; all others come from float32 values that bfloat16 can't hold.
            trained = written["model.layers.1.mlp.up_proj.weight"]
            assert not torch.equal(trained, trained.bfloat16().float())
    inner = deepspeed_folder / "stage3/global_step2"
    consolidate(inner, out=tmp_path / "inner", dtype="float32", model=model_of(deepspeed_folder, "stage3"))
    written, other = (load_file(tmp_path / name / "model.safetensors") for name in ("inner", "stage3"))
    assert all(torch.equal(written[key], other[key]) for key in other)


def test_half_precision_without_named_masters_is_not_widened(deepspeed_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="only its rounded weights") as caught:
        consolidate(
            deepspeed_folder / "stage0-bf16",
            out=tmp_path / "out",
            dtype="float32",
            model=model_of(deepspeed_folder, "stage0-bf16"),
        )
    assert caught.value.fix == "add --dtype bfloat16"
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name", ["stage0", "stage1", "stage2", "stage3-untied-subgroups"])
def test_every_damaged_file_of_deepspeed_is_named(deepspeed_folder: Path, tmp_path: Path, name: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(deepspeed_folder / name, checkpoint)
    inner = checkpoint / "global_step2"
    model = model_of(deepspeed_folder, name)

    def refused(path: Path, words: str) -> None:
        with pytest.raises(CheckpointError, match=words) as caught:
            consolidate(checkpoint, out=tmp_path / "out", model=model)
        assert path.name in str(caught.value.where)
        assert not list(tmp_path.glob("out*"))

    for path in sorted(inner.glob("*.pt")):
        kept = path.read_bytes()
        path.unlink()
        if name != "stage0":  # Its only file, by which such a folder is known.
            refused(path, "missing")
        for length in (0, 100, len(kept) // 2, len(kept) - 30):
            path.write_bytes(kept[:length])
            refused(path, "truncated|refused|ends")
        path.write_bytes(_flipped_weights(path, kept))
        refused(path, "crc32")
        path.write_bytes(b"")
        torch.save({"module": {}, "dp_world_size": 2, "evil": Evil(tmp_path / "was here")}, path)
        refused(path, "names posix.system")
        assert not (tmp_path / "was here").exists()
        path.write_bytes(kept)
    consolidate(checkpoint, out=tmp_path / "out", model=model)


def _flipped_weights(path: Path, content: bytes) -> bytes:
    """``content`` with one byte of its largest master, or of a tensor of a model's state, changed."""
    path.write_bytes(content)
    opened = TorchFile(path, inert=INERT)
    value = opened.content
    if "optimizer_state_dict" in value:
        inner = value["optimizer_state_dict"]
        tensor = (inner.get("single_partition_of_fp32_groups") or inner.get("fp32_flat_groups"))[0]
    else:
        fragments = value["frozen_param_fragments"] or value["module"]
        tensor = fragments["model.layers.0.mlp.up_proj.weight"]
    changed = bytearray(content)
    changed[opened.extent(tensor).start_bytes + 5] ^= 4
    return bytes(changed)


def test_sizes_that_do_not_add_up_are_refused(deepspeed_folder: Path, tmp_path: Path) -> None:
    """A checkpoint that was overwritten by one of another size, rank by rank."""
    for name, other, words in (
        ("stage2", "stage2-untied-offload", "group 0 is of 15 parameters here, of 14"),
        ("stage2-untied-offload", "stage2", "group 0 is of 14 parameters here, of 15"),
        ("stage3-untied-subgroups", "stage3", "don't make it up|ends before"),
        ("stage3", "stage3-untied-subgroups", "add up"),
    ):
        folder = tmp_path / name
        shutil.copytree(deepspeed_folder / name / "global_step2", folder)
        for path in (deepspeed_folder / other / "global_step2").glob("*_optim_states.pt"):
            shutil.copy(path, folder)
        with pytest.raises(CheckpointError, match=words) as caught:
            read_deepspeed(folder)
        assert "optim_states.pt" in str(caught.value.where)
    extra = tmp_path / "stage3/zero_pp_rank_2_mp_rank_00_model_states.pt"
    shutil.copytree(deepspeed_folder / "stage3/global_step2", tmp_path / "stage3", dirs_exist_ok=True)
    shutil.copy(deepspeed_folder / "stage3/global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt", extra)
    with pytest.raises(CheckpointError, match="of rank 2 lies in a checkpoint of 2 ranks"):
        read_deepspeed(tmp_path / "stage3")
    extra.rename(tmp_path / "stage3/mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="tensor or pipeline parallelism"):
        read_deepspeed(tmp_path / "stage3")


def test_latest_that_names_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step7")
    with pytest.raises(CheckpointError, match="names global_step7"):
        consolidate(tmp_path, out=tmp_path / "out")
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="isn't a checkpoint"):
        consolidate(tmp_path, out=tmp_path / "out")


def test_a_compressed_record_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(100)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(CheckpointError, match="compressed"):
        TorchFile(tmp_path / "packed.pt")


def test_our_own_checkpoint_takes_no_other_model(model: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    from finetune.checkpoint.commit import save_checkpoint

    state = {f"model.{name}": tensor for name, tensor in weights.items()}
    checkpoint = save_checkpoint(tmp_path / "run", step=1, state=state, extra={}, model_files=model)
    with pytest.raises(RecipeError, match="of its own"):
        consolidate(checkpoint, out=tmp_path / "out", model=model)
    # Without its manifest it isn't another tool's, but a save that was never finished.
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not finished"):
        consolidate(checkpoint, out=tmp_path / "out")


def test_the_verb_reports_what_it_did(
    model: Path, weights: dict[str, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = save_dcp(tmp_path / "checkpoint", {"model": weights})
    arguments = ["--out", str(tmp_path / "out"), "--dtype", "float32", "--max-shard-size", "200KB"]
    assert main(["consolidate", str(checkpoint), "--model", str(model), *arguments]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: ")
    assert main(["consolidate", str(checkpoint), "--model", str(model), *arguments, "--json", "--force"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == "dcp"
    assert report["num_shards"] > 1
    assert (tmp_path / "out/model.safetensors.index.json").is_file()
