"""The file to submit or to start on each node, so that a recipe runs on several machines."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import RecipeError
from finetune.recipe import LoadedRecipe, check_files_exist, load_recipe

STOP_SECONDS = 120
"""How long before a job's time is up it is told to end: a stop needs seconds, a last step and a save may take more."""

_SLURM = """\
#!/bin/bash
# Submit with: sbatch THIS_FILE. A job that is preempted, loses a rank or a node, or whose time is up goes on in a new
# turn from its last good checkpoint. All nodes must share the directory below and the recipe's output_dir.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={processes}
{resources}#SBATCH --output={name}-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@{stop_seconds}
{extra}set -uo pipefail
cd {directory} || exit 2

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}"

time_is_up() {{
    trap '' USR1
    kill -TERM "$step" && wait "$step"
    scontrol requeue "$SLURM_JOB_ID"
    exit
}}
trap time_is_up USR1

# One rank lost ends all: srun must not leave the others waiting.
srun --kill-on-bad-exit=1 {command} &
step=$!
wait "$step"
code=$?
# 5: memory, disk, devices or a lost rank; another turn may mend it. Not what scancel leaves behind, 128 and more.
if ((code == 5 && ${{SLURM_RESTART_COUNT:-0}} < {max_restarts})); then
    scontrol requeue "$SLURM_JOB_ID" && exit
fi
exit "$code"
"""

_TORCHRUN = """\
#!/bin/bash
# Start on {each}: {prefix}bash THIS_FILE
# A rank that is lost ends the others; all start anew, up to {max_restarts} times, from the last good checkpoint.
# All nodes must share the directory below and the recipe's output_dir.
set -euo pipefail
cd {directory}
{address}
master_port="${{MASTER_PORT:-29400}}"
python={python}

# The node that can listen at the first one's address is the first. The others are known by the address they reach it
# from: a node's own name, which torchrun would take, may mean nothing to the rest.
read -r is_first local_addr < <("$python" -c '
import socket, sys
family, kind, protocol, _, address = socket.getaddrinfo(sys.argv[1], 9, type=socket.SOCK_DGRAM)[0]
probe = socket.socket(family, kind, protocol)
try:
    socket.socket(family, kind, protocol).bind((address[0], 0, *address[2:]))
except OSError:
    probe.connect(address)
    print("false", probe.getsockname()[0])
else:
    print("true", sys.argv[1])
' "$master_addr")

exec "$python" -m torch.distributed.run --nnodes={nodes} --nproc-per-node={processes} \\
    --rdzv-backend=c10d --rdzv-id="${{RDZV_ID:-{name}}}" --rdzv-endpoint="$master_addr:$master_port" \\
    --rdzv-conf="is_host=$is_first" --local-addr="$local_addr" --max-restarts={max_restarts} \\
    {arguments}
"""


@dataclass(frozen=True)
class ScriptOptions:
    kind: str
    """slurm or torchrun."""
    nodes: int = 1
    processes_per_node: int | None = None
    """Default: the recipe's ``launch.num_processes``."""
    gpus_per_node: int | None = None
    """One process each, and ``launch.device: cuda``."""
    max_restarts: int = 3
    sbatch: tuple[str, ...] = ()
    """More options of sbatch, one line each: ``--partition=gpu``."""


def launch_script(recipe: Path, overrides: Sequence[str], options: ScriptOptions, *, directory: Path) -> str:
    """The script that runs ``recipe`` from ``directory``, which its paths start at. Raises RecipeError or DataError for
    what a run would be refused for without looking at a model, and for flags that don't fit."""
    for option in options.sbatch:
        if options.kind != "slurm" or not option.startswith("-") or "\n" in option:
            raise RecipeError(
                f"`{option}` isn't an option of sbatch" if options.kind == "slurm" else "torchrun has no use for it",
                where="--sbatch",
                fix="--slurm --sbatch=--partition=gpu",
            )
    overrides = list(overrides)
    loaded = load_recipe(recipe, overrides)
    check_files_exist(loaded)
    processes, added = _processes(loaded, options)
    overrides += added
    arguments = ["-m", "finetune", "run", str(recipe)]
    for override in overrides:
        arguments += ["--set", override]
    uses_gpus = options.gpus_per_node is not None or loaded.recipe.launch.device == "cuda"
    fields = {
        "name": loaded.recipe.name,
        "nodes": options.nodes,
        "processes": processes,
        "max_restarts": options.max_restarts,
        "directory": shlex.quote(str(directory)),
        "python": shlex.quote(sys.executable),
        "arguments": shlex.join(arguments),
    }
    if options.kind == "slurm":
        return _SLURM.format(
            **fields,
            stop_seconds=STOP_SECONDS,
            # Not --gpus-per-task: a rank must see its node's other GPUs, to speak to them directly.
            resources=f"#SBATCH --gpus-per-node={processes}\n" if uses_gpus else "",
            extra="".join(f"#SBATCH {option}\n" for option in options.sbatch),
            command=shlex.join([sys.executable, *arguments]),
        )
    several = options.nodes > 1
    return _TORCHRUN.format(
        **fields,
        each=f"each of the {options.nodes} nodes" if several else "the machine",
        prefix="MASTER_ADDR=ADDRESS_OF_THE_FIRST " if several else "",
        address='master_addr="${MASTER_ADDR:?set it to the address of the first node, the same on all}"'
        if several
        else 'master_addr="${MASTER_ADDR:-127.0.0.1}"',
    )


def _processes(loaded: LoadedRecipe, options: ScriptOptions) -> tuple[int, list[str]]:
    """Processes on each node, and the overrides that make the recipe say so."""
    launch = loaded.recipe.launch
    if options.gpus_per_node is not None and launch.device == "cpu":
        raise RecipeError(
            "the recipe says `launch.device: cpu`", where="--gpus-per-node", fix="--processes-per-node, or cuda there"
        )
    processes = options.gpus_per_node or options.processes_per_node or launch.num_processes
    if processes is None:
        raise RecipeError(
            "the recipe leaves open how many processes run on a node, and the nodes aren't here to be looked at",
            where="launch.num_processes",
            fix="--gpus-per-node N, --processes-per-node N, or launch: {num_processes: N} in the recipe",
        )
    added = [] if launch.num_processes == processes else [f"launch.num_processes={processes}"]
    if options.gpus_per_node is not None and launch.device is None:
        added.append("launch.device=cuda")
    return processes, added
