"""Rows longer than ``max_seq_length``: how a document is split and a conversation is cut."""

from __future__ import annotations

import numpy as np


def split_document(input_ids: np.ndarray, max_seq_length: int) -> list[np.ndarray]:
    """Pieces of at most ``max_seq_length`` tokens. Each begins with the last token of the one before, as the context of
    its first target, so that every token but the document's first is a target exactly once."""
    assert max_seq_length >= 2
    step = max_seq_length - 1
    return [input_ids[start : start + max_seq_length] for start in range(0, len(input_ids) - 1, step)]


def cut_conversation(
    input_ids: np.ndarray, loss_mask: np.ndarray, asked: tuple[int, int] | None, max_seq_length: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Cut a rendered conversation to ``max_seq_length``; None where it can't keep a reply's header and a target.

    Where the first reply begins inside the limit, the end is cut off. Otherwise the last message before it gives up its
    end: what stays is all before that message and its beginning, then its end of turn and the reply's header, then the
    reply, which gets at least half of the room that the header leaves. ``asked``: that message's first token, and the
    first one behind its content. Where nothing of it would stay (a system prompt or earlier turns take all the room),
    the reply would answer something else: None, too. Nothing is added, so a cut reply ends in no stop token; what
    follows the last target is always cut off.
    """
    targets = np.flatnonzero(loss_mask)
    if not len(targets):
        return None
    first_target, end = int(targets[0]), int(targets[-1]) + 1
    if first_target < max_seq_length:
        chosen = np.arange(min(end, max_seq_length))
    elif asked is None:
        return None
    else:
        content_start, header_start = asked
        room = max_seq_length - (first_target - header_start)
        if room < 1:
            return None
        reply_length = min(end - first_target, max(room - header_start, (room + 1) // 2))
        beginning_length = min(header_start, room - reply_length)
        if beginning_length <= content_start:
            return None
        chosen = np.concatenate((np.arange(beginning_length), np.arange(header_start, first_target + reply_length)))
    last_target = int(np.flatnonzero(loss_mask[chosen])[-1])
    chosen = chosen[: last_target + 1]
    return input_ids[chosen], loss_mask[chosen]


def cut_completion(
    input_ids: np.ndarray, loss_mask: np.ndarray, num_kept: int, max_seq_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut a prompt and its completion to ``max_seq_length``: the prompt gives up its beginning, but for the first
    ``num_kept`` tokens (bos), and the completion its end, which then has no eos; it gets at least half of the room."""
    first_target = int(np.argmax(loss_mask))
    room = max_seq_length - num_kept
    assert room >= 1
    prompt_length, reply_length = first_target - num_kept, len(input_ids) - first_target
    reply_length = min(reply_length, max(room - prompt_length, (room + 1) // 2))
    prompt_length = min(prompt_length, room - reply_length)
    chosen = np.concatenate((np.arange(num_kept), np.arange(first_target - prompt_length, first_target + reply_length)))
    return input_ids[chosen], loss_mask[chosen]
