"""A tokenizer as GGUF metadata: vocabulary, merges or scores, and the name under which llama.cpp knows how it splits.

llama.cpp has its own tokenizers, in two kinds: byte-level BPE, whose way to split text into words is one of a list of
names, and sentencepiece, which joins what has the best score. What isn't among them is refused: a model with another
tokenizer than its own answers nonsense.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.errors import RecipeError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL: ("llama-bpe", True),
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL: ("qwen2", False),
    "|".join(_WORDS) + r"|\p{N}" + _CASED_TAIL: ("tekken", True),
    "|".join(f"{word}{_CONTRACTIONS}?" for word in _WORDS) + r"|\p{N}{1,3}" + _CASED_TAIL: ("gpt-4o", False),
}
"""Patterns of byte-level BPE tokenizers to llama.cpp's name for them, and whether it then takes a word that is in the
vocabulary without merging it (``ignore_merges``)."""
_SPACE = "▁"


@dataclass(frozen=True)
class GgufTokenizer:
    model: str
    """``gpt2`` (byte-level BPE) or ``llama`` (sentencepiece)."""
    pre: str
    tokens: list[str]
    types: list[int]
    """``gguf.TokenType`` of each token."""
    merges: list[str] | None
    scores: list[float] | None
    special_ids: dict[str, int]
    """bos, eos, unk and pad, those that there are."""
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | None


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> GgufTokenizer:
    """``vocab_size``: rows of the embedding; ids that the tokenizer doesn't know are filled up.

    Raises RecipeError for a tokenizer that llama.cpp doesn't have.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refused("it has no tokenizer.json")
    state = json.loads(backend.to_str())
    model = state["model"]
    if model["type"] != "BPE":
        raise _refused(f"it is a {model['type']} model, llama.cpp's are BPE")
    sentencepiece = bool(model.get("byte_fallback"))
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    added = {entry["id"]: entry for entry in state["added_tokens"]}
    names = {index: token for token, index in model["vocab"].items()} | {
        index: entry["content"] for index, entry in added.items()
    }
    tokens = [names.get(index, f"[PAD{index}]") for index in range(vocab_size)]
    types = [_type_of(index, names, added, model, sentencepiece) for index in range(vocab_size)]
    if sentencepiece:
        pre, add_space_prefix = "default", _adds_space_prefix(state)
    else:
        pre, add_space_prefix = _pre_tokenizer_name(state), False
    without = tokenizer("a", add_special_tokens=False)["input_ids"]
    with_special = tokenizer("a", add_special_tokens=True)["input_ids"]
    ids = {kind: getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "unk", "pad")}
    template = tokenizer.chat_template
    return GgufTokenizer(
        model="llama" if sentencepiece else "gpt2",
        pre=pre,
        tokens=tokens,
        types=types,
        merges=None if sentencepiece else [" ".join(merge) for merge in merges],
        scores=_scores(tokens, merges) if sentencepiece else None,
        special_ids={kind: int(index) for kind, index in ids.items() if index is not None},
        add_bos=with_special[:1] == [ids["bos"]] and without[:1] != [ids["bos"]],
        add_eos=with_special[-1:] == [ids["eos"]] and without[-1:] != [ids["eos"]],
        add_space_prefix=add_space_prefix,
        chat_template=template.get("default") if isinstance(template, dict) else template,
    )


def _refused(reason: str) -> RecipeError:
    return RecipeError(
        f"this model's tokenizer can't be stored as GGUF: {reason}", fix="choose another `format`: compressed-tensors"
    )


def _type_of(
    index: int, names: dict[int, str], added: dict[int, Any], model: dict[str, Any], sentencepiece: bool
) -> int:
    from gguf import TokenType

    if index not in names:
        kind = TokenType.UNUSED
    elif names[index] == model.get("unk_token"):
        kind = TokenType.UNKNOWN
    elif index in added:
        kind = TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED
    elif sentencepiece and len(names[index]) == 6 and names[index].startswith("<0x"):
        kind = TokenType.BYTE
    else:
        kind = TokenType.NORMAL
    return int(kind)


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    """The score under which sentencepiece joins in the order of the merges: minus a token's first place among them."""
    first: dict[str, int] = {}
    for place, merge in enumerate(merges):
        first.setdefault("".join(merge), place)
    return [-float(first.get(token, len(merges))) for token in tokens]


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[key]) if part["type"] == "Sequence" else [part]


def _pre_tokenizer_name(state: dict[str, Any]) -> str:
    steps = _steps(state["pre_tokenizer"], "pretokenizers")
    last = steps[-1] if steps else {"type": "nothing"}
    normalizers = [step["type"] for step in _steps(state["normalizer"], "normalizers")]
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or normalizers not in ([], ["NFC"]):
        raise _refused(f"it ends with {last['type']} after {', '.join(normalizers) or 'no normalizer'}")
    name, whole_words = None, False
    before = steps[:-1]
    if last["use_regex"] and not before:
        name = "gpt-2"
    elif last["use_regex"] and [step["type"] for step in before] == ["Digits"] and before[0]["individual_digits"]:
        name = "smollm"
    elif not last["use_regex"] and [step["type"] for step in before] == ["Split"]:
        step = before[0]
        if step["behavior"] == "Isolated" and not step["invert"]:
            name, whole_words = SPLITS.get(step["pattern"].get("Regex"), (None, False))
    if name is None:
        raise _refused("llama.cpp knows no tokenizer that splits text as it does")
    if bool(state["model"].get("ignore_merges")) != whole_words:
        raise _refused(f"its `ignore_merges` isn't that of {name}, the one that splits alike")
    return name


def _adds_space_prefix(state: dict[str, Any]) -> bool:
    """Whether a text gets a space put before it. Raises RecipeError where spaces are treated in a way of its own."""
    normalizers = _steps(state["normalizer"], "normalizers")
    pre_tokenizers = _steps(state["pre_tokenizer"], "pretokenizers")
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if not normalizers and [step["type"] for step in pre_tokenizers] == ["Metaspace"]:
        step = pre_tokenizers[0]
        if step["replacement"] == _SPACE and not step.get("split", False):
            return bool(step["prepend_scheme"] != "never")
    if normalizers == [{"type": "Prepend", "prepend": _SPACE}, replaces] and not pre_tokenizers:
        return True
    split = [{"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}]
    if normalizers == [replaces] and pre_tokenizers in ([], split):
        return False
    raise _refused("llama.cpp knows no sentencepiece tokenizer that treats spaces as it does")
