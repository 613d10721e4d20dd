"""Sharded checkpoints to one model folder: finetune beside cp, DeepSpeed's zero_to_fp32 and torch's own tools.

    python bench/consolidate.py --out FOLDER [--gigabytes 2] [--deepspeed]

Makes a random Llama whose float32 masters take that many GB and saves it with both moments as two ranks of ours hold
them, as DCP's Hugging Face writer shards it (weights alone) and, with --deepspeed, by two ranks of DeepSpeed (ZeRO 2)
after one step. Then each tool works in a process of its own on files that are in the page cache, and flushes what it
wrote; peak memory is that process's VmHWM, imports included, which the seconds are not. Right after it, `cp` copies and
flushes the same files: those that it read, and those that it wrote. Prints a Markdown table; all is removed at the end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARD_BYTES = 500 * 10**6
NUM_RANKS = 2


def model_config(gigabytes: float) -> Any:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    layer = 4 * 1024**2 + 3 * 1024 * 2816 + 2 * 1024
    config.num_hidden_layers = max(1, round((gigabytes * 10**9 / 4 - 32000 * 1024) / layer))
    return config


def write_ours(folder: Path, rank: int) -> None:
    """Our own checkpoint, and the same weights as DCP's Hugging Face writer shards them."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from finetune.checkpoint.commit import save_checkpoint
    from finetune.model.load import load_config, meta_model

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    generator = torch.Generator().manual_seed(rank)
    state: dict[str, torch.Tensor] = {}
    for name, parameter in meta_model(load_config(folder / "model")).named_parameters():
        local = torch.randn((parameter.shape[0] // NUM_RANKS, *parameter.shape[1:]), generator=generator)
        state[f"model.{name}"] = DTensor.from_local(local, mesh, [Shard(0)])
        for moment, factor in (("exp_avg", 1e-3), ("exp_avg_sq", 1e-6)):
            state[f"optimizer.{moment}.{name}"] = DTensor.from_local(local * factor, mesh, [Shard(0)])
    save_checkpoint(folder / "ours", step=1, state=state, extra={}, model_files=folder / "model")
    weights = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
    writer = HuggingFaceStorageWriter(str(folder / "sharded"), save_distributed=True)
    dcp.save(weights, storage_writer=writer)


def write_deepspeed(folder: Path, rank: int) -> None:
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM

    from finetune.model.load import load_config

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(load_config(folder / "model"), dtype=torch.bfloat16)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    input_ids = torch.arange(4)[None] + rank
    engine.backward(engine(input_ids=input_ids, labels=input_ids).loss)
    engine.step()
    engine.save_checkpoint(str(folder / "deepspeed"))


def launch(kind: str, folder: Path) -> None:
    """Run one of the two above on two ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in range(NUM_RANKS):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, __file__, "--child", kind, "--out", str(folder)]
        ranks.append(subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in ranks]
    if any(codes):
        sys.exit(f"the ranks of {kind} failed")


def consolidate_ours(folder: Path, dtype: str, source: str) -> None:
    from finetune.checkpoint.consolidate import consolidate

    checkpoint, model = (folder / "ours/step-00000001", None)
    if source == "deepspeed":
        checkpoint, model = folder / "deepspeed", folder / "model"
    consolidate(checkpoint, out=folder / "result", dtype=dtype, max_shard_size_bytes=SHARD_BYTES, model=model)


def zero_to_fp32(folder: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    # With safe_serialization=True 0.19.8 ends in an error for tied embeddings: "Some tensors share memory".
    convert_zero_checkpoint_to_fp32_state_dict(
        str(folder / "deepspeed"), str(folder / "peer"), max_shard_size="500MB", safe_serialization=False
    )


def dcp_to_torch_save(folder: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as convert

    (folder / "peer").mkdir()
    convert(str(folder / "ours/step-00000001"), str(folder / "peer/everything.pt"))


def dcp_consolidate_safetensors(folder: Path) -> None:
    from safetensors import safe_open
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    sizes: dict[str, int] = {}
    for path in sorted((folder / "sharded").glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                sizes[name] = sizes.get(name, 0) + 4 * opened.get_tensor(name).numel()
    mapping, file, room = {}, 1, SHARD_BYTES
    for name, size in sizes.items():
        if size > room:
            file, room = file + 1, SHARD_BYTES
        mapping[name], room = file, room - size
    (folder / "peer").mkdir()
    consolidate_safetensors_files(str(folder / "sharded"), str(folder / "peer"), mapping, num_threads=2)


METHODS: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "finetune, float32": ("ours", "result", lambda folder: consolidate_ours(folder, "float32", "ours")),
    "finetune, bfloat16": ("ours", "result", lambda folder: consolidate_ours(folder, "bfloat16", "ours")),
    "torch dcp_to_torch_save": ("ours", "peer", dcp_to_torch_save),
    "torch consolidate_safetensors_files": ("sharded", "peer", dcp_consolidate_safetensors),
    "finetune, DeepSpeed's, float32": ("deepspeed", "result", lambda f: consolidate_ours(f, "float32", "deepspeed")),
    "finetune, DeepSpeed's, bfloat16": ("deepspeed", "result", lambda f: consolidate_ours(f, "bfloat16", "deepspeed")),
    "DeepSpeed zero_to_fp32": ("deepspeed", "peer", zero_to_fp32),
}


PRELOADED = {
    "finetune": ["finetune.checkpoint.consolidate"],
    "torch dcp_to_torch_save": ["torch.distributed.checkpoint.format_utils"],
    "torch consolidate_safetensors_files": ["torch.distributed.checkpoint._consolidate_hf_safetensors"],
    "DeepSpeed zero_to_fp32": ["deepspeed.utils.zero_to_fp32"],
}


def child(name: str, folder: Path) -> None:
    if name == "ours":
        write_ours(folder, int(os.environ["RANK"]))
    elif name == "deepspeed":
        write_deepspeed(folder, int(os.environ["RANK"]))
    else:
        _, result, method = METHODS[name]
        for module in PRELOADED["finetune" if name.startswith("finetune") else name]:
            importlib.import_module(module)
        started = time.perf_counter()
        method(folder)
        for path in (folder / result).rglob("*"):
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        seconds = time.perf_counter() - started
        status = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
        print(json.dumps({"seconds": seconds, "peak_bytes": int(status) * 1024}))


def measure(name: str, folder: Path) -> dict[str, Any]:
    source, result, _ = METHODS[name]
    for leftover in ("result", "peer"):
        shutil.rmtree(folder / leftover, ignore_errors=True)
    _warm(folder / source)
    command = [sys.executable, __file__, "--child", name, "--out", str(folder)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"DS_ACCELERATOR": "cpu"})
    if finished.returncode:
        return {"name": name, "failed": finished.returncode}
    row = {"name": name, **json.loads(finished.stdout.splitlines()[-1])}
    for what, part in (("read", source), ("written", result)):
        row[f"{what}_bytes"] = sum(path.stat().st_size for path in (folder / part).rglob("*") if path.is_file())
        row[f"{what}_seconds"] = copy_seconds(folder / part, folder / "copy")
    return row


def copy_seconds(source: Path, target: Path) -> float:
    _warm(source)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    subprocess.run(["sync", *target.rglob("*")], check=True)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def _warm(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as stream:
                while stream.read(2**24):
                    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for some 20 GB, which it empties at the end")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="float32 masters of the model")
    parser.add_argument("--deepspeed", action="store_true", help="DeepSpeed's checkpoint, too")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), metavar="NAME", help="these rows of the table")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints for another run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if args.child:
        child(args.child, args.out)
        return
    folder: Path = args.out
    if not (folder / "model").is_dir():
        (folder / "model").mkdir(parents=True)
        model_config(args.gigabytes).save_pretrained(folder / "model")
    for kind in ["ours", "deepspeed"] if args.deepspeed else ["ours"]:
        if not (folder / kind).is_dir():
            launch(kind, folder)
    rows = [
        measure(name, folder)
        for _ in range(args.rounds)
        for name, (source, _, _) in METHODS.items()
        if (args.deepspeed or source != "deepspeed") and name in (args.only or METHODS)
    ]
    print("| | seconds | peak MB | GB in | its cp, s | ratio | GB out | its cp, s | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        if "failed" in row:
            print(f"| {row['name']} | failed with {row['failed']} | | | | | | | |")
            continue
        cells = [row["name"], f"{row['seconds']:.1f}", f"{row['peak_bytes'] / 1e6:.0f}"]
        for what in ("read", "written"):
            copied = row[f"{what}_seconds"]
            cells += [f"{row[f'{what}_bytes'] / 1e9:.2f}", f"{copied:.1f}", f"{row['seconds'] / copied:.2f}"]
        print(f"| {' | '.join(cells)} |")
    for name in ("result", "peer") if args.keep else ("model", "ours", "sharded", "deepspeed", "result", "peer"):
        shutil.rmtree(folder / name, ignore_errors=True)


if __name__ == "__main__":
    main()
