"""One pass over the rows of a stage as they are read: their formats, a sample, repeats and leakage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from finetune.data.formats import Example
from finetune.data.settings import DatasetSettings
from finetune.data.sources import RowParser, read_examples
from finetune.data_preview.content import content_of
from finetune.data_preview.leakage import HeldOut, Leakage
from finetune.data_preview.repeats import Repeats, find_repeats, row_store
from finetune.data_preview.samples import Reservoir, kind_of
from finetune.errors import DataError


@dataclass(frozen=True)
class SourceSurvey:
    path: str
    format: str
    """As the recipe says or as its columns tell."""
    num_rows: int
    """Rows read."""
    num_invalid: int
    """Rows that can't be used, where the recipe says to skip them."""
    first_invalid: str
    """``file:line: what is wrong`` with the first of those; blank where there is none."""
    kinds: dict[str, int]
    """Rows of each kind: ``conversation``, ``document``, ``completion``, ``token ids``, ``preference``."""


@dataclass(frozen=True)
class SampledExample:
    example: Example | DataError
    place: str
    skip_invalid: bool


@dataclass(frozen=True)
class Survey:
    sources: list[SourceSurvey]
    sampled: list[SampledExample]
    repeats: Repeats
    leakage: list[Leakage]

    @property
    def all_preferences(self) -> bool:
        kinds = {kind for source in self.sources for kind in source.kinds}
        return kinds == {"preference"}


def survey_sources(
    sources: Sequence[DatasetSettings],
    held_out: Sequence[HeldOut],
    *,
    num_samples: int,
    seed: int,
    similarity: float,
    show_progress: bool,
) -> Survey:
    """Read all rows of ``sources`` once. ``held_out`` sets are kept in memory.

    ``seed`` decides which rows are sampled; rows are near from ``similarity`` on.
    """
    kept = Reservoir(num_samples, seed)
    surveyed = []
    with (
        row_store(similarity) as store,
        tqdm(desc="compare", unit=" rows", disable=None if show_progress else True) as progress,
    ):
        for source in sources:
            kinds: Counter[str] = Counter()
            num_rows, num_invalid, first_invalid = 0, 0, ""
            parser = RowParser(source)
            for example, place in read_examples(source, parser):
                num_rows += 1
                progress.update()
                kept.offer(SampledExample(example, place, source.invalid_rows == "skip"))
                if isinstance(example, DataError):
                    num_invalid += 1
                    first_invalid = first_invalid or f"{place}: {example.what}"
                    continue
                kinds[kind_of(example)] += 1
                content = content_of(example)
                store.add(content, place)
                for rows in held_out:
                    rows.compare(content, place)
            name = parser.format or "none recognised"
            surveyed.append(SourceSurvey(source.shown, name, num_rows, num_invalid, first_invalid, dict(kinds)))
        store.finish()
        repeats = find_repeats(store)
    return Survey(surveyed, kept.items(), repeats, [rows.result(similarity) for rows in held_out])
