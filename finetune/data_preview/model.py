"""The tokenizer and the configuration that a stage's model will have, also before there is that model."""

from __future__ import annotations

from typing import Any

from finetune.pipeline import plan_stages
from finetune.recipe import LoadedRecipe, Stage
from finetune.stages.base import BASE_MODEL
from finetune.train.settings import TrainSettings
from finetune.worker import model_folder


def stage_model(loaded: LoadedRecipe, stage: Stage) -> tuple[Any, Any, str]:
    """(tokenizer, configuration, where they come from).

    A stage hands its model's on as they are, so an earlier stage that isn't done counts as the one before it; the
    tokenizer of a ``scratch`` model is learned here as its first stage would learn it.
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
        from finetune.model.scratch import scratch_config
        from finetune.stages.training import scratch_tokenizer

        scratch = loaded.recipe.model.scratch
        assert scratch is not None
        assert isinstance(stage.settings, TrainSettings)
        where = "learned from " + ("its own data" if scratch.tokenizer.data else f"the data of stage {stage.name}")
        tokenizer = scratch_tokenizer(scratch, stage.settings.data)
        return tokenizer, scratch_config(scratch.config, tokenizer), where
    folder = model_folder(loaded, source)
    # First: a broken config.json would be blamed on the tokenizer, which reads it, too.
    config = load_config(folder)
    return load_tokenizer(folder), config, str(loaded.recipe.model.path if source == BASE_MODEL else folder)
