"""Greedy generation in left-padded batches, with the KV cache, and the share of replies given word for word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from finetune.data.conversations import ConversationEncoder
from finetune.data.formats import Conversation
from finetune.data.options import DEFAULT_CHAT_OPTIONS, ChatOptions
from finetune.data.template import stop_token_ids


def chat_prompt_ids(
    tokenizer: Any, messages: Sequence[dict[str, str]], options: ChatOptions = DEFAULT_CHAT_OPTIONS
) -> list[int]:
    """The token ids of a conversation up to where the assistant's next turn begins.

    Rendered by the chat template, which writes the bos token itself where the model wants one; a special token that is
    written out in a message is text, as in training. Raises DataError for a tokenizer without a template.
    """
    (ids,) = ConversationEncoder(tokenizer, "all", options).prompts([(Conversation(list(messages), ()), "the prompt")])
    return ids


@torch.inference_mode()
def generate_greedily(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    pad_id: int,
    batch_size: int = 64,
) -> list[list[int]]:
    """The most likely continuation of each prompt (token ids), in the prompts' order.

    A reply ends before the first of ``stop_ids`` (which isn't part of it) or after ``max_new_tokens``. What comes out
    is what ``model.generate(do_sample=False)`` gives for the same batch. In float32 the batch doesn't matter; in
    bfloat16 two tokens of nearly equal logits can change places with it.
    """
    replies: list[list[int]] = [[] for _ in prompts]
    # Prompts of like length together: less padding.
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    starts = range(0, len(order), batch_size)
    for start in tqdm(starts, desc="generate", unit="batch", disable=None):
        indices = order[start : start + batch_size]
        width = max(len(prompts[index]) for index in indices)
        ids_BS = torch.full((len(indices), width), pad_id, dtype=torch.int64)
        mask_BS = torch.zeros((len(indices), width), dtype=torch.int64)
        for row, index in enumerate(indices):
            ids_BS[row, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask_BS[row, width - len(prompts[index]) :] = 1
        output_BS = model.generate(
            input_ids=ids_BS.to(model.device),
            attention_mask=mask_BS.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            # Sampling settings of the model's own generation_config.json would only draw warnings.
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=list(stop_ids),
            pad_token_id=pad_id,
        )
        for row, index in enumerate(indices):
            replies[index] = _until_stop(output_BS[row, width:].tolist(), stop_ids)
    return replies


def _until_stop(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    for position, token in enumerate(ids):
        if token in stop_ids:
            return ids[:position]
    return ids


def generate_replies(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, batch_size: int = 64
) -> list[str]:
    """The decoded greedy reply to each prompt; it stops on the tokenizer's eos and the template's turn terminator."""
    stop_ids = stop_token_ids(tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    replies = generate_greedily(
        model, prompts, max_new_tokens=max_new_tokens, stop_ids=stop_ids, pad_id=pad_id, batch_size=batch_size
    )
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in replies]


def exact_match(replies: Sequence[str], references: Sequence[str]) -> float:
    """The share of replies that equal their reference once white space around both is taken off."""
    assert len(replies) == len(references) > 0
    same = sum(reply.strip() == reference.strip() for reply, reference in zip(replies, references, strict=True))
    return same / len(references)
