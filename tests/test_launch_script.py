"""What launch-script writes, and SLURM's environment as ranks read it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from finetune.engine.slurm import first_host, num_tasks, rank_environment, task_counts
from finetune.errors import DataError, RecipeError
from finetune.launch_script import ScriptOptions, launch_script
from tests.small_run import ENVIRONMENT, command, write_inputs

STEP = {
    "SLURM_JOB_ID": "77123",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NNODES": "4",
    "SLURM_TASKS_PER_NODE": "2(x4)",
    "SLURM_JOB_NODELIST": "gpu[07-09,12]",
}


def test_a_tasks_place_is_read_from_slurm() -> None:
    place = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07"}
    assert num_tasks(STEP) == 8
    assert rank_environment(STEP) == {**place, "MASTER_PORT": str(10000 + 77123 % 20000)}
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert rank_environment({**STEP, **given}) == {**place, **given}
    # A step of part of the job's tasks and nodes: the step's own figures count.
    part = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_STEP_NODELIST": "gpu12"}
    assert {**rank_environment({**STEP, **part}), "MASTER_PORT": ""} == {
        **place,
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu12",
        "MASTER_PORT": "",
    }
    # Two steps of one job may run at a time.
    assert rank_environment({**STEP, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != rank_environment(STEP)["MASTER_PORT"]
    by_share = {key: value for key, value in STEP.items() if key != "SLURM_TASKS_PER_NODE"}
    assert rank_environment(by_share)["LOCAL_WORLD_SIZE"] == "2"
    assert rank_environment({**by_share, "SLURM_NTASKS_PER_NODE": "2"})["LOCAL_WORLD_SIZE"] == "2"


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": None},  # a batch script, or a shell that salloc gave
        {"SLURM_STEP_ID": "4294967291"},  # the batch script as a step of its own
        {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # an interactive step
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun -n 1 in a job of eight
        {"SLURM_PTY_PORT": "40000"},  # srun --pty bash
        {"SLURM_PROCID": None},
    ],
)
def test_what_srun_did_not_start_as_one_of_several_is_no_rank(change: dict[str, str | None]) -> None:
    environment = {key: value for key, value in {**STEP, **change}.items() if value is not None}
    assert num_tasks(environment) == 1


def test_unequal_tasks_are_refused() -> None:
    with pytest.raises(RecipeError, match="3, 3, 2 tasks on its 3 nodes"):
        rank_environment({**STEP, "SLURM_TASKS_PER_NODE": "3(x2),2"})
    del (few := dict(STEP))["SLURM_TASKS_PER_NODE"]
    with pytest.raises(RecipeError, match="8 tasks can't be shared out equally to 3 nodes"):
        rank_environment({**few, "SLURM_NNODES": "3"})


def test_slurms_compressed_lists() -> None:
    assert task_counts("2(x3),1") == [2, 2, 2, 1]
    assert task_counts("") == []
    for text, host in [
        ("node[01-03,7]", "node01"),
        ("a,b[1-2]", "a"),
        ("r[2,5-6]n[10-12]-ib,login", "r2n10-ib"),
        ("single", "single"),
        ("", ""),
    ]:
        assert first_host(text) == host


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a project's")
    write_inputs(folder)
    (folder / "my recipe.yaml").write_text((folder / "recipes/llama_sft.yaml").read_text())
    return folder


def finetune(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=folder, capture_output=True, text=True, env={**ENVIRONMENT, **environment}, timeout=200
    )


def test_the_sbatch_script_asks_for_a_task_a_process_and_comes_back(project: Path, tmp_path: Path) -> None:
    flags = [
        "--slurm",
        "--nodes",
        "3",
        "--set",
        "stages.sft.epochs=2",
        "--sbatch=--partition=long",
        "--set",
        "name=big",
    ]
    done = finetune(project, "launch-script", "my recipe.yaml", *flags)
    assert done.returncode == 0, done.stderr
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", done.stdout, flags=re.M))
    assert options == {
        "job-name": "big",
        "nodes": "3",
        "ntasks-per-node": "2",
        "output": "big-%j.log",
        "open-mode": "append",
        "requeue": "",
        "signal": "B:USR1@120",
        "partition": "long",
    }
    # Run for real, with srun and scontrol that tell what they were given.
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(
        '#!/bin/bash\npwd; printf "<%s>\\n" "$MASTER_ADDR" "$MASTER_PORT" "$@"\n'
        'trap "echo told to end; exit 130" TERM\n'
        "for ((i = 0; i < 100 * ${SECONDS_TO_RUN:-0}; i++)); do sleep 0.01; done\n"
        "exit ${SRUN_CODE:-0}\n"
    )
    (tools / "scontrol").write_text('#!/bin/bash\n[ "$1" = show ] && printf "n1\\nn2\\n" || echo "scontrol $*"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(done.stdout)

    def submit(**environment: str) -> subprocess.CompletedProcess[str]:
        job = {"SLURM_JOB_ID": "20001", "SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{tools}:{os.environ['PATH']}"}
        return subprocess.run(
            [
                "timeout",
                *(["--foreground", "-s", "USR1", "1"] if "SECONDS_TO_RUN" in environment else ["60"]),
                "bash",
                str(script),
            ],
            capture_output=True,
            text=True,
            env={**ENVIRONMENT, **job, **environment},
            cwd=tmp_path,
            timeout=60,
        )

    ran = submit()
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[:3] == [str(project), "<n1>", "<10001>"]
    assert "<--kill-on-bad-exit=1>" in ran.stdout
    assert "<run>\n<my recipe.yaml>\n<--set>\n<stages.sft.epochs=2>\n<--set>\n<name=big>" in ran.stdout
    assert "requeue" not in ran.stdout
    assert submit(SRUN_CODE="2").returncode == 2
    lost = submit(SRUN_CODE="5")
    assert (lost.returncode, lost.stdout.splitlines()[-1]) == (0, "scontrol requeue 20001")
    assert submit(SRUN_CODE="5", SLURM_RESTART_COUNT="3").returncode == 5
    up = submit(SECONDS_TO_RUN="30")
    assert up.stdout.splitlines()[-2:] == ["told to end", "scontrol requeue 20001"], up


def test_scripts_are_valid_shell_and_refuse_what_a_run_would(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    recipe = Path("my recipe.yaml")
    for options in (
        ScriptOptions("slurm", nodes=2, gpus_per_node=8),
        ScriptOptions("torchrun", nodes=1, max_restarts=0),
        ScriptOptions("torchrun", nodes=2, processes_per_node=4),
    ):
        overrides = ["launch.device=cuda"] if options.gpus_per_node else ["name=x.y"]
        text = launch_script(recipe, overrides, options, directory=project)
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
        per_node = options.gpus_per_node or options.processes_per_node or 2
        assert ("--set launch.num_processes=" in text) == (per_node != 2)
        assert ("#SBATCH --gpus-per-node=8\n" in text) == (options.kind == "slurm")
    with pytest.raises(RecipeError, match="learning_rat"):
        launch_script(recipe, ["stages.sft.learning_rat=1"], ScriptOptions("slurm"), directory=project)
    with pytest.raises(RecipeError, match=r"launch\.device: cpu"):
        launch_script(recipe, [], ScriptOptions("slurm", gpus_per_node=8), directory=project)
    with pytest.raises(RecipeError, match="leaves open"):
        launch_script(recipe, ["launch.num_processes=null"], ScriptOptions("slurm"), directory=project)
    with pytest.raises(RecipeError, match="isn't an option of sbatch"):
        launch_script(recipe, [], ScriptOptions("slurm", sbatch=("rm -r x",)), directory=project)
    with pytest.raises(DataError, match="isn't there"):
        launch_script(recipe, ["stages.sft.data.0.path=gone.jsonl"], ScriptOptions("slurm"), directory=project)


def test_an_existing_file_is_kept_and_torch_stays_unloaded(project: Path, tmp_path: Path) -> None:
    out = tmp_path / "job.sh"
    arguments = ["launch-script", "my recipe.yaml", "--torchrun", "--out", str(out)]
    loads = "import sys; from finetune.cli import main; code = main(sys.argv[1:]); print('torch' in sys.modules, code)"
    done = subprocess.run(
        [command()[0], "-c", loads, *arguments], cwd=project, capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.stdout.split() == [str(out), "False", "0"], done.stderr
    assert os.access(out, os.X_OK)
    again = finetune(project, *arguments)
    assert again.returncode == 2
    assert "there already" in again.stderr


def test_tasks_of_srun_that_do_not_share_the_runs_folder_are_told_so(project: Path, tmp_path: Path) -> None:
    """Also shows that both have joined: each names the other's folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_inputs(elsewhere)
    task = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "2"}
    arguments = ["run", "recipes/llama_sft.yaml", "--set", "launch.timeout_seconds=10"]
    processes = [
        subprocess.Popen(
            command(*arguments),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **ENVIRONMENT,
                **STEP,
                **task,
                "SLURM_JOB_ID": str(os.getpid()),
                "SLURM_JOB_NODELIST": "localhost",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
            },
        )
        for rank, folder in enumerate((project, elsewhere))
    ]
    for process in processes:
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 2, stderr
        assert f"(rank 1) in {elsewhere}/outputs/llama-sft" in stderr
        assert f"the run's folder is {project}/outputs/llama-sft" in stderr
        assert "at:  output_dir" in stderr
