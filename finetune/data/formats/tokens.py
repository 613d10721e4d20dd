"""``{"input_ids": [...]}``: a row that was tokenized elsewhere, optionally with ``labels`` and ``attention_mask``.

Labels stand at their own token (not shifted); -100 marks one that is not learnt. Padding at either end, where the
attention mask is 0, is taken off.
"""

from __future__ import annotations

from typing import Any

from finetune.data.chat import parse_json
from finetune.data.formats import FORMATS, RowFormat, TokenIds
from finetune.errors import DataError

NOT_LEARNT = -100
LARGEST_ID = 2**31 - 1
"""Rows hold int32."""


def parse_tokens(row: dict[str, Any], place: str) -> TokenIds:
    input_ids = _integers(row.get("input_ids"), "input_ids", place)
    for wrong in (min(input_ids), max(input_ids)):
        if not 0 <= wrong <= LARGEST_ID:
            fix = f"token ids are 0 or more, and {LARGEST_ID} at most"
            raise DataError(f"`input_ids` holds {_shown(wrong)}", where=place, fix=fix)
    labels = None
    if row.get("labels") is not None:
        labels = _integers(row["labels"], "labels", place, length=len(input_ids))
        for index, (label, token) in enumerate(zip(labels, input_ids, strict=True)):
            if label not in (NOT_LEARNT, token):
                raise DataError(
                    f"`labels[{index}]` is {_shown(label)}, where `input_ids[{index}]` is {token}",
                    where=place,
                    fix="give each token itself as label (not shifted by one), or -100",
                )
    if row.get("attention_mask") is not None:
        mask = _integers(row["attention_mask"], "attention_mask", place, length=len(input_ids))
        start, end = _unpadded(mask, place)
        input_ids, labels = input_ids[start:end], labels[start:end] if labels is not None else None
    return TokenIds(input_ids, labels)


def _integers(value: Any, name: str, place: str, *, length: int | None = None) -> list[int]:
    if isinstance(value, str):
        value = parse_json(value, f"the field `{name}`", place)
    if not isinstance(value, list) or not value:
        found = "missing or null" if value is None else "empty" if value == [] else "not a list"
        raise DataError(f"the field `{name}` is {found}", where=place, fix="give a list of integers, or remove the row")
    odd = next((item for item in value if type(item) is not int), None)
    if odd is not None or None in value:
        raise DataError(f"`{name}` holds {_shown(odd)}, which is not an integer", where=place, fix="correct the row")
    if length is not None and len(value) != length:
        raise DataError(
            f"`{name}` has {len(value)} entries, `input_ids` {length}", where=place, fix="give one to each token"
        )
    return value


def _shown(value: Any) -> str:
    """A value of a row for a message: a number may have thousands of digits."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"


def _unpadded(mask: list[int], place: str) -> tuple[int, int]:
    """The one stretch of ones."""
    if 1 not in mask or not set(mask) <= {0, 1}:
        raise DataError("`attention_mask` must hold 0 and 1, and some 1", where=place, fix="correct the row")
    start, end = mask.index(1), len(mask) - mask[::-1].index(1)
    if 0 in mask[start:end]:
        raise DataError(
            "`attention_mask` is 0 inside the row", where=place, fix="only padding at an end can be masked out"
        )
    return start, end


FORMATS.register("tokens")(
    RowFormat(required=("input_ids",), optional=("labels", "attention_mask"), parse=parse_tokens)
)
