"""A rank's place from SLURM's environment: ``srun python -m finetune run RECIPE`` needs no other launcher.

The variables are those of sbatch(1) and srun(1), "output environment variables". The step's own come first: a job that
was given four tasks may run a step of two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from finetune.errors import RecipeError

_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""Steps from here on are SLURM's own: the batch script, an interactive shell, processes from outside."""
_FIRST_PORT, _NUM_PORTS = 10000, 20000
"""Below the range that Linux gives to outgoing connections (32768 and on)."""


def num_tasks(environment: Mapping[str, str]) -> int:
    """Tasks of the srun that this process is one of; 1 in a batch script, an interactive shell, or outside SLURM.

    sbatch and salloc set SLURM_PROCID and SLURM_NTASKS, too, for what runs once: only srun tells a step. A terminal
    (``srun --pty``) belongs to someone who types, not to a rank.
    """
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID") or ""
    if "SLURM_PROCID" not in environment or "SLURM_PTY_PORT" in environment:
        return 1
    if not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP:
        return 1
    return int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of one task of several.

    MASTER_ADDR and MASTER_PORT stay as they are where they are set; else they are the step's first node and a port
    that its job's number decides. Raises RecipeError where the nodes run unequally many tasks.
    """
    world_size = num_tasks(environment)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    nodes = nodes or environment.get("SLURM_NODELIST", "")
    job, step = int(environment.get("SLURM_JOB_ID") or 0), int(environment.get("SLURM_STEP_ID") or 0)
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(_tasks_on_each_node(environment, world_size)),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes) or "127.0.0.1",
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_FIRST_PORT + (job + step) % _NUM_PORTS),
    }


def _tasks_on_each_node(environment: Mapping[str, str], world_size: int) -> int:
    for key in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        counts = task_counts(environment.get(key, ""))
        if key == "SLURM_NTASKS_PER_NODE" and counts:
            counts *= int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or 1)
        if sum(counts) != world_size:
            continue  # the job's, not this step's
        if len(set(counts)) > 1:
            raise RecipeError(
                f"SLURM runs {', '.join(map(str, counts))} tasks on its {len(counts)} nodes; each must run as many",
                where=f"{key}={environment[key]}",
                fix="submit with --nodes and --ntasks-per-node in place of --ntasks",
            )
        return counts[0]
    num_nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or 1)
    if world_size % num_nodes:
        raise RecipeError(
            f"{world_size} tasks can't be shared out equally to {num_nodes} nodes",
            where="SLURM_NTASKS, SLURM_NNODES",
            fix="submit with --nodes and --ntasks-per-node in place of --ntasks",
        )
    return world_size // num_nodes


def task_counts(text: str) -> list[int]:
    """``2(x3),1`` → [2, 2, 2, 1]; [] for what isn't such a list."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first of a compressed list of hosts: ``gpu[01-03,7]-a,login`` → ``gpu01-a``."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).split(",")[0].strip()
