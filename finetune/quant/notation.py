"""Quantization as a command line writes it, and the lists of what there is to choose; loads nothing heavy."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.errors import RecipeError
from finetune.quant.other_names import unknown_scheme
from finetune.quant.scheme import SCHEMES, QuantScheme

ONE_SCALE_A_CHANNEL = ("channel", "none", "null")


def group_size(text: str, *, where: str) -> int | None:
    """``64``, or ``channel`` (also ``none``) for one scale an output channel."""
    if text.lower() in ONE_SCALE_A_CHANNEL:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise RecipeError(f"`{text}` is no group size", where=where, fix="write a number such as 64, or `channel`")
    return int(text)


def scheme_values(text: str, *, where: str, alone: bool = False) -> dict[str, Any]:
    """``w4a16:32`` → the settings ``scheme`` and ``group_size``; without a colon the scheme's own group size.

    ``alone``: it is that of ``--scheme``. Raises RecipeError that knows other tools' names, too.
    """
    scheme, colon, group = text.partition(":")
    if scheme not in SCHEMES:
        raise unknown_scheme(scheme, group or None, where=where, alone=alone)
    return {"scheme": scheme, **({"group_size": group_size(group, where=where)} if colon else {})}


def scheme_flags(scheme: str, group: str | None) -> dict[str, Any]:
    """The settings of ``--scheme`` and ``--group-size``. Raises RecipeError where they name two group sizes."""
    values = scheme_values(scheme, where=f"--scheme {scheme}", alone=True)
    if group is None:
        return values
    size = group_size(group, where="--group-size")
    if values.get("group_size", size) != size:
        raise RecipeError(
            f"--scheme {scheme} and --group-size {group} contradict each other",
            where=f"--group-size {group}",
            fix="name the group size once",
        )
    return {**values, "group_size": size}


def layer_names(text: str) -> list[str]:
    """``down_proj,*.layers.0.*`` → its names. A comma in braces belongs to a pattern: ``re:.*layers\\.[0-9]{1,2}``."""
    return [name.strip() for name in re.split(r",(?![^{}]*\})", text)]


def ignore_values(texts: Sequence[str]) -> list[str]:
    """The names of every ``--ignore``, and the head, which is always kept."""
    names = ["lm_head"]
    for text in texts:
        if not all(found := layer_names(text)):
            raise RecipeError("an empty name names no layer", where=f"--ignore {text}", fix="--ignore down_proj,o_proj")
        names += found
    return list(dict.fromkeys(names))


def override_values(text: str) -> dict[str, Any]:
    """``down_proj,*.layers.0.*=w8a16:64`` → one entry of ``overrides``."""
    where = f"--override {text}"
    layers, equals, scheme = text.rpartition("=")
    names = layer_names(layers)
    if not equals or not all(names):
        raise RecipeError(
            "an override names layers and their scheme", where=where, fix="--override 'down_proj=w8a16', say"
        )
    return {"layers": names, **scheme_values(scheme, where=where)}


NOT_IN_A_SWEEP = {
    "format": "leave it out: each scheme is measured in its first format; give it when you quantize",
    "group_size": "write it behind each scheme: --sweep w4a16:32,w4a16:64",
    "asymmetric": "leave it out: a sweep measures schemes without zero points; --scheme takes it",
    "override": "leave it out: a sweep gives all layers one scheme; --scheme takes it",
    "max_shard_size": "leave it out: a sweep writes no model",
    "num_processes": "leave it out: a sweep is one process",
    "no_verify": "leave it out: a sweep writes no model that could be loaded",
    "max_kl": "leave it out: a sweep refuses nothing, its table shows each KL; --scheme takes it",
    "max_perplexity_ratio": "leave it out: a sweep refuses nothing, its table shows each ratio; --scheme takes it",
}
"""Flags of ``finetune quantize`` that a sweep doesn't take, and what to do instead."""


def sweep_names(text: str) -> list[str]:
    """``w4a16:32,w4a16:64,w8a8`` → its schemes, as they are written."""
    where = f"--sweep {text}"
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise RecipeError("there is no scheme to measure", where=where, fix="--sweep w4a16:32,w4a16:64,w8a16")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RecipeError(f"`{twice[0]}` is there twice", where=where, fix="name each scheme once")
    return names


def misfits_error(misfits: Mapping[str, RecipeError], fitting: Sequence[str]) -> RecipeError:
    """One error for all schemes of a sweep that can't be measured, so that one correction is enough."""
    first_name, first = next(iter(misfits.items()))
    if not fitting and len({(error.what, error.where, error.fix) for error in misfits.values()}) == 1:
        return first  # what they share is at fault
    if len(misfits) == 1:
        return RecipeError(f"{first_name}: {first.what}", where=first.where, fix=first.fix)
    lines = [f"{len(misfits)} of {len(misfits) + len(fitting)} schemes can't be measured"]
    for name, error in misfits.items():
        lines += [f"  {name}: {error.what}", *([f"    fix: {error.fix}"] if error.fix else [])]
    others = f", or leave them out: --sweep {','.join(fitting)}" if fitting else ""
    return RecipeError("\n".join(lines), where="--sweep", fix=f"correct each{others}")


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
