"""A preview as one HTML page that needs nothing else: no script or style from elsewhere, all text escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from finetune import __version__
from finetune.data_preview.lengths import Lengths
from finetune.data_preview.preview import Preview
from finetune.data_preview.samples import SampleRow
from finetune.data_preview.tables import (
    NOTHING_HELD_OUT,
    batching_lines,
    count_table,
    figures,
    leakage_line,
    leakage_summary,
    percentile_names,
    repeat_line,
    settings_line,
    similarity_line,
    speed_line,
)
from finetune.data_preview.visible import Shown, printable, visible
from finetune.errors import RecipeError
from finetune.files import write_text

MARK = "<!-- finetune data -->"
"""What a page begins with, so that only a page is replaced by a page."""
MOST_PIECES = 4000
"""Pieces of a row that a page shows, at about 80 bytes each."""
MOST_ROWS = 12
"""Of those that one row was split into."""
WIDTH, BAR_HEIGHT = 640, 150
"""Of the histogram, in its own units."""


def page_path(name: str) -> Path:
    """Where a page goes. Raises RecipeError, before any work, where that would replace something else."""
    path = Path(name)
    if path.is_dir():
        raise RecipeError("--html is a folder", where=name, fix="name a file, such as data.html")
    if path.exists() and not path.read_bytes()[:200].lstrip().startswith(MARK.encode()):
        raise RecipeError("--html would replace a file that is no such page", where=name, fix="name another one")
    return path


def write_page(preview: Preview, path: Path) -> None:
    write_text(path, page(preview))


def page(preview: Preview) -> str:
    environment = Environment(
        loader=PackageLoader("finetune.data_preview", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["printable"] = printable
    return environment.get_template("page.html.j2").render(
        mark=MARK,
        version=__version__,
        preview=preview,
        settings=settings_line(preview),
        counts=count_table(preview),
        figures=figures(preview),
        speed=speed_line(preview),
        batching=batching_lines(preview),
        histograms=[(name, histogram(lengths), percentile_names(lengths)) for name, lengths in preview.lengths.items()],
        repeats=repeat_line(preview.repeats),
        similarity=similarity_line(preview.similarity),
        leakage=[(found, leakage_line(found)) for found in preview.leakage],
        nothing_held_out=NOTHING_HELD_OUT,
        leakage_similarity=leakage_summary(preview.similarity),
        samples=[(sample, [(row, *tokens(row)) for row in sample.rows[:MOST_ROWS]]) for sample in preview.samples],
    )


def tokens(row: SampleRow) -> tuple[list[dict[str, Any]], int]:
    """(the row's tokens for the page, how many are left out at its end)"""
    shown = visible(row.pieces)
    return [_token(part) for part in shown[:MOST_PIECES]], max(0, len(shown) - MOST_PIECES)


def _token(part: Shown) -> dict[str, Any]:
    piece = part.piece
    classes = ["t"]
    if piece.learnt:
        classes.append("l")
    if piece.special:
        classes.append("c")
    if piece.stop and piece.learnt:
        classes.append("s")
    ids = " ".join(map(str, piece.ids))
    what = "learnt" if piece.learnt else "context"
    kind = ", stop token" if piece.stop else ", control token" if piece.special else ""
    # A token's last line break stands behind its box, which would reach into the next line.
    text = part.text.rstrip("\n")
    return {
        "text": text,
        "after": part.text[len(text) :],
        "classes": " ".join(classes),
        "tip": f"{ids} · {what}{kind}",
    }


def histogram(lengths: Lengths) -> dict[str, Any]:
    """Bars and ticks of the lengths as numbers for an SVG of WIDTH by BAR_HEIGHT and a line of labels."""
    most, width = max(lengths.counts), WIDTH / len(lengths.counts)
    bars = [
        {
            "x": round(index * width + 1, 2),
            "y": round(BAR_HEIGHT * (1 - count / most), 2),
            "width": round(max(1.0, width - 2), 2),
            "height": round(BAR_HEIGHT * count / most, 2),
            "title": f"{low:,} to {high - 1:,} tokens: {count:,} rows",
        }
        for index, (count, low, high) in enumerate(zip(lengths.counts, lengths.edges, lengths.edges[1:], strict=False))
    ]
    every = max(1, -(-len(lengths.edges) // 8))
    ticks = [
        {"x": round(index * width, 2), "label": f"{edge:,}"}
        for index, edge in enumerate(lengths.edges)
        if index % every == 0
    ]
    return {"bars": bars, "ticks": ticks, "width": WIDTH, "height": BAR_HEIGHT, "most": f"{most:,}"}
