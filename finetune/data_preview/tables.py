"""The figures of a preview in words, the same on a terminal and on a page."""

from __future__ import annotations

from finetune.data.dataset import COUNTS
from finetune.data_preview.leakage import Leakage
from finetune.data_preview.lengths import Lengths
from finetune.data_preview.preview import Preview
from finetune.data_preview.repeats import Repeats
from finetune.data_preview.words import NGRAM_WORDS

NAMES = {
    "rows": "rows read",
    "kept": "rows kept",
    "skipped_invalid": "skipped: can't be used",
    "dropped_overlong": "dropped: too long",
    "dropped_without_target": "dropped: nothing to learn",
    "dropped_pieces": "pieces of split rows dropped",
    "truncated": "cut to max_seq_length",
    "split": "split at max_seq_length",
    "split_by_turn": "split by turns",
    "cut_to_last_turn": "only the last turn learnt",
    "empty_replies": "empty replies",
    "control_tokens_in_content": "control tokens written in texts",
    "texts_with_control_tokens": "texts with control tokens",
    "tokens": "tokens",
    "supervised_tokens": "learnt tokens",
}
"""What each of the counts is called. One without a name here is called by its own."""
ALWAYS = ("rows", "kept", "tokens", "supervised_tokens")


def settings_line(preview: Preview) -> str:
    return ", ".join(
        f"{name}: {str(value).lower() if isinstance(value, bool) else value}"
        for name, value in preview.settings.items()
    )


def count_table(preview: Preview) -> list[list[str]]:
    """Rows of (what, a figure for each of the preview's counts), those that are 0 everywhere left out."""
    columns = list(preview.counts)
    table = [["", *columns]]
    known = [*COUNTS, *(name for counts in preview.counts.values() for name in counts)]
    for name in dict.fromkeys(known):
        values = [preview.counts[column].get(name, 0) for column in columns]
        if any(values) or name in ALWAYS:
            table.append([NAMES.get(name, name.replace("_", " ")), *(f"{value:,}" for value in values)])
    shares = [counts["supervised_tokens"] / max(1, counts["tokens"]) for counts in preview.counts.values()]
    table.append(["learnt share", *(f"{share:.1%}" for share in shares)])
    return table


def figures(preview: Preview) -> list[tuple[str, str]]:
    """(figure, what it is): the few to look at first."""
    trained = [counts for name, counts in preview.counts.items() if name != "eval_data"]
    total = {name: sum(counts[name] for counts in trained) for name in ALWAYS}
    found = [
        (f"{sum(source.num_rows for source in preview.sources):,}", "rows read"),
        (f"{total['tokens']:,}", "tokens"),
        (f"{total['supervised_tokens'] / max(1, total['tokens']):.1%}", "of them learnt"),
    ]
    if preview.batching is not None:
        found.append((f"{preview.batching.num_steps:,}", "steps"))
        found.append((f"{preview.batching.padding_share:.1%}", "padding"))
    found.append((f"{preview.repeats.exact + preview.repeats.near:,}", "rows that repeat others"))
    if preview.leakage:
        leaking = sum(found.exact + found.near + found.same_prompt for found in preview.leakage)
        found.append((f"{leaking:,}", "held-out rows trained on"))
    return found


def speed_line(preview: Preview) -> str:
    return f"prepared at {preview.tokens_per_second:,.0f} tokens/s ({preview.seconds:.1f} s)"


def percentile_names(lengths: Lengths) -> list[tuple[str, str]]:
    names = {"0": "shortest", "50": "median", "100": "longest"}
    values = [(names.get(key, f"{key}%"), f"{value:,}") for key, value in lengths.percentiles.items()]
    return [*values, ("mean", f"{lengths.mean:,.1f}")]


def batching_lines(preview: Preview) -> list[str]:
    batching, limit = preview.batching, preview.settings["max_seq_length"]
    if batching is None:
        return []
    what = "rows, one a sequence"
    if batching.fill_rate is not None:
        what = f"packs of {limit:,} tokens, {batching.fill_rate:.1%} full"
    ranks = f"{batching.world_size} rank{'s' if batching.world_size > 1 else ''}"
    lines = [
        f"{batching.num_sequences:,} {what}; {batching.padding_share:.1%} of what is computed is padding",
        f"{batching.num_steps:,} steps of {batching.sequences_per_step:,} on {ranks}; "
        f"an epoch has {batching.steps_per_epoch:,}",
    ]
    if batching.held_out_rows:
        lines.append(f"{batching.held_out_rows:,} rows are held out of these (eval_rows)")
    return lines


def repeat_line(repeats: Repeats) -> str:
    return (
        f"{repeats.exact:,} of {repeats.num_rows:,} rows are the same as an earlier one, {repeats.near:,} more nearly; "
        f"{repeats.same_prompt:,} have an earlier one's prompt and go on otherwise"
    )


def similarity_line(similarity: float) -> str:
    return (
        f"Nearly: two rows have at least {similarity:.0%} of their {NGRAM_WORDS}-word sequences in common, whatever "
        "the case and punctuation; system prompts are left out."
    )


def leakage_line(found: Leakage) -> str:
    return (
        f"{found.exact:,} of {found.num_rows:,} are training rows, {found.near:,} more nearly; "
        f"{found.same_prompt:,} more have a training row's prompt"
    )


def leakage_summary(similarity: float) -> str:
    return (
        f"Nearly: at least {similarity:.0%} of its {NGRAM_WORDS}-word sequences stand in one training row. "
        "Long texts are compared in passages."
    )


NOTHING_HELD_OUT = "The recipe holds nothing out in a file: no eval_data, no evaluate stage."
