"""Set some rows of a data set aside, for a held-out loss on the same kind of data."""

from __future__ import annotations

import numpy as np

from finetune.data.dataset import TokenDataset
from finetune.data.stored import StoredRows
from finetune.errors import DataError


def hold_out(dataset: TokenDataset, *, num_rows: int, seed: int) -> tuple[TokenDataset, TokenDataset]:
    """(rows to train on, ``num_rows`` held-out rows), each in the order of ``dataset``; which ones depends on ``seed``.

    The pieces of one document, or the turns of one conversation, lie in one part: of split rows a few more may be held
    out. Raises DataError when nothing would be left to train on.
    """
    # A stream of its own: the loader shuffles with the same seed.
    order = np.random.default_rng((seed, 0x0E7A1)).permutation(len(dataset))
    held = np.zeros(len(dataset), dtype=np.bool_)
    if dataset.counts.get("split") or dataset.counts.get("split_by_turn"):
        origins = _origins(dataset)
        _, first = np.unique(origins[order], return_index=True)
        drawn = origins[order[np.sort(first)]]
        total = np.cumsum(np.bincount(origins)[drawn])
        held = np.isin(origins, drawn[: int(np.searchsorted(total, num_rows)) + 1])
    else:
        held[order[:num_rows]] = True
    num_held = int(np.count_nonzero(held))
    if num_held == len(dataset):
        raise DataError(
            f"{num_rows} rows are to be held out of {len(dataset)}, and none would be left to train on",
            where="eval_rows",
            fix=f"set eval_rows below {min(num_rows, len(dataset))}",
        )
    kept = dataset.select(np.flatnonzero(~held), {**dataset.counts, "held_out": num_held})
    return kept, dataset.select(np.flatnonzero(held), dict(dataset.counts))


def _origins(dataset: TokenDataset) -> np.ndarray:
    """int64 (N,): the same number for the rows that were made of one row."""
    if isinstance(dataset.rows, StoredRows):
        return dataset.rows.origins()
    places = [row.place for row in dataset.rows]
    begins = [not here or here != before for here, before in zip(places, [None, *places], strict=False)]
    return np.cumsum(begins) - 1
