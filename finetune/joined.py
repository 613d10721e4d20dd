"""A run whose ranks were started from outside, by torchrun or srun: rank 0 decides and works, the others join its
trainings."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.engine import slurm
from finetune.errors import FinetuneError, RecipeError
from finetune.pipeline import PlannedStage, RunOptions, begin, run_recipe
from finetune.processes import run_lock
from finetune.recipe import LoadedRecipe, load_recipe
from finetune.worker import execute

POLL_SECONDS = 0.2
SHARED_FOLDER_SECONDS = 60.0
"""How long another node's new file may stay unseen: NFS keeps what it knows of a folder for up to so long."""


def join_launcher() -> bool:
    """Whether this process is one rank of several that torchrun or srun started, which it takes its place from."""
    if all(key in os.environ for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return True
    if slurm.num_tasks(os.environ) == 1:
        return False
    from finetune.engine.launch import JOINED_VARIABLE

    os.environ.update(slurm.rank_environment(os.environ))
    os.environ[JOINED_VARIABLE] = "slurm"
    return True


def run_joined(
    loaded: LoadedRecipe, options: RunOptions, *, states_processes: bool, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Run the recipe on the ranks that were started. Returns the summary on rank 0, None on the others.

    A stage that trains is run by all ranks; every other stage by rank 0 alone, while the others wait for its next
    word on a file in the run's folder, which all nodes share, as checkpoints need it too. ``states_processes``: whether
    the recipe itself says ``launch.num_processes``, which the launcher must then have kept to. Raises RecipeError, on
    every rank, when the ranks don't fit the recipe or one another, or a node doesn't share the run's folder.
    """
    from finetune.engine.launch import process_group

    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    launch = loaded.recipe.launch
    stated = launch.num_processes if states_processes else None
    if not states_processes:
        launch = launch.model_copy(update={"num_processes": local})
        loaded = dataclasses.replace(loaded, recipe=loaded.recipe.model_copy(update={"launch": launch}))
    # One group for the whole run: a second one on the launcher's store would meet the addresses the first left there.
    with process_group(launch.device or "cpu", timeout_seconds=launch.timeout_seconds) as (rank, _):
        _require_agreement(loaded, local=local, stated=stated)
        board = _shared_board(loaded, rank)
        if rank != 0:
            _follow(board)
            return None
        return _lead(loaded, options, board, say=say)


def _require_agreement(loaded: LoadedRecipe, *, local: int, stated: int | None) -> None:
    """Raise the same RecipeError on every rank where some node runs another number of ranks, or another recipe."""
    mine = {"host": socket.gethostname(), "local": local, "stated": stated, "recipe": loaded.sha256()}
    for rank, its in enumerate(_gather(mine)):
        if its["stated"] is not None and its["stated"] != its["local"]:
            stated, local = its["stated"], its["local"]
            raise RecipeError(
                f"{local} processes were started on {its['host']}, the recipe says `launch.num_processes: {stated}`",
                where="launch.num_processes",
                fix=f"torchrun --nproc-per-node {stated} (srun --ntasks-per-node {stated}), "
                f"or --set launch.num_processes={local}",
            )
        if its["local"] != mine["local"]:
            raise RecipeError(
                f"{its['local']} processes were started on {its['host']}, {mine['local']} on {mine['host']}",
                where="launch.num_processes",
                fix="start as many on each node",
            )
        if its["recipe"] != mine["recipe"]:
            raise RecipeError(
                f"rank {rank} on {its['host']} was given another recipe than this one on {mine['host']}",
                where=loaded.run_dir,
                fix="give the same file and the same --set to all nodes",
            )


def _gather(value: Any) -> list[Any]:
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _shared_board(loaded: LoadedRecipe, rank: int) -> Board:
    """A new board that every rank sees. Raises RecipeError, on every rank, naming the nodes that don't see it."""
    name = None
    if rank == 0:
        with run_lock(loaded.run_dir):
            for left in loaded.run_dir.glob(".joined-*.jsonl"):
                left.unlink(missing_ok=True)
        # A name of its own: ranks that were started anew must not read the words of those before them.
        name = f".joined-{uuid.uuid4().hex[:12]}.jsonl"
        Board(loaded.run_dir / name).write({"begin": name})
    name = _gather(name)[0]
    board = Board(loaded.run_dir / name)
    deadline = time.monotonic() + min(SHARED_FOLDER_SECONDS, loaded.recipe.launch.timeout_seconds / 2)
    while not board.is_there() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    found = _gather((socket.gethostname(), str(loaded.run_dir.absolute()), board.is_there()))
    blind = [f"{host} (rank {other}) in {path}" for other, (host, path, sees) in enumerate(found) if not sees]
    if blind:
        raise RecipeError(
            f"the run's folder is {found[0][1]} on {found[0][0]}; what is written there isn't seen by "
            + ", nor by ".join(blind),
            where="output_dir",
            fix="set output_dir to a folder that all nodes share, and start all ranks in the same directory",
        )
    return board


def _lead(
    loaded: LoadedRecipe, options: RunOptions, board: Board, *, say: Callable[[str], None]
) -> dict[str, Any] | None:
    def start(loaded: LoadedRecipe, plan: PlannedStage, options: RunOptions) -> None:
        begin(loaded, plan, options)
        if plan.stage.implementation.run_rank is not None:
            board.write({"train": plan.stage.name, "run_dir": str(loaded.run_dir)})
        execute(loaded, plan.stage)

    try:
        summary = run_recipe(loaded, options, say=say, start=start)
    except BaseException as error:
        board.write({"failed": error.exit_code if isinstance(error, FinetuneError) else 1})
        raise
    board.write({"end": True})
    _gather(None)  # all have read it
    board.path.unlink(missing_ok=True)
    return summary


class Board:
    """A file of JSON lines that rank 0 writes and the others follow."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def is_there(self) -> bool:
        # Listing the folder makes a network file system look again where a look for the one name may be remembered.
        return self.path.parent.is_dir() and self.path.name in os.listdir(self.path.parent)

    def write(self, word: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(word) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def words(self) -> Iterator[dict[str, Any]]:
        read = 0
        while True:
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []
            for line in lines[read:]:
                if line.endswith("\n"):
                    read += 1
                    yield json.loads(line)
            time.sleep(POLL_SECONDS)


def _follow(board: Board) -> None:
    for word in board.words():
        if "failed" in word:
            raise SystemExit(int(word["failed"]))
        if "end" in word:
            _gather(None)
            return
        if "train" in word:
            loaded = load_recipe(Path(word["run_dir"]) / "recipe.yaml")
            execute(loaded, loaded.stage(word["train"], flag="torchrun"), publish=False)
