"""What JSON can write and no row may hold: half a character, and values nested without end."""

from __future__ import annotations

import re
from typing import Any

DEEPEST = 100
"""Far more than data needs; what walks a value by recursion (templates do) fails at some hundreds."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def fault_of(text: str, value: Any) -> str | None:
    """What is wrong with ``value``, at any depth, which was read from the JSON ``text``. None: nothing is."""
    # Nearly no row can have one of the faults, which its text tells at once.
    if _HALF.search(text) is None and text.count("[") + text.count("{") <= DEEPEST:
        return None
    rest = [(value, 1)]
    while rest:
        item, depth = rest.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError as cause:
                half = f"\\u{ord(item[cause.start]):04x}"
                return f"it holds {half}, half a character (a surrogate without its pair), which isn't Unicode"
        elif isinstance(item, dict | list):
            if depth > DEEPEST:
                return f"it is nested more than {DEEPEST} deep"
            rest += [(inner, depth + 1) for inner in item]
            if isinstance(item, dict):
                rest += [(inner, depth + 1) for inner in item.values()]
    return None
