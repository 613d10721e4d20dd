"""``export``: a folder ready for the Hub, proved by loading it in a fresh process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.export.settings import ExportSettings
from finetune.stages.base import BASE_MODEL, STAGES, StageContext, StageKind, StageSettings


class ExportStage(ExportSettings, StageSettings):
    pass


def run(context: StageContext) -> dict[str, Any]:
    from finetune.export.folder import export_model
    from finetune.export.hub import push_folder
    from finetune.export.model_card import CardFacts

    settings: ExportStage = context.settings
    assert context.input_model is not None
    source = next(name for name, path in context.models.items() if path == context.input_model)
    evaluation = next(
        (stage for stage in reversed(context.history) if stage["kind"] == "evaluate" and source in _models(stage)), None
    )
    card = CardFacts(
        title=settings.title or context.recipe_name,
        license=settings.license,
        base_model=settings.base_model or _hub_id(context.model.path),
        datasets=settings.datasets,
        tags=settings.tags,
        language=settings.language,
        stages=lineage(source, context.history),
        evaluation=_models(evaluation) if evaluation else {},
        evaluated_as=source,
        reference=evaluation["settings"]["reference"] if evaluation else None,
        evaluation_settings=evaluation["settings"] if evaluation else {},
    )
    out = Path(settings.folder) if settings.folder else context.folder / "model"
    # Verified in a fresh process before it appears.
    export_model(context.input_model, out=out, card=card, repo_id=settings.hub.repo_id if settings.hub else None)
    metrics: dict[str, Any] = {"folder": str(out), "verified": "loaded in a fresh process"}
    if settings.hub is not None:
        metrics["url"] = push_folder(out, hub=settings.hub)
    return metrics


def lineage(source: str, history: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """The stages that made ``source``, from the first on."""
    by_name = {stage["name"]: stage for stage in history}
    chain: list[dict[str, Any]] = []
    name: str | None = source
    while name is not None and name != BASE_MODEL:
        chain.insert(0, by_name[name])
        name = by_name[name]["input"]
    return chain


def _models(stage: dict[str, Any]) -> dict[str, Any]:
    models: dict[str, Any] = stage["metrics"].get("models", {})
    return models


def _hub_id(path: str | None) -> str | None:
    """The recipe's model where it is a Hub id; a folder of this machine says nothing to a reader of the card."""
    return path if path is not None and not Path(path).exists() else None


STAGES.register("export")(StageKind(settings=ExportStage, run=run, yields_model=True))
