"""``quantize``: a model to int8 or int4, block by block, with calibration, on one process or several."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from finetune.errors import FinetuneError, ResourceError
from finetune.files import write_json
from finetune.quant.settings import CalibrationSettings, QuantizeSettings
from finetune.stages.base import STAGES, StageContext, StageKind, StageSettings
from finetune.train.settings import TrainSettings


class QuantizeStage(QuantizeSettings, StageSettings):
    not_deciding: ClassVar[frozenset[str]] = StageSettings.not_deciding | frozenset(
        {"verify", "activation_memory", "num_processes"}
    )
    calibration_is_complete: ClassVar[bool] = False


def complete(settings: QuantizeStage, ancestors: Sequence[StageSettings]) -> QuantizeStage:
    """Where the recipe names no text to calibrate on: what the model was trained on last, at most as long as there."""
    calibration = settings.calibration
    trained: Any = next((stage for stage in ancestors if isinstance(stage, TrainSettings)), None)
    if calibration is None and settings.uses_calibration and trained is not None:
        calibration = CalibrationSettings()
    if calibration is not None and not calibration.data and trained is not None:
        values = {**calibration.resolved(), "data": [source.resolved() for source in trained.data]}
        if "max_seq_length" not in calibration.model_fields_set:
            values["max_seq_length"] = min(calibration.max_seq_length, trained.max_seq_length)
        settings = settings.model_copy(update={"calibration": CalibrationSettings.model_validate(values)})
    settings.check_calibration()
    return settings


def run(context: StageContext) -> dict[str, Any]:
    assert context.input_model is not None
    return quantize(
        context.input_model,
        settings=context.settings,
        out=context.folder / "model",
        seed=context.seed,
        device=context.launch.device or "cpu",
        timeout_seconds=context.launch.timeout_seconds,
    )


def quantize(
    model_folder: Path,
    *,
    settings: QuantizeSettings,
    out: Path,
    seed: int,
    device: str,
    restart: bool = False,
    timeout_seconds: float | None = None,
) -> dict[str, Any]:
    """``quantize_model`` in this process, or on ``settings.num_processes`` that it starts and waits for; what comes out
    is loaded in a fresh process.

    ``timeout_seconds`` is how long a rank may wait for another. Raises what ``quantize_model`` does, ResourceError for
    more processes than GPUs or where one was lost. What the ranks but the first wrote is kept only then.
    """
    from finetune.engine.device import require_gpus
    from finetune.engine.launch import TIMEOUT_SECONDS, run_ranks
    from finetune.export.verify import load_in_fresh_process
    from finetune.quant.quantize import quantize_model

    if settings.num_processes == 1:
        return quantize_model(
            model_folder,
            settings=settings,
            out=out,
            seed=seed,
            device=device,
            verify=load_in_fresh_process,
            restart=restart,
        )
    require_gpus(settings.num_processes, device, where="num_processes")
    logs = out.with_name(out.name + ".logs")
    with tempfile.TemporaryDirectory(prefix="finetune-") as scratch:
        job = {
            "model_folder": str(model_folder),
            "of_a_stage": isinstance(settings, QuantizeStage),
            "settings": settings.resolved(),
            "out": str(out),
            "seed": seed,
            "device": device,
            "restart": restart,
            "timeout_seconds": timeout_seconds or TIMEOUT_SECONDS,
        }
        write_json(Path(scratch) / _JOB_NAME, job)
        try:
            run_ranks(
                ["-m", "finetune.worker", "quantize", scratch],
                num_processes=settings.num_processes,
                device=device,
                log_dir=logs,
            )
        except FinetuneError as error:
            if not isinstance(error, ResourceError):
                shutil.rmtree(logs, ignore_errors=True)
            raise
        shutil.rmtree(logs, ignore_errors=True)
        summary: dict[str, Any] = json.loads((Path(scratch) / _SUMMARY_NAME).read_text(encoding="utf-8"))
        return summary


_JOB_NAME, _SUMMARY_NAME = "job.json", "summary.json"


def quantize_rank(scratch: Path) -> None:
    """What each rank does that ``quantize`` starts."""
    from finetune.engine.launch import rank_process
    from finetune.export.verify import load_in_fresh_process
    from finetune.quant.quantize import quantize_model
    from finetune.quant.ranks import Ranks

    job: dict[str, Any] = json.loads((scratch / _JOB_NAME).read_text(encoding="utf-8"))
    kind = QuantizeStage if job["of_a_stage"] else QuantizeSettings
    with rank_process(job["device"], timeout_seconds=job["timeout_seconds"]) as (rank, size):
        summary = quantize_model(
            Path(job["model_folder"]),
            settings=kind.model_validate(job["settings"]),
            out=Path(job["out"]),
            seed=job["seed"],
            device=job["device"],
            verify=load_in_fresh_process,
            restart=job["restart"],
            ranks=Ranks(rank, size),
        )
        if rank == 0:
            write_json(scratch / _SUMMARY_NAME, summary)


def data_files(settings: QuantizeStage) -> list[str]:
    sources = settings.calibration.data if settings.calibration else []
    return [file for source in sources for file in source.data_files()]


STAGES.register("quantize")(
    StageKind(settings=QuantizeStage, run=run, yields_model=True, complete=complete, data_files=data_files)
)
