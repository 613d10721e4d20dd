"""``finetune data``: the preview on standard output, and as a page."""

from __future__ import annotations

import json
import sys

from finetune.data_preview.page import page_path, write_page
from finetune.data_preview.preview import preview_data
from finetune.data_preview.terminal import print_preview
from finetune.recipe import LoadedRecipe


def show_data(
    loaded: LoadedRecipe,
    *,
    stage: str | None,
    num_rows: int,
    seed: int | None,
    similarity: float,
    html: str | None,
    as_json: bool,
) -> None:
    """Print the preview of ``preview_data`` as text or JSON, and write it to the page ``html`` where that is given."""
    page = page_path(html) if html else None
    preview = preview_data(loaded, stage=stage, num_rows=num_rows, seed=seed, similarity=similarity)
    if page is not None:
        write_page(preview, page)
    if as_json:
        print(json.dumps(preview.as_json(), indent=2))
        return
    # A terminal of another encoding shows a letter's number rather than nothing at all.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    print_preview(preview, sys.stdout)
    if page is not None:
        print(f"\npage: {page}")
