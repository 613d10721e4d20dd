"""What a recipe says about how examples become tokens and targets, in one value that can be hashed and pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from finetune.errors import DataError

Overlong = Literal["drop", "truncate", "error", "split"]
TrainOn = Literal["assistant", "last", "completion", "all"]
History = Literal["refuse", "split", "last"]

DEFAULT_MAX_DROPPED_SHARE = 0.5
_TEMPLATE_OWN = (
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
)
"""Arguments of a rendering that are the program's to give."""


@dataclass(frozen=True)
class ChatOptions:
    history: History = "refuse"
    """Of a conversation whose earlier turns the template renders otherwise once later ones follow: an error, a row for
    each trained turn, or the last trained turn alone."""
    allow_control_tokens: bool = False
    """Whether a special token that is written out in a message or a text is read as that token, not as text."""
    require_stop: bool = True
    """Whether it is an error that a trained turn doesn't end in a stop token, which then isn't learnt."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as ``enable_thinking``."""


DEFAULT_CHAT_OPTIONS = ChatOptions()


def _are_free(kwargs: dict[str, Any]) -> dict[str, Any]:
    name = next((name for name in kwargs if name in _TEMPLATE_OWN), None)
    if name is not None:
        raise ValueError(f"`{name}` is not for a recipe to set: take it out")
    return kwargs


TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_are_free)]
"""The field of a section that holds arguments of the chat template."""


def check_dropped(counts: Mapping[str, int], max_dropped_share: float, where: str | None = None) -> None:
    """Raises DataError, with the causes, where more than ``max_dropped_share`` of the rows that were read were dropped,
    and where most texts hold control tokens, which were read as text: such texts were rendered by a template before."""
    causes = {name: counts.get(name, 0) for name in ("skipped_invalid", "dropped_overlong", "dropped_without_target")}
    rows, dropped = counts.get("rows", 0), sum(causes.values())
    if dropped > max_dropped_share * rows:
        told = ", ".join(f"{name} {count}" for name, count in causes.items() if count)
        raise DataError(
            f"{dropped} of {rows} rows were dropped ({told}), more than max_dropped_share {max_dropped_share:g}",
            where=where,
            fix="correct the rows, raise max_seq_length or choose another `overlong`, or raise max_dropped_share",
        )
    marked = counts.get("texts_with_control_tokens", 0)
    if marked > 0.5 * rows:
        raise DataError(
            f"{marked} of {rows} texts hold control tokens, as if a chat template had rendered them already; "
            "they were read as plain text",
            where=where,
            fix="say `allow_control_tokens: true` to read them as the tokens they name, or give rows of messages",
        )
