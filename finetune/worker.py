"""Run one stage, or one rank of a stage, in a process of its own.

    python -m finetune.worker stage RUN_DIR STAGE      started by the pipeline, once a stage
    python -m finetune.worker rank  RUN_DIR STAGE      started by torch.distributed's launcher, once a rank
    python -m finetune.worker quantize FOLDER          the same, once a rank of a quantization; FOLDER says of what

A process a stage gives each its own peak memory and lets a killed one be repeated. The worker reads the resolved
recipe of the run folder, so that it needs no other input.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from finetune.artifact import BEFORE_NAME, MANIFEST_NAME, Manifest, read_manifest, record_files, write_manifest
from finetune.errors import FinetuneError, InterruptedRunError, resource_error
from finetune.files import write_json
from finetune.processes import die_with_parent
from finetune.recipe import LoadedRecipe, Stage, load_recipe
from finetune.stages.base import BASE_MODEL, StageContext

STARTED_NAME = "started.json"
"""What an unfinished stage was begun with: {"fingerprint", "deciding", "parents", "accept_changes"}. The manifest
replaces it."""
ERROR_VARIABLE = "FINETUNE_WORKER_ERROR_FILE"
UNRECORDED = (MANIFEST_NAME, STARTED_NAME, BEFORE_NAME)
RECORDED_PACKAGES = ("finetune", "torch", "transformers", "compressed-tensors", "safetensors", "tokenizers")


def model_folder(loaded: LoadedRecipe, name: str) -> Path:
    """The model folder of an earlier stage, or the recipe's own for BASE_MODEL."""
    if name == BASE_MODEL:
        from finetune.model.load import resolve_model

        assert loaded.recipe.model.path is not None
        return resolve_model(loaded.recipe.model.path)
    stage = next(stage for stage in loaded.stages if stage.name == name)
    return loaded.run_dir / stage.folder_name / "model"


def stage_context(loaded: LoadedRecipe, stage: Stage) -> StageContext:
    history, models = [], {}
    for earlier in loaded.stages[: stage.index - 1]:
        manifest = read_manifest(loaded.run_dir / earlier.folder_name)
        if manifest is None:
            continue
        history.append(
            {
                "name": earlier.name,
                "kind": earlier.kind,
                "input": earlier.input,
                "settings": earlier.settings.resolved(),
                "metrics": manifest.metrics,
                "seconds": manifest.seconds,
            }
        )
        if earlier.implementation.yields_model:
            models[earlier.name] = loaded.run_dir / earlier.folder_name / "model"
    if BASE_MODEL in (stage.input, *stage.extra_inputs):
        models[BASE_MODEL] = model_folder(loaded, BASE_MODEL)
    recipe = loaded.recipe
    return StageContext(
        name=stage.name,
        settings=stage.settings,
        seed=recipe.seed,
        model=recipe.model,
        launch=recipe.launch,
        zero=recipe.zero,
        run_dir=loaded.run_dir,
        folder=loaded.run_dir / stage.folder_name,
        input_model=models[stage.input] if stage.input else None,
        models=models,
        history=tuple(history),
        accept_changes=_accepts_changes(loaded.run_dir / stage.folder_name),
        recipe_name=recipe.name,
    )


def _accepts_changes(folder: Path) -> bool:
    started = folder / STARTED_NAME
    return started.is_file() and bool(json.loads(started.read_text(encoding="utf-8")).get("accept_changes"))


def execute(loaded: LoadedRecipe, stage: Stage, *, publish: bool = True) -> dict[str, Any]:
    """Run a stage and, where ``publish``, write its manifest: from then on it is done."""
    start = time.monotonic()
    context = stage_context(loaded, stage)
    metrics = stage.implementation.run(context)
    if not publish:
        return metrics
    started = json.loads((context.folder / STARTED_NAME).read_text(encoding="utf-8"))
    usage = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    metrics["peak_rss_bytes"] = max(resource.getrusage(who).ru_maxrss for who in usage) * 1024
    write_manifest(
        context.folder,
        Manifest(
            kind=stage.kind,
            name=stage.name,
            fingerprint=started["fingerprint"],
            recipe_sha256=loaded.sha256(),
            parents=started["parents"],
            files=record_files(context.folder, exclude=UNRECORDED),
            seconds=round(time.monotonic() - start, 3),
            metrics=metrics,
            settings=started["deciding"],
            versions=_versions(),
        ),
    )
    (context.folder / STARTED_NAME).unlink()
    return metrics


def _versions() -> dict[str, str]:
    versions = {}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def begin_stage(
    folder: Path,
    *,
    fingerprint: str,
    deciding: dict[str, Any],
    parents: dict[str, str],
    keep: bool,
    accept_changes: bool = False,
) -> None:
    """Make the stage's folder ready; what an earlier try left there stays only where ``keep``."""
    if folder.exists() and not keep:
        # The manifest goes first: a folder half removed must not look finished.
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if accept_changes and not (folder / BEFORE_NAME).exists() and (folder / STARTED_NAME).exists():
        # Until the changes are taken, this is what the checkpoints were written with.
        shutil.copyfile(folder / STARTED_NAME, folder / BEFORE_NAME)
    elif not accept_changes:
        (folder / BEFORE_NAME).unlink(missing_ok=True)
    begun = {"fingerprint": fingerprint, "deciding": deciding, "parents": parents, "accept_changes": accept_changes}
    write_json(folder / STARTED_NAME, begun)


def quiet_libraries() -> None:
    """Keep libraries' notices and, where nobody watches, their progress bars off the terminal."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # OpenMP's threads spin while they wait: with other work on the cores a step of a small model on 2 threads took
    # 1.6 to 8.6 s spinning and 0.6 to 0.7 s without. Read when torch is loaded, which is later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Libraries' own bars (compressed-tensors has four a load); ours say `disable=` themselves and aren't touched.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # DeepSpeed, where it is installed, is imported with accelerate and logs to standard output, which carries results.
    logging.getLogger("DeepSpeed").addFilter(_to_standard_error)
    # A machine without the fonts of its formulas, which no plot here has, gets 21 lines of them.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _to_standard_error(record: logging.LogRecord) -> bool:
    print(f"{record.name}: {record.getMessage()}", file=sys.stderr, flush=True)
    return False


def main(arguments: list[str]) -> int:
    die_with_parent()
    quiet_libraries()
    if arguments[0] == "quantize":
        from finetune.stages.quantize import quantize_rank

        quantize_rank(Path(arguments[1]))
        return 0
    role, run_dir, name = arguments
    loaded = load_recipe(Path(run_dir) / "recipe.yaml")
    stage = loaded.stage(name, flag=name)
    if role == "stage":
        try:
            execute(loaded, stage)
        except FinetuneError as error:
            _report(error)
            return error.exit_code
        except OSError as error:
            refused = resource_error(error)
            if refused is None:
                raise
            _report(refused)
            return refused.exit_code
        return 0
    from finetune.engine.launch import rank_process

    assert stage.implementation.run_rank is not None
    launch = loaded.recipe.launch
    with rank_process(launch.device or "cpu", timeout_seconds=launch.timeout_seconds):
        stage.implementation.run_rank(stage_context(loaded, stage))
    return 0


def _report(error: FinetuneError) -> None:
    """Hand an error to the pipeline, which raises it again there."""
    path = os.environ.get(ERROR_VARIABLE)
    if path is None:
        print(error, file=sys.stderr)
        return
    write_json(Path(path), {"kind": type(error).__name__, "what": error.what, "where": error.where, "fix": error.fix})


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        # The terminal's ^C reaches every process; the one that was started by hand says what it means.
        sys.exit(InterruptedRunError.exit_code)
