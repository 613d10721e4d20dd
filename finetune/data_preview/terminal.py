"""A preview as text: in colour on a terminal, with brackets around what is learnt elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TextIO

from rich.console import Console
from rich.text import Text

from finetune.data_preview.lengths import Lengths
from finetune.data_preview.preview import Preview
from finetune.data_preview.repeats import Pair
from finetune.data_preview.samples import Sample, SampleRow
from finetune.data_preview.tables import (
    NOTHING_HELD_OUT,
    batching_lines,
    count_table,
    leakage_line,
    leakage_summary,
    percentile_names,
    repeat_line,
    settings_line,
    similarity_line,
    speed_line,
)
from finetune.data_preview.visible import Shown, printable, shortened, visible
from finetune.text_table import aligned

LEARNT_OPEN, LEARNT_CLOSE, STOP = "⟦", "⟧", "■"
STYLES = {
    (False, False): "dim",
    (False, True): "dim magenta",
    (True, False): "bold green",
    (True, True): "bold magenta",
}
"""By (learnt, special)."""
STOP_STYLE = "bold white on red"
LEFT_OUT_STYLE = "italic yellow"
BAR = 40
SHOWN_PAIRS = 3
SHOWN_ROWS = 3
"""Of those that one row was split into; a preference row has as many parts."""
EXCERPT = 72


def print_preview(preview: Preview, out: TextIO) -> None:
    console = Console(file=out, highlight=False, soft_wrap=True)
    colour = console.is_terminal and console.color_system is not None
    for line in preview_lines(preview):
        console.print(Text(line, style="bold" if colour and line and not line.startswith(" ") else ""))
    if preview.samples:
        console.print(Text("\nSamples", style="bold" if colour else ""))
        console.print(legend(colour=colour))
    for sample in preview.samples:
        for part in sample_lines(sample, colour=colour):
            console.print(part)


def preview_lines(preview: Preview) -> Iterator[str]:
    """All but the samples."""
    yield f"{preview.recipe}: the data of stage `{preview.stage}`, as the model will see it"
    yield f"  tokenizer: {preview.tokenizer}"
    yield f"  {settings_line(preview)}"
    others = [name for name in preview.training_stages if name != preview.stage]
    if others:
        yield f"  other training stages: {', '.join(others)} (--stage shows one)"
    yield ""
    yield "Sources"
    rows = [["path", "format", "rows read", "can't be read"]]
    rows += [
        [source.path, source.format, f"{source.num_rows:,}", f"{source.num_invalid:,}"] for source in preview.sources
    ]
    yield from (f"  {line}" for line in aligned(rows).splitlines())
    yield from (
        f"  first that can't be read: {printable(source.first_invalid)}"
        for source in preview.sources
        if source.first_invalid
    )
    yield ""
    yield "Rows"
    yield from (f"  {line}" for line in aligned(count_table(preview)).splitlines())
    if preview.first_refused:
        yield f"  first that is skipped though it can be read: {printable(preview.first_refused)}"
    yield f"  {speed_line(preview)}"
    for name, lengths in preview.lengths.items():
        yield ""
        yield f"Tokens a row{'' if name == 'data' else f', {name}'}"
        yield from histogram_lines(lengths)
        yield "  " + ", ".join(f"{name} {value}" for name, value in percentile_names(lengths))
    if preview.batching is not None:
        yield ""
        yield "Batches"
        yield from (f"  {line}" for line in batching_lines(preview))
    yield ""
    yield "Repeats"
    yield from (f"  {line}" for line in repeat_lines(preview))
    yield ""
    yield "Held-out rows in the training data"
    yield from (f"  {line}" for line in leakage_lines(preview))


def histogram_lines(lengths: Lengths) -> Iterator[str]:
    labels = [f"{low:,}-{high - 1:,}" for low, high in zip(lengths.edges, lengths.edges[1:], strict=False)]
    width, most = max(map(len, labels)), max(lengths.counts)
    for label, count in zip(labels, lengths.counts, strict=True):
        bar = "█" * round(BAR * count / most) or ("▏" if count else "")
        yield f"  {label:>{width}}  {bar} {count:,}".rstrip()


def repeat_lines(preview: Preview) -> list[str]:
    repeats = preview.repeats
    lines = [repeat_line(repeats)]
    for pair in repeats.exact_pairs[:SHOWN_PAIRS]:
        lines += pair_lines(pair, f"same x{pair.count}")
    for pair in repeats.near_pairs[:SHOWN_PAIRS]:
        lines += pair_lines(pair, f"{pair.similarity:.0%}")
    return [*lines, similarity_line(preview.similarity)]


def leakage_lines(preview: Preview) -> list[str]:
    if not preview.leakage:
        return [NOTHING_HELD_OUT]
    lines = []
    for found in preview.leakage:
        lines.append(f"{found.name} ({found.path}): {leakage_line(found)}")
        for pair in found.pairs[:SHOWN_PAIRS]:
            lines += pair_lines(pair, f"{pair.similarity:.0%}")
    return [*lines, leakage_summary(preview.similarity)]


def pair_lines(pair: Pair, how: str) -> list[str]:
    def line(place: str, excerpt: str) -> str:
        text = printable(excerpt)
        return f"{place}  {text[:EXCERPT]}{'…' if len(text) > EXCERPT else ''}"

    label = f"  {how}"
    return [f"{label:<10} {line(pair.first, pair.first_excerpt)}", f"{'':<10} {line(pair.second, pair.second_excerpt)}"]


def sample_lines(sample: Sample, *, colour: bool) -> Iterator[Text]:
    yield Text("")
    head = f"{printable(sample.place)}  {sample.kind}"
    yield Text(f"── {head}{''.join(f'; {printable(note)}' for note in sample.notes)}", style="bold" if colour else "")
    for row in sample.rows[:SHOWN_ROWS]:
        label = f"{row.label}: " if row.label else ""
        yield Text(f"   {label}{row.num_tokens:,} tokens, {row.num_learnt:,} learnt", style="dim" if colour else "")
        text = _coloured(row) if colour else Text(_bracketed(row))
        text.rstrip()  # the line ends anyway
        yield text
    if len(sample.rows) > SHOWN_ROWS:
        yield Text(f"   … and {len(sample.rows) - SHOWN_ROWS:,} more rows of it", style="dim" if colour else "")


def legend(*, colour: bool) -> Text:
    if not colour:
        return Text(
            f"  {LEARNT_OPEN}learnt{LEARNT_CLOSE}  {STOP} behind a stop token that is learnt  ↵ newline  · space  → tab"
        )
    text = Text("  ")
    for words, style in (
        ("learnt", STYLES[True, False]),
        ("context", STYLES[False, False]),
        ("control token", STYLES[False, True]),
        ("stop token, learnt", STOP_STYLE),
    ):
        text.append(words, style=style).append("  ")
    return text.append("↵ newline  · space  → tab", style="dim")


def _coloured(row: SampleRow) -> Text:
    parts = (
        (_left_out(part), LEFT_OUT_STYLE) if isinstance(part, int) else (part.text, _style(part))
        for part in shortened(visible(row.pieces))
    )
    return Text.assemble(
        *(("".join(words for words, _ in run), style) for style, run in groupby(parts, key=lambda part: part[1]))
    )


def _style(part: Shown) -> str:
    piece = part.piece
    return STOP_STYLE if piece.stop and piece.learnt else STYLES[piece.learnt, piece.special]


def _bracketed(row: SampleRow) -> str:
    written, learnt = [], False
    for part in shortened(visible(row.pieces)):
        if isinstance(part, int):
            written.append(_left_out(part))
            continue
        if part.piece.learnt != learnt:
            learnt = part.piece.learnt
            written.append(LEARNT_OPEN if learnt else LEARNT_CLOSE)
        written.append(part.text + (STOP if part.piece.stop and part.piece.learnt else ""))
    return "".join([*written, LEARNT_CLOSE if learnt else ""])


def _left_out(count: int) -> str:
    return f" … {count:,} tokens … "
