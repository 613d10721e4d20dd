"""Quantization as a command line writes it, and the lists of what there is to choose; loads nothing heavy."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from finetune.errors import RecipeError, did_you_mean
from finetune.quant.scheme import SCHEMES, QuantScheme

ONE_SCALE_A_CHANNEL = ("channel", "none", "null")


def group_size(text: str, *, where: str) -> int | None:
    """``64``, or ``channel`` (also ``none``) for one scale an output channel."""
    if text.lower() in ONE_SCALE_A_CHANNEL:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise RecipeError(f"`{text}` is no group size", where=where, fix="write a number such as 64, or `channel`")
    return int(text)


def scheme_values(text: str, *, where: str) -> dict[str, Any]:
    """``w4a16:32`` → the settings ``scheme`` and ``group_size``; without a colon the scheme's own group size."""
    scheme, colon, group = text.partition(":")
    if scheme not in SCHEMES:
        raise RecipeError(f"unknown scheme `{scheme}`", where=where, fix=did_you_mean(scheme, SCHEMES))
    return {"scheme": scheme, **({"group_size": group_size(group, where=where)} if colon else {})}


def override_values(text: str) -> dict[str, Any]:
    """``down_proj,*.layers.0.*=w8a16:64`` → one entry of ``overrides``."""
    where = f"--override {text}"
    layers, equals, scheme = text.rpartition("=")
    names = [name.strip() for name in layers.split(",")]
    if not equals or not all(names):
        raise RecipeError(
            "an override names layers and their scheme", where=where, fix="--override 'down_proj=w8a16', say"
        )
    return {"layers": names, **scheme_values(scheme, where=where)}


def sweep_values(text: str) -> dict[str, dict[str, Any]]:
    """``w4a16:32,w4a16:64,w8a8`` → the settings of each, by the name it is written under."""
    where = f"--sweep {text}"
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise RecipeError("there is no scheme to measure", where=where, fix="--sweep w4a16:32,w4a16:64,w8a16")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RecipeError(f"`{twice[0]}` is there twice", where=where, fix="name each scheme once")
    return {name: scheme_values(name, where=where) for name in names}


def methods_help() -> str:
    """Each registered method with the first line of its file's docstring: ``gptq: …; rtn: …``."""
    lines = []
    for path in sorted((Path(__file__).parent / "methods").glob("[!_]*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"{path.stem}: {docstring.partition(chr(10))[0].rstrip('.')}")
    return "; ".join(lines)


def schemes_help() -> str:
    return "; ".join(f"{name}: {describe_scheme(scheme)}" for name, scheme in SCHEMES.items())


def describe_scheme(scheme: QuantScheme) -> str:
    """``4-bit weights in groups of 128, 8-bit inputs (a scale a token)``."""
    weights, inputs = scheme.weights, scheme.activations
    kind = "" if weights.type in ("int", scheme.name) else f" {weights.type}"
    groups = f"in groups of {weights.group_size}" if weights.group_size else "with a scale a channel"
    words = f"{weights.num_bits}-bit{kind} weights {groups}"
    if inputs is not None:
        words += f", {inputs.num_bits}-bit inputs ({'a scale a token' if inputs.dynamic else 'one stored scale'})"
    return words


def formats() -> list[str]:
    """The storage formats of all schemes, the default of the first scheme first."""
    return list(dict.fromkeys(name for scheme in SCHEMES.values() for name in scheme.formats))
