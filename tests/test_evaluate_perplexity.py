"""Perplexity and divergence against the same figures computed the long way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.errors import CheckpointError, DataError, RecipeError
from finetune.evaluate.divergence import divergence, divergence_sums
from finetune.evaluate.perplexity import POSITIONS_PER_CHUNK, negative_log_likelihood, perplexity
from finetune.evaluate.windows import TOKENS_PER_FORWARD, text_windows, window_batches
from tests.tiny import CORPUS, tiny_llama, tiny_tokenizer

TEXT = "\n".join(CORPUS * 4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("models")
    paths = [tiny_llama(folder / str(seed), seed=seed) for seed in (0, 1)]
    return [AutoModelForCausalLM.from_pretrained(path).eval() for path in paths]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def bos_tokenizer() -> Any:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    return tokenizer


def reference_perplexity(model: Any, windows: list[np.ndarray]) -> tuple[float, int]:
    """Token by token, in float64, from plain softmax."""
    total, count = 0.0, 0
    with torch.no_grad():
        for ids_S in windows:
            probabilities_SV = model(torch.tensor(ids_S)[None]).logits[0].double().softmax(dim=-1)
            for position in range(1, len(ids_S)):
                total -= math.log(probabilities_SV[position - 1, ids_S[position]])
                count += 1
    return math.exp(total / count), count


def test_every_token_but_each_windows_first_is_scored(models: list[Any], text_file: Path) -> None:
    tokenizer = tiny_tokenizer()
    num_tokens = len(tokenizer(TEXT)["input_ids"])
    windows = text_windows(text_file, tokenizer, window=50)
    assert sum(len(ids_S) for ids_S in windows) == num_tokens
    assert {len(ids_S) for ids_S in windows[:-1]} == {50}
    figures = perplexity(models[0], windows)
    expected, count = reference_perplexity(models[0], windows)
    assert figures["num_tokens"] == count == num_tokens - len(windows)
    assert figures["perplexity"] == pytest.approx(expected, rel=1e-5)


def test_windows_in_one_forward_and_one_by_one_give_the_same(models: list[Any], text_file: Path) -> None:
    windows = text_windows(text_file, tiny_tokenizer(), window=16)
    together = perplexity(models[0], windows)["perplexity"]
    num_tokens = sum(len(ids_S) - 1 for ids_S in windows)
    logs = [math.log(perplexity(models[0], [ids_S])["perplexity"]) * (len(ids_S) - 1) for ids_S in windows]
    assert together == pytest.approx(math.exp(sum(logs) / num_tokens), rel=1e-5)


def test_max_tokens_cuts_the_stream(text_file: Path) -> None:
    windows = text_windows(text_file, tiny_tokenizer(), window=32, max_tokens=97)
    # 97 = 3 x 32 + 1, and a window of one token predicts nothing.
    assert [len(ids_S) for ids_S in windows] == [32, 32, 32]


@pytest.mark.parametrize("prefix", ["", "<|endoftext|>"])
def test_exactly_one_bos_where_the_tokenizer_prepends_it(tmp_path: Path, prefix: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text(prefix + TEXT)
    tokenizer = bos_tokenizer()
    stream = np.concatenate(text_windows(path, tokenizer, window=20))
    assert stream[0] == tokenizer.bos_token_id
    assert (stream == tokenizer.bos_token_id).sum() == 1


def test_no_bos_where_the_tokenizer_prepends_none(text_file: Path) -> None:
    tokenizer = tiny_tokenizer()
    stream = np.concatenate(text_windows(text_file, tokenizer, window=20))
    assert (stream != tokenizer.bos_token_id).all()


@pytest.mark.parametrize(("content", "what"), [(b"", "0 tokens"), (b"a", "1 tokens"), (b"\xff\xfe\xff", "UTF-8")])
def test_a_text_that_gives_no_figure_is_an_error(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=what) as caught:
        text_windows(path, tiny_tokenizer(), window=8)
    assert caught.value.where == str(path)
    with pytest.raises(DataError, match="no such"):
        text_windows(tmp_path / "absent.txt", tiny_tokenizer(), window=8)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(2, 1500), max_size=20))
def test_batches_hold_every_window_once_in_order(lengths: list[int]) -> None:
    windows = [np.full(length, index) for index, length in enumerate(lengths)]
    batches = list(window_batches(windows))
    assert [int(row[0]) for batch in batches for row in batch] == list(range(len(lengths)))
    assert all(batch.size <= max(TOKENS_PER_FORWARD, batch.shape[1]) for batch in batches)


def test_log_softmax_is_float32_for_bfloat16_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_NV = (torch.randn(2 * POSITIONS_PER_CHUNK + 3, 500, generator=generator) * 5).bfloat16()
    targets_N = torch.randint(0, 500, (len(logits_NV),), generator=generator)
    exact = -logits_NV.double().log_softmax(dim=-1).gather(1, targets_N[:, None]).sum()
    assert negative_log_likelihood(logits_NV, targets_N) == pytest.approx(float(exact), rel=1e-6)


def test_divergence_is_kl_of_the_reference_from_the_model(models: list[Any], text_file: Path) -> None:
    windows = text_windows(text_file, tiny_tokenizer(), window=40)
    figures = divergence(models[0], models[1], windows)
    kl, agreeing, count = 0.0, 0, 0
    with torch.no_grad():
        for ids_S in windows:
            p_SV, q_SV = (model(torch.tensor(ids_S)[None]).logits[0, :-1].double().softmax(-1) for model in models)
            kl += float((p_SV * (p_SV / q_SV).log()).sum())
            agreeing += int((p_SV.argmax(-1) == q_SV.argmax(-1)).sum())
            count += len(p_SV)
    assert figures["kl"] == pytest.approx(kl / count, rel=1e-5)
    assert figures["top1_agreement"] == agreeing / count
    assert figures["num_tokens"] == count
    # Of the same passes: the model's own perplexity, not the reference's.
    assert figures["perplexity"] == pytest.approx(perplexity(models[1], windows)["perplexity"], rel=1e-6)
    other_way = divergence(models[1], models[0], windows)["kl"]
    assert abs(other_way - figures["kl"]) > 1e-3


def test_a_model_does_not_diverge_from_itself(models: list[Any], text_file: Path) -> None:
    figures = divergence(models[0], models[0], text_windows(text_file, tiny_tokenizer(), window=40))
    assert figures["kl"] == 0
    assert figures["top1_agreement"] == 1


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 2 * POSITIONS_PER_CHUNK + 1), scale=st.floats(0.1, 20))
def test_divergence_sums_match_torch(seed: int, rows: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    reference_NV, logits_NV = (torch.randn(rows, 17, generator=generator) * scale for _ in range(2))
    kl, agreeing = divergence_sums(reference_NV, logits_NV)
    expected = torch.nn.functional.kl_div(
        logits_NV.double().log_softmax(-1), reference_NV.double().log_softmax(-1), reduction="sum", log_target=True
    )
    assert kl == pytest.approx(float(expected), rel=1e-4, abs=1e-4)
    assert agreeing == int((reference_NV.argmax(-1) == logits_NV.argmax(-1)).sum())


def test_nan_logits_are_an_error_not_a_figure(tmp_path: Path, text_file: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_llama(tmp_path / "broken")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    windows = text_windows(text_file, tiny_tokenizer(), window=40)
    sound = AutoModelForCausalLM.from_pretrained(folder).eval()
    for value in (float("nan"), float("inf")):
        with torch.no_grad():
            model.model.norm.weight[0] = value
        for measure in (lambda: perplexity(model, windows), lambda: divergence(sound, model, windows)):
            with pytest.raises(CheckpointError, match="finite") as caught:
                measure()
            assert caught.value.where == str(folder)


def test_models_of_different_vocabularies_have_no_divergence(
    tmp_path: Path, models: list[Any], text_file: Path
) -> None:
    from transformers import AutoModelForCausalLM

    small = tiny_llama(tmp_path / "small", tokenizer=tiny_tokenizer(vocab_size=300))
    other = AutoModelForCausalLM.from_pretrained(small).eval()
    windows = text_windows(text_file, tiny_tokenizer(vocab_size=300), window=40)
    with pytest.raises(RecipeError, match="vocabulary"):
        divergence(models[0], other, windows)
