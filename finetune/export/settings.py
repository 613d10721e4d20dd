"""The ``export:`` section: where the finished folder goes and what its model card says."""

from __future__ import annotations

from pydantic import Field

from finetune.config.section import Section


class HubSettings(Section):
    repo_id: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    """The repository, as owner/name."""
    private: bool = True
    """Whether a repository that is created now is private. One that exists keeps what it is."""
    commit_message: str = "Upload model"


class ExportSettings(Section):
    folder: str | None = None
    """The folder to write; absent: ``model/`` in the stage's own folder."""
    title: str | None = None
    """The model card's heading; absent: the folder's or the recipe's name."""
    license: str | None = None
    """The model's license, as the Hub spells it (apache-2.0, mit, llama3.1). Absent: the card names none."""
    base_model: str | None = None
    """The Hub id of the model this one was made from; absent: the recipe's `model.path` where that is a Hub id."""
    datasets: list[str] = Field(default_factory=list)
    """Hub ids of the training data, for the card."""
    tags: list[str] = Field(default_factory=list)
    """Further tags for the card."""
    language: list[str] = Field(default_factory=list)
    """Language codes (en, fr), for the card."""
    hub: HubSettings | None = None
    """Where to upload the folder; absent: nowhere."""
