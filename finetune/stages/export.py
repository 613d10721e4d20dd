"""``export``: a folder ready for the Hub, proved by loading it in a fresh process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.export.settings import ExportSettings
from finetune.stages.base import STAGES, StageContext, StageKind, StageSettings


class ExportStage(ExportSettings, StageSettings):
    pass
