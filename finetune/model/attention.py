"""The attention mask of packed rows, and the models for which it is exact."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from finetune.errors import RecipeError


def attention_mask(document_ids_BS: Tensor, *, dtype: torch.dtype, implementation: str) -> Tensor | None:
    """Causal attention within each document: no token sees another document of its row.

    ``document_ids_BS`` (int, -1 = padding). Returns None where plain causal attention is already exact: one document
    a row with its padding behind it. Otherwise a mask (B, 1, S, S) that transformers uses as it is: bool (True =
    attend) for ``sdpa``; for ``eager`` additive in ``dtype`` (0 = attend, the smallest number = don't). Padding
    attends to padding, so that no row of the softmax is empty.
    """
    if not bool((document_ids_BS > 0).any()):
        # Padding may only follow its row's document.
        is_padding_BS = document_ids_BS < 0
        if not bool((is_padding_BS[:, :-1] & ~is_padding_BS[:, 1:]).any()):
            return None
    num_positions = document_ids_BS.shape[1]
    causal_SS = torch.ones(num_positions, num_positions, dtype=torch.bool, device=document_ids_BS.device).tril()
    allowed_B1SS = ((document_ids_BS[:, :, None] == document_ids_BS[:, None, :]) & causal_SS)[:, None]
    if implementation == "sdpa":
        return allowed_B1SS
    assert implementation == "eager", implementation
    mask_B1SS = torch.zeros(allowed_B1SS.shape, dtype=dtype, device=allowed_B1SS.device)
    return mask_B1SS.masked_fill_(~allowed_B1SS, torch.finfo(dtype).min)


def require_exact_attention(config: PreTrainedConfig, *, max_seq_length: int, packing: bool) -> None:
    """Raise RecipeError for a model whose layers this mask can't serve at this length.

    A mask of our own replaces the model's, so a window shorter than the rows would be lost; layers with a recurrent
    state would carry it from one packed document into the next.
    """
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False:
        window = None
    if "layer_types" in text.to_dict() and layer_types == {"full_attention"}:
        window = None
    chunk = getattr(text, "attention_chunk_size", None)
    for limit, name in ((window, "sliding_window"), (chunk, "attention_chunk_size")):
        if limit is not None and max_seq_length > limit:
            raise RecipeError(
                f"this model's `{name}` is {limit}, rows of {max_seq_length} tokens would attend beyond it",
                where="max_seq_length",
                fix=f"set max_seq_length to at most {limit}",
            )
    foreign = sorted(layer_types - {"full_attention", "sliding_attention", "chunked_attention"})
    if packing and foreign:
        raise RecipeError(
            f"this model has {', '.join(foreign)} layers, whose state would leak from one packed document to the next",
            where="packing",
            fix="set packing: false",
        )
