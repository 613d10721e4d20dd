"""Tokenizers as GGUF metadata: what llama.cpp and transformers' own reader make of it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

from finetune.errors import RecipeError
from finetune.model.load import load_tokenizer
from finetune.quant.gguf_tokenizer import SPLITS, describe_tokenizer
from finetune.quant.quantize import quantize_model
from finetune.quant.settings import QuantizeSettings
from tests.llama_cpp_run import interpreter, run_llama_cpp
from tests.tiny import CHATML_TEMPLATE, CORPUS, tiny_llama, tiny_tokenizer

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "What is  the capital of France? It isn't 12345 km far!\n\n\tYes, it is.",
    "naïve café 東京 🙂 ÀÉ",
    " leading and trailing ",
]
SENTENCEPIECE = ("metaspace", "prepend", "gemma")


def sentencepiece_tokenizer(kind: str) -> Any:
    """A small tokenizer of the Llama 2 (``metaspace``, ``prepend``) or the Gemma kind: BPE with byte fallback."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    learner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    elif kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    else:
        tokenizer.normalizer = replace
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    fast.chat_template = CHATML_TEMPLATE
    return fast


def byte_level_tokenizer(name: str) -> Any:
    """A small tokenizer that splits text the way llama.cpp calls ``name``."""
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

    fast = tiny_tokenizer()
    state = json.loads(fast.backend_tokenizer.to_str())
    pattern = next((pattern for pattern, (known, _) in SPLITS.items() if known == name), None)
    if pattern is not None:
        state["model"]["ignore_merges"] = SPLITS[pattern][1]
    backend = Tokenizer.from_str(json.dumps(state))
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    fast._tokenizer = backend
    return fast


NAMES = ("gpt-2", "smollm", *(name for name, _ in SPLITS.values()))


def tokenizer_of(name: str) -> Any:
    return sentencepiece_tokenizer(name) if name in SENTENCEPIECE else byte_level_tokenizer(name)


def quantized(name: str, folder: Path) -> Path:
    source = tiny_llama(folder / f"{name}-source", tokenizer=tokenizer_of(name), num_layers=1, dtype="bfloat16")
    settings = QuantizeSettings(scheme="w4a16", format="gguf", method="rtn")
    quantize_model(source, settings=settings, out=folder / name, seed=0)
    return folder / name


@pytest.mark.parametrize("name", NAMES)
def test_byte_level_tokenizers_are_told_apart(name: str) -> None:
    tokenizer = byte_level_tokenizer(name)
    described = describe_tokenizer(tokenizer, vocab_size=400)
    assert (described.model, described.pre) == ("gpt2", name)
    assert described.tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert described.tokens[-1] == "[PAD399]"
    assert [described.types[0], described.types[5], described.types[-1]] == [3, 1, 5]
    assert described.special_ids == {"bos": 0, "eos": 2, "pad": 0}
    assert described.chat_template == CHATML_TEMPLATE


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_scores_keep_the_order_of_the_merges(name: str) -> None:
    tokenizer = sentencepiece_tokenizer(name)
    described = describe_tokenizer(tokenizer, vocab_size=len(tokenizer))
    assert described.model == "llama"
    assert described.add_space_prefix == (name != "gemma")
    assert described.types[:4] == [2, 3, 3, 6]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    scores = dict(zip(described.tokens, described.scores or [], strict=True))
    made = [scores["".join(merge)] for merge in merges]
    assert made == sorted(made, reverse=True)
    assert scores["▁"] < made[-1]


@pytest.mark.skipif(interpreter() is None, reason="llama-cpp-python isn't installed")
def test_llama_cpp_tokenizes_alike(tmp_path: Path) -> None:
    names = (*NAMES, *SENTENCEPIECE)
    jobs = []
    for name in names:
        out = str(tmp_path / f"{name}.npy")
        jobs.append({"file": str(quantized(name, tmp_path) / "model.gguf"), "ids": [5], "texts": TEXTS, "out": out})
    run_llama_cpp(jobs, tmp_path)
    for name, job in zip(names, jobs, strict=True):
        tokenizer = load_tokenizer(tmp_path / name)
        ids = json.loads(Path(job["out"] + ".json").read_text())
        for text, found in zip(TEXTS, ids, strict=True):
            if name == "metaspace" and text.startswith(" "):
                continue  # Metaspace takes a leading space for the prefix; llama.cpp and sentencepiece keep both
            assert found == tokenizer(text)["input_ids"], (name, text)


@pytest.mark.parametrize("change", ["wordpiece", "split", "ignore_merges", "normalizer", "prefix"])
def test_what_llama_cpp_does_not_have_is_refused(change: str) -> None:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = tiny_tokenizer()
    backend = tokenizer.backend_tokenizer
    if change == "wordpiece":
        tokenizer._tokenizer = Tokenizer(models.WordLevel({"a": 0}, "a"))
    elif change == "split":
        split = pre_tokenizers.Split(Regex(r"\s"), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif change == "ignore_merges":
        backend.model.ignore_merges = True
    elif change == "normalizer":
        backend.normalizer = normalizers.Lowercase()
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(RecipeError, match="tokenizer can't be stored as GGUF"):
        describe_tokenizer(tokenizer, vocab_size=400)
