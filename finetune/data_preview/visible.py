"""Text made visible: white space where it could be overlooked, and characters that would act rather than be seen."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from finetune.data_preview.pieces import Piece

NEWLINE, TAB, SPACE = "↵\n", "→", "·"
JOINERS = "\u200c\u200d"
"""Characters without a shape that scripts and emoji need."""
LONG_RUN, RUN_HEAD, RUN_TAIL = 160, 90, 40
"""Tokens in a row of one kind from which its middle is left out, and how many stay before and after it."""


@dataclass(frozen=True)
class Shown:
    text: str
    piece: Piece


def visible(pieces: Sequence[Piece]) -> list[Shown]:
    """Each piece with its text as it should be shown.

    A space is a dot where it begins or ends a line or a learnt part, or stands beside another one: there it is easily
    overlooked, and there tokenizers and templates differ.
    """
    whole = "".join(piece.text for piece in pieces)
    edges, end = {0, len(whole)}, 0
    for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
        if piece.special:
            edges.add(end)
        end += len(piece.text)
        if piece.special or (following is not None and following.learnt != piece.learnt):
            edges.add(end)
    shown, start = [], 0
    for piece in pieces:
        text = "".join(_visible(whole, start + offset, edges) for offset in range(len(piece.text)))
        shown.append(Shown(text, piece))
        start += len(piece.text)
    return shown


def _visible(whole: str, at: int, edges: set[int]) -> str:
    letter = whole[at]
    if letter == "\n":
        return NEWLINE
    if letter == "\t":
        return TAB
    if letter == " ":
        beside = whole[at - 1 : at] + whole[at + 1 : at + 2]
        return SPACE if at in edges or at + 1 in edges or any(other in " \n\t" for other in beside) else letter
    return printable(letter)


def printable(text: str) -> str:
    """``text`` with control and format characters by their number, so that none acts on a terminal or a page."""
    return "".join(_printable(letter) for letter in text)


def _printable(letter: str) -> str:
    category = unicodedata.category(letter)
    if category in ("Cc", "Cs", "Cn", "Zl", "Zp") or (category == "Cf" and letter not in JOINERS):
        return f"<U+{ord(letter):04X}>"
    return SPACE if category == "Zs" and letter != " " else letter


def shortened(shown: Sequence[Shown]) -> Iterator[Shown | int]:
    """The pieces, with a number in place of the middle of each long run of learnt or of other ones."""
    start = 0
    while start < len(shown):
        end = start
        while end < len(shown) and shown[end].piece.learnt == shown[start].piece.learnt:
            end += 1
        if end - start > LONG_RUN:
            yield from shown[start : start + RUN_HEAD]
            yield end - start - RUN_HEAD - RUN_TAIL
            yield from shown[end - RUN_TAIL : end]
        else:
            yield from shown[start:end]
        start = end
