"""``evaluate``: one table over several models, and the gate on it."""

from __future__ import annotations

import json
from typing import Any

from finetune.evaluate.settings import EvaluateSettings
from finetune.files import write_json
from finetune.stages.base import STAGES, StageContext, StageKind, StageSettings


class EvaluateStage(EvaluateSettings, StageSettings):
    pass


def run(context: StageContext) -> dict[str, Any]:
    from finetune.evaluate.gate import check_gate
    from finetune.evaluate.run import evaluate_models

    settings: EvaluateStage = context.settings
    names = list(settings.models) or [input_name(context)]
    models = {name: context.models[name] for name in names}
    reference = settings.reference
    if reference is not None and reference not in models:
        models = {reference: context.models[reference], **models}
    results = evaluate_models(models, reference=reference, settings=settings, device=context.launch.device or "cpu")
    # Written first: a model that fails the gate is looked at, too.
    write_json(context.folder / "evaluation.json", results)
    check_gate(results, settings=settings, reference=reference)
    return {"models": json.loads(json.dumps(results))}


def input_name(context: StageContext) -> str:
    """The name under which the stage's ``from:`` model stands in the table."""
    return next(name for name, path in context.models.items() if path == context.input_model)


def data_files(settings: EvaluateStage) -> list[str]:
    files = [settings.perplexity] if settings.perplexity else []
    return files + (settings.exact_match.data_files() if settings.exact_match else [])


def extra_inputs(settings: EvaluateStage) -> list[str]:
    return [*settings.models, *([settings.reference] if settings.reference else [])]


STAGES.register("evaluate")(
    StageKind(settings=EvaluateStage, run=run, yields_model=False, data_files=data_files, extra_inputs=extra_inputs)
)
