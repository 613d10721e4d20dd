"""What other tools call their schemes, and what to write here instead; loads nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from finetune.errors import RecipeError, did_you_mean
from finetune.quant.scheme import SCHEMES


@dataclass(frozen=True)
class Meaning:
    """What to write for another tool's name; None is this scheme's own default."""

    scheme: str
    note: str = ""
    """What tells it from the other meanings of the name."""
    group_size: int | None = None
    format: str | None = None
    method: str | None = None
    symmetric: bool = True

    def flags(self, group: str | None) -> str:
        """``--scheme w4a16 --format gguf``; ``group``: a group size that was written behind a colon."""
        words = [f"--scheme {self.scheme}" + (f":{group}" if group else "")]
        words += [f"--{key} {value}" for key, value in (("format", self.format), ("method", self.method)) if value]
        return " ".join([*words, *([] if self.symmetric else ["--asymmetric"])])

    def variant(self, group: str | None) -> str:
        """``w4a16:32``, as one of a sweep's schemes or of ``--override``."""
        size = group or self.group_size
        return self.scheme + (f":{size}" if size else "")

    def keys(self, group: str | None) -> list[str]:
        """``scheme: w4a16``, ``format: gguf``: as a recipe has it."""
        size = group or self.group_size
        values = {"scheme": self.scheme, "format": self.format, "method": self.method, "group_size": size}
        return [f"{key}: {value}" for key, value in values.items() if value] + ["symmetric: false"] * (
            not self.symmetric
        )


_NF4 = Meaning("nf4", "bitsandbytes")
_LLM_INT8 = Meaning("llm_int8", "bitsandbytes")
_INT8 = (Meaning("w8a16", "weights alone"), Meaning("w8a8", "inputs too"))
_Q4_0 = Meaning("w4a16", "Q4_0", group_size=32, format="gguf")
_Q8_0 = Meaning("w8a16", "Q8_0", group_size=32, format="gguf")
_Q4_K = Meaning("q4_k", "Q4_K")

MEANINGS: dict[str, tuple[Meaning, ...]] = {
    **dict.fromkeys(("int4", "w4"), (Meaning("w4a16"),)),
    **dict.fromkeys(("int3", "w3", "3bit"), (Meaning("w3a16"),)),
    **dict.fromkeys(("int2", "w2", "2bit"), (Meaning("w2a16"),)),
    **dict.fromkeys(("int8", "w8"), _INT8),
    "4bit": (Meaning("w4a16"), _NF4),
    "8bit": (*_INT8, _LLM_INT8),
    **dict.fromkeys(("load_in_4bit", "bnb_4bit", "bnb4"), (_NF4,)),
    **dict.fromkeys(("load_in_8bit", "bnb_8bit", "bnb8", "llm.int8"), (_LLM_INT8,)),
    **dict.fromkeys(("bitsandbytes", "bnb"), (Meaning("nf4", "4 bits"), Meaning("llm_int8", "8 bits"))),
    "w4a16_asym": (Meaning("w4a16", symmetric=False),),
    "w8a16_asym": (Meaning("w8a16", symmetric=False),),
    **{f"{name}_sym": (Meaning(name),) for name in ("w4a16", "w8a16", "w8a8")},
    "rtn": (Meaning("w4a16", method="rtn"),),
    "awq": (Meaning("w4a16", method="awq"),),
    **dict.fromkeys(("autoround", "auto_round"), (Meaning("w4a16", method="learned"),)),
    "gptq": (Meaning("w4a16", "the method", method="gptq"), Meaning("w4a16", "the file format", format="gptq")),
    "smoothquant": (Meaning("w8a8", method="smoothquant"),),
    "gguf": (_Q4_0, _Q8_0, _Q4_K),
    "q4_0": (_Q4_0,),
    "q8_0": (_Q8_0,),
    **dict.fromkeys(("q4_k_m", "q4_k_s", "q4k"), (_Q4_K,)),
}
"""Names in lower case, with ``_`` for ``-``."""

UNSUPPORTED: tuple[tuple[str, str, tuple[Meaning, ...]], ...] = (
    (r"(w\d+a?)?(mx|nv)fp\d\w*", "4-bit floats with scales a block aren't supported", (Meaning("w4a16"), _NF4)),
    (r"(\w*_)?(w\d+a?)?(fp8|float8|f8|e4m3|e5m2)\w*", "8-bit floats aren't supported", (Meaning("w8a8", "int8"),)),
    (
        r"i?q\d_\w+|t?q[12]_\d",
        "of llama.cpp's types Q4_0, Q8_0 and Q4_K are written, this one isn't",
        (_Q4_K, _Q4_0, _Q8_0),
    ),
    (
        r"w[234]a[48]\w*",
        "few-bit weights with rounded inputs aren't supported",
        (Meaning("w4a16", "weights alone"), Meaning("w8a8", "8 bits both")),
    ),
    (
        r"(int|w)?[1567](bit|a16)?",
        "weights take 2, 3, 4 or 8 bits",
        (Meaning("w4a16"), Meaning("w8a16")),
    ),
)
"""(a pattern of the whole name, what to say of it, what comes closest)."""


def looked_up(name: str) -> tuple[str, tuple[Meaning, ...]] | None:
    """What there is to say of a name that is no scheme, and what to write instead; None for an unknown name."""
    plain = name.lower().replace("-", "_")
    if plain in SCHEMES:
        return f"scheme names are written in lower case and with `_`, `{name}` isn't", (Meaning(plain),)
    if plain in MEANINGS:
        return f"`{name}` is another tool's name", MEANINGS[plain]
    for pattern, what, meanings in UNSUPPORTED:
        if re.fullmatch(pattern, plain):
            return f"`{name}`: {what}", meanings
    return None


def unknown_scheme(name: str, group: str | None, *, where: str, alone: bool) -> RecipeError:
    """The error for a name on the command line; ``alone``: of ``--scheme``, which other flags can go with.

    Else it is one of several schemes of ``--sweep``, or that of ``--override``.
    """
    found = looked_up(name)
    if found is None:
        return RecipeError(f"unknown scheme `{name}`", where=where, fix=did_you_mean(name, SCHEMES))
    what, meanings = found
    choices = [(meaning.flags(group) if alone else meaning.variant(group), meaning) for meaning in meanings]
    lost = "" if alone or all(meaning.symmetric for meaning in meanings) else "; zero points can't be asked for here"
    methods = {} if alone else dict.fromkeys(meaning.method for meaning in meanings if meaning.method)
    with_method = "".join(f", with --method {method}" for method in methods)
    return RecipeError(what, where=where, fix=f"write {_either(choices)}{with_method}{lost}")


def unknown_scheme_key(text: str, *, in_override: bool = False) -> ValueError:
    """The same for a recipe's ``scheme:``; a section's error says behind `; set` what to do."""
    name, colon, group = text.partition(":")
    if colon and name in SCHEMES:
        return ValueError(
            f"a recipe has the group size in a key of its own; set `scheme: {name}`, `group_size: {group}`"
        )
    found = looked_up(name)
    if found is None:
        return ValueError(did_you_mean(text, SCHEMES))
    what, meanings = found
    choices = []
    for meaning in meanings:
        keys = meaning.keys(group or None)
        if in_override:  # format and method are the whole model's
            keys = [key for key in keys if not key.startswith(("format", "method"))]
        choices.append(("`, `".join(keys), meaning))
    return ValueError(f"{what}; set {_either(choices)}")


def _either(choices: list[tuple[str, Meaning]]) -> str:
    """``--scheme w8a16` (weights alone) or `--scheme w8a8` (inputs too)``; of equal ones the first."""
    shown: dict[str, str] = {}
    for text, meaning in choices:
        shown.setdefault(text, f"`{text}`" + (f" ({meaning.note})" if meaning.note and len(choices) > 1 else ""))
    return " or ".join(shown.values())
