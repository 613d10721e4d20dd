"""One table over several models. The reference stays loaded, the others come and go one at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from finetune.data.options import ChatOptions
from finetune.data.prompts import Prompt, load_prompts
from finetune.errors import DataError, RecipeError
from finetune.evaluate.divergence import divergence
from finetune.evaluate.generation import exact_match, generate_replies
from finetune.evaluate.perplexity import perplexity
from finetune.evaluate.settings import EvaluateSettings
from finetune.evaluate.windows import text_windows
from finetune.model.load import load_config, load_model, load_tokenizer

Figures = dict[str, float]
DEFAULT_WINDOW = 1024


def evaluate_models(
    models: Mapping[str, Path], *, reference: str | None, settings: EvaluateSettings, device: str
) -> dict[str, Figures]:
    """{name: figures} of plain Hugging Face folders, in the order of ``models``, each in the dtype it is stored in.

    With ``settings.perplexity``: perplexity, num_tokens, window and, against ``reference`` (a key of ``models``), kl
    (nats a token), top1_agreement and perplexity_ratio. With ``settings.exact_match``: exact_match (0 to 1),
    num_answers and exact_match_drop. Always: size_bytes of the weight files.

    Raises CheckpointError for a model that doesn't load or gives NaN, DataError for bad data, RecipeError for models
    that can't be compared. ``gate.check_gate`` holds the figures to the limits; apart, so that the table is kept first.
    """
    assert reference is None or reference in models
    window = shared_window(models.values(), settings.window)
    results: dict[str, Figures] = {}
    reference_model: Any = None
    if reference is not None:
        # The reference first, and it stays: at most two models are in memory.
        reference_model = _load(models[reference], device)
        results[reference] = _evaluate(
            reference_model, models[reference], settings=settings, window=window, compared=None
        )
        if settings.perplexity is None:
            reference_model = None
    for name, folder in models.items():
        if name == reference:
            continue
        model = _load(folder, device)
        if reference is not None:
            _require_same_tokens(models[reference], folder, settings)
        results[name] = _evaluate(model, folder, settings=settings, window=window, compared=reference_model)
        if reference is not None:
            _compare(results[name], results[reference])
        del model
        _free(device)
    return {name: results[name] for name in models}


def shared_window(folders: Iterable[Path], wanted: int | None) -> int:
    """Tokens of a perplexity window for all of these models; raises RecipeError for more than one's context holds."""
    window = wanted or DEFAULT_WINDOW
    for folder in folders:
        context = getattr(load_config(folder).get_text_config(), "max_position_embeddings", None)
        if context is None or context >= window:
            continue
        if wanted is not None:
            raise RecipeError(
                f"windows of {wanted} tokens are longer than the context of {folder}, {context}",
                where="window",
                fix=f"set window to at most {context}",
            )
        window = context
    return window


def _load(folder: Path, device: str) -> Any:
    # A compressed-tensors model dequantizes its weights once, at its first forward, and goes on quantizing activations
    # where its scheme says so. `dequantize=True` would be no faster, and would leave W8A8's activations unquantized.
    return load_model(folder, dtype="auto", device=device)  # type: ignore[arg-type]


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _evaluate(model: Any, folder: Path, *, settings: EvaluateSettings, window: int, compared: Any) -> Figures:
    tokenizer = load_tokenizer(folder)
    figures: Figures = {}
    if settings.perplexity is not None:
        windows = text_windows(Path(settings.perplexity), tokenizer, window=window, max_tokens=settings.max_tokens)
        figures |= perplexity(model, windows) if compared is None else divergence(compared, model, windows)
        figures["window"] = window
    if settings.exact_match is not None:
        prompts: list[Prompt] = load_prompts(
            settings.exact_match, tokenizer, ChatOptions(template_kwargs=settings.chat_template_kwargs)
        )
        if not prompts:
            raise DataError(
                "no conversation ends in a reply to ask for", where=settings.exact_match.shown, fix="check this file"
            )
        replies = generate_replies(
            model,
            tokenizer,
            [list(prompt.prompt_ids) for prompt in prompts],
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
        )
        figures["exact_match"] = exact_match(replies, [prompt.reference for prompt in prompts])
        figures["num_answers"] = len(prompts)
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    figures["size_bytes"] = sum(path.stat().st_size for path in weights)
    return figures


def _compare(figures: Figures, reference: Figures) -> None:
    if "perplexity" in figures:
        figures["perplexity_ratio"] = figures["perplexity"] / reference["perplexity"]
    if "exact_match" in figures:
        figures["exact_match_drop"] = reference["exact_match"] - figures["exact_match"]


def _require_same_tokens(reference: Path, folder: Path, settings: EvaluateSettings) -> None:
    """KL compares distributions over tokens, so both models must read the same text as the same tokens."""
    if settings.perplexity is None or reference.resolve() == folder.resolve():
        return
    vocabularies = [load_tokenizer(path).get_vocab() for path in (reference, folder)]
    if vocabularies[0] != vocabularies[1]:
        raise RecipeError(
            "the reference and the model have different tokenizers, so their KL divergence means nothing",
            where=folder,
            fix=f"leave out `reference`, or compare with a model that has the tokenizer of {reference}",
        )
