"""Real DeepSpeed checkpoints: ``python -m tests.deepspeed_ranks FOLDER`` trains small models on two gloo ranks.

Each run leaves ``FOLDER/NAME/global_step2`` with its ``latest``, and ``FOLDER/NAME.true.pt``: the float32 masters as
DeepSpeed's own debug interface gives them on the living engine, and the buffers. One launch for all, since starting
DeepSpeed takes longer than everything here.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

NUM_RANKS = 2
RUNS: dict[str, dict[str, Any]] = {
    "stage0": {"stage": 0, "tied": True, "bf16": False},
    "stage0-bf16": {"stage": 0, "tied": False, "bf16": True},
    "stage1": {"stage": 1, "tied": True, "bf16": True},
    "stage1-untied-fp32": {"stage": 1, "tied": False, "bf16": False},
    "stage2": {"stage": 2, "tied": True, "bf16": True},
    "stage2-untied-offload": {"stage": 2, "tied": False, "bf16": True, "offload": True},
    "stage3": {"stage": 3, "tied": True, "bf16": True},
    "stage3-untied-subgroups": {"stage": 3, "tied": False, "bf16": True, "sub_group_size": 700},
}


def train(
    folder: Path, name: str, *, stage: int, tied: bool, bf16: bool, sub_group_size: int = 10**9, offload: bool = False
) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    from tests.buffered import odd_model

    model = odd_model(tied=tied)
    frozen = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight")
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key not in frozen)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    config: dict[str, Any] = {
        "train_batch_size": NUM_RANKS,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        config["zero_force_ds_cpu_optimizer"] = False
    if stage == 3:
        config["zero_optimization"] |= {"sub_group_size": sub_group_size, "stage3_param_persistence_threshold": 50}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=config, dist_init_required=False
    )
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        input_ids = torch.randint(0, 97, (1, 12), generator=generator)
        engine.backward(engine(input_ids=input_ids, labels=input_ids).loss)
        engine.step()
    engine.save_checkpoint(str(folder / name))
    true: dict[str, torch.Tensor] = {}
    for key, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter) if parameter.requires_grad and (stage or bf16) else None
        if master is None:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                master = parameter.detach()
                true[key] = master.clone()
        else:
            true[key] = master.detach().clone()
    true |= {key: buffer.clone() for key, buffer in engine.module.named_buffers() if "rotary" not in key}
    if rank == 0:
        torch.save(true, folder / f"{name}.true.pt")


def run_rank(folder: Path, rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    for name, run in RUNS.items():
        train(folder, name, **run)
    torch.distributed.barrier()


def main() -> None:
    folder = Path(sys.argv[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    ranks = []
    for rank in range(NUM_RANKS):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            code = 1
            try:
                run_rank(folder, rank)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
