"""``quantize``: a model to int8 or int4, block by block, with calibration."""

from __future__ import annotations

from typing import Any

from finetune.quant.settings import QuantizeSettings
from finetune.stages.base import STAGES, StageContext, StageKind, StageSettings


class QuantizeStage(QuantizeSettings, StageSettings):
    pass


def run(context: StageContext) -> dict[str, Any]:
    from finetune.quant.quantize import quantize_model

    assert context.input_model is not None
    return quantize_model(
        context.input_model,
        settings=context.settings,
        out=context.folder / "model",
        seed=context.seed,
        device=context.launch.device or "cpu",
    )


def data_files(settings: QuantizeStage) -> list[str]:
    return [source.path for source in settings.calibration.data] if settings.calibration else []


STAGES.register("quantize")(StageKind(settings=QuantizeStage, run=run, yields_model=True, data_files=data_files))
