"""Set some rows of a data set aside, for a held-out loss on the same kind of data."""

from __future__ import annotations

import numpy as np

from finetune.data.dataset import TokenDataset
from finetune.errors import DataError


def hold_out(dataset: TokenDataset, *, num_rows: int, seed: int) -> tuple[TokenDataset, TokenDataset]:
    """(rows to train on, ``num_rows`` held-out rows), each in the order of ``dataset``; which ones depends on ``seed``.

    Raises DataError when nothing would be left to train on. A document that was split into rows can lie in both parts.
    """
    if num_rows >= len(dataset):
        raise DataError(
            f"{num_rows} rows are to be held out of {len(dataset)}",
            where="eval_rows",
            fix=f"set eval_rows below {len(dataset)}",
        )
    # A stream of its own: the loader shuffles with the same seed.
    chosen = np.random.default_rng((seed, 0x0E7A1)).permutation(len(dataset))[:num_rows]
    held = np.zeros(len(dataset), dtype=np.bool_)
    held[chosen] = True
    kept = dataset.select(np.flatnonzero(~held), {**dataset.counts, "held_out": num_rows})
    return kept, dataset.select(np.flatnonzero(held), dict(dataset.counts))
