"""A run whose ranks were started from outside, by torchrun: rank 0 decides and works, the others join its trainings."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError, RecipeError
from finetune.pipeline import PlannedStage, RunOptions, run_recipe
from finetune.recipe import LoadedRecipe, load_recipe
from finetune.worker import begin_stage, execute

POLL_SECONDS = 0.2


def joins_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def run_joined(loaded: LoadedRecipe, options: RunOptions, *, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Run the recipe on the ranks that torchrun started. Returns the summary on rank 0, None on the others.

    A stage that trains is run by all ranks; every other stage by rank 0 alone, while the others wait for its next
    word on a file in the run's folder (which all nodes share, as checkpoints need it too).
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    stated = loaded.recipe.launch.num_processes
    if stated != local:
        raise RecipeError(
            f"torchrun started {local} processes on this machine, the recipe says `launch.num_processes: {stated}`",
            where="launch.num_processes",
            fix=f"torchrun --nproc-per-node {stated}, or --set launch.num_processes={local}",
        )
    from finetune.engine.launch import process_group

    # One group for the whole run: a second one on torchrun's store would meet the addresses that the first left there.
    launch = loaded.recipe.launch
    with process_group(launch.device or "cpu", timeout_seconds=launch.timeout_seconds):
        return _run_in_group(loaded, options, say=say)


def _run_in_group(loaded: LoadedRecipe, options: RunOptions, *, say: Callable[[str], None]) -> dict[str, Any] | None:
    board = Board(loaded.run_dir)
    if int(os.environ["RANK"]) != 0:
        _follow(board)
        return None
    board.clear()

    def start(loaded: LoadedRecipe, plan: PlannedStage, force: bool) -> None:
        folder = loaded.run_dir / plan.stage.folder_name
        keep = plan.state == "unfinished" and not plan.differences and not force
        begin_stage(folder, fingerprint=plan.fingerprint, deciding=plan.deciding, parents=plan.parents, keep=keep)
        if plan.stage.implementation.run_rank is not None:
            board.write({"train": plan.stage.name, "run_dir": str(loaded.run_dir)})
        execute(loaded, plan.stage)

    try:
        summary = run_recipe(loaded, options, say=say, start=start)
    except FinetuneError as error:
        board.write({"failed": error.exit_code})
        raise
    board.write({"end": True})
    return summary


class Board:
    """A file of JSON lines that rank 0 writes and the others follow."""

    def __init__(self, run_dir: Path) -> None:
        # One file a start of torchrun: a restarted group must not read the words of the one before it.
        keys = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
        self.path = run_dir / f".joined-{'-'.join(os.environ.get(key, '0') for key in keys)}.jsonl"

    def clear(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for old in self.path.parent.glob(".joined-*.jsonl"):
            if old != self.path:
                old.unlink(missing_ok=True)

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
            return
        loaded = load_recipe(Path(word["run_dir"]) / "recipe.yaml")
        execute(loaded, loaded.stage(word["train"], flag="torchrun"), publish=False)
