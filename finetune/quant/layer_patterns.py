"""Regular expressions that name layers exactly, for the configurations of storage formats."""

from __future__ import annotations

import re
from collections.abc import Iterable


def exact_patterns(names: Iterable[str]) -> list[str]:
    r"""Patterns that match these names and no other: one for all layers that differ in a block's number alone.

    Loaders match from a name's start but not to its end: without the ``$``, ``layers.1`` would hit ``layers.10`` too.
    """
    numbers: dict[tuple[str, str], list[str]] = {}
    for name in names:
        found = re.search(r"\.\d+(?=\.)", name)
        before, number, after = (name[: found.start()], found[0][1:], name[found.end() :]) if found else (name, "", "")
        numbers.setdefault((before, after), []).append(number)
    patterns = []
    for (before, after), blocks in numbers.items():
        middle = "" if blocks == [""] else rf"\.({'|'.join(blocks)})"
        patterns.append(f"{re.escape(before)}{middle}{re.escape(after)}$")
    return patterns
