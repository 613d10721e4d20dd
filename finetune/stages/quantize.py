"""``quantize``: a model to int8 or int4, block by block, with calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from finetune.quant.settings import CalibrationSettings, QuantizeSettings
from finetune.stages.base import STAGES, StageContext, StageKind, StageSettings
from finetune.train.settings import TrainSettings


class QuantizeStage(QuantizeSettings, StageSettings):
    not_deciding: ClassVar[frozenset[str]] = StageSettings.not_deciding | {"verify", "activation_memory"}
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
    from finetune.export.verify import load_in_fresh_process
    from finetune.quant.quantize import quantize_model

    assert context.input_model is not None
    return quantize_model(
        context.input_model,
        settings=context.settings,
        out=context.folder / "model",
        seed=context.seed,
        device=context.launch.device or "cpu",
        verify=load_in_fresh_process,
    )


def data_files(settings: QuantizeStage) -> list[str]:
    return [source.path for source in settings.calibration.data] if settings.calibration else []


STAGES.register("quantize")(
    StageKind(settings=QuantizeStage, run=run, yields_model=True, complete=complete, data_files=data_files)
)
