"""``{"text": ...}``: a document to go on writing, for pretraining and calibration."""

from __future__ import annotations

from typing import Any

from finetune.data.formats import FORMATS, Document, RowFormat, text_field


def parse_text(row: dict[str, Any], place: str) -> Document:
    return Document(text_field(row, "text", place))


FORMATS.register("text")(RowFormat(required=("text",), optional=(), parse=parse_text))
