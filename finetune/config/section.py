"""Section: a typed, frozen part of a recipe that refuses unknown keys and knows which line an error is on.

A part of the program defines its section in its own ``settings.py``, beside its behaviour and free of heavy imports.
Fields are documented by the docstring under them:

    class OptimizerSettings(Section):
        learning_rate: float = Field(2e-5, gt=0)
        \"\"\"Peak learning rate.\"\"\"
"""

from __future__ import annotations

import types
import typing
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from finetune.config.source import KeyPath, Source
from finetune.errors import RecipeError, did_you_mean


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        populate_by_name=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    def resolved(self) -> dict[str, Any]:
        """Plain JSON values with every default filled in, under the names that a recipe uses."""
        return self.model_dump(mode="json", by_alias=True)


S = TypeVar("S", bound=Section)


def parse_section(kind: type[S], source: Source, path: KeyPath, value: Any) -> S:
    """Validate ``value``, found at ``path`` of ``source``. Raises RecipeError with the line of the first fault."""
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise RecipeError(
            f"`{dotted(path)}` must hold keys and values, not {value!r}",
            where=source.place(path),
            fix=did_you_mean("", _keys(kind)),
        )
    try:
        return kind.model_validate(value)
    except ValidationError as cause:
        # A misspelt key also shows as the missing one: report what was written before what was not.
        faults = sorted(cause.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
        raise _recipe_error(kind, source, path, faults[0]) from None


def _recipe_error(kind: type[Section], source: Source, path: KeyPath, fault: ErrorDetails) -> RecipeError:
    location = tuple(part for part in fault["loc"])
    full = (*path, *location)
    where = source.place(full)
    name = dotted(full)
    if fault["type"] == "extra_forbidden":
        section = _section_at(kind, location[:-1])
        return RecipeError(
            f"unknown key `{name}`", where=where, fix=did_you_mean(str(location[-1]), _keys(section or kind))
        )
    if fault["type"] == "missing":
        return RecipeError(f"`{name}` is missing", where=source.place(full[:-1]), fix=f"add `{full[-1]}:`")
    message = fault["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    # A section's own check may end with what to do.
    message, _, advice = message.partition("; set ")
    if isinstance(fault["input"], str | int | float | bool | None):
        message = f"`{name}` is {fault['input']!r}: {message}"
    elif name:
        message = f"`{name}`: {message}"
    return RecipeError(message, where=where, fix=f"set {advice}" if advice else "correct the value")


def _keys(kind: type[Section]) -> list[str]:
    return [field.alias or name for name, field in kind.model_fields.items()]


def _section_at(kind: type[Section], location: tuple[int | str, ...]) -> type[Section] | None:
    """The section class that validates ``location`` below ``kind``."""
    current: Any = kind
    for part in location:
        if isinstance(part, int):
            continue  # an item of a list: _unwrap has found the items' section already
        if isinstance(current, type) and issubclass(current, Section):
            by_key = {field.alias or name: field for name, field in current.model_fields.items()}
            if part not in by_key:
                return None
            current = _unwrap(by_key[str(part)].annotation)
    return current if isinstance(current, type) and issubclass(current, Section) else None


def _unwrap(annotation: Any) -> Any:
    """The Section inside Optional, list, tuple and dict annotations."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, list, tuple, dict, typing.Annotated):
        for argument in typing.get_args(annotation):
            found = _unwrap(argument)
            if isinstance(found, type) and issubclass(found, Section):
                return found
    return annotation


def dotted(path: KeyPath) -> str:
    """``stages.sft.learning_rate``: as ``--set`` takes it, a stage by its kind and not by its place in the list."""
    if path[:1] == ("stages",) and len(path) > 2:
        path = ("stages", *path[2:])
    return ".".join(str(part) for part in path)
