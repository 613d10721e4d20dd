"""The tokenizer that a stage's model will have, also before there is that model."""

from __future__ import annotations

from typing import Any

from finetune.pipeline import plan_stages
from finetune.recipe import LoadedRecipe, Stage
from finetune.stages.base import BASE_MODEL
from finetune.train.settings import TrainSettings
from finetune.worker import model_folder


def stage_tokenizer(loaded: LoadedRecipe, stage: Stage) -> tuple[Any, str]:
    """(tokenizer, where it comes from). A stage hands its model's tokenizer on as it is, so an earlier stage that isn't
    done counts as the one before it; that of a ``scratch`` model is learned here as its first stage would learn it.

    Raises RecipeError, CheckpointError and HubError as a run would for a model that can't be had.
    """
    from finetune.model.load import load_config, load_tokenizer

    states = {planned.stage.name: planned.state for planned in plan_stages(loaded)}
    stages = {earlier.name: earlier for earlier in loaded.stages}
    source = stage.input
    while source in stages and states[source] != "done":
        stage = stages[source]
        source = stage.input
    if source is None:
        from finetune.stages.training import scratch_tokenizer

        scratch = loaded.recipe.model.scratch
        assert scratch is not None
        assert isinstance(stage.settings, TrainSettings)
        where = "learned from " + ("its own data" if scratch.tokenizer.data else f"the data of stage {stage.name}")
        return scratch_tokenizer(scratch, stage.settings.data), where
    folder = model_folder(loaded, source)
    # A broken config.json would be blamed on the tokenizer, which reads it, too.
    load_config(folder)
    return load_tokenizer(folder), str(loaded.recipe.model.path if source == BASE_MODEL else folder)
