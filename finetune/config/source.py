"""Read a YAML recipe and keep, for every value, the line it stands on; apply ``--set`` overrides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import RecipeError, did_you_mean

KeyPath = tuple[str | int, ...]
MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass
class Source:
    """The plain value of a YAML document and where each part of it was written."""

    name: str
    value: Any
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """``file:line`` (or the ``--set`` flag) of ``path``, or of the closest thing around it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.name


def load_yaml(path: Path) -> Source:
    """Raises RecipeError for a missing file, bad YAML, or a key that is written twice."""
    if not path.is_file():
        raise RecipeError("there is no such recipe", where=path, fix="give the path of a YAML file")
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as cause:
        raise RecipeError(f"the recipe is not UTF-8: {cause}", where=path, fix="save it as UTF-8") from cause
    except yaml.reader.ReaderError as cause:
        raise RecipeError(
            f"this is not valid YAML: the character {cause.character:#x} at position {cause.position}",
            where=path,
            fix="remove the character",
        ) from cause
    try:
        node = loader.get_single_node()
        source = Source(name=str(path), value={})
        if node is not None:
            source.value = _construct(loader, node, (), source)
        return source
    except yaml.YAMLError as cause:
        mark = getattr(cause, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(cause, "problem", None) or str(cause)
        raise RecipeError(
            f"this is not valid YAML: {problem}", where=f"{path}{line}", fix="correct the line"
        ) from cause
    except RecursionError:
        raise RecipeError("a value holds itself", where=path, fix="write the value out, without `&` and `*`") from None
    finally:
        loader.dispose()


def _construct(loader: yaml.SafeLoader, node: yaml.Node, path: KeyPath, source: Source) -> Any:
    source.places[path] = f"{source.name}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        first_lines: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == MERGE_TAG:
                continue
            key = _key(loader, key_node, source)
            if key in first_lines:
                raise RecipeError(
                    f"the key `{key}` is written twice, first on line {first_lines[key]}",
                    where=f"{source.name}:{line}",
                    fix="keep one of the two",
                )
            first_lines[key] = line
        loader.flatten_mapping(node)
        mapping = {}
        for key_node, value_node in node.value:
            key = _key(loader, key_node, source)
            mapping[key] = _construct(loader, value_node, (*path, key), source)
            # An error about a key is best shown at the key: a block value starts on the line after it.
            source.places[(*path, key)] = f"{source.name}:{key_node.start_mark.line + 1}"
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, (*path, index), source) for index, item in enumerate(node.value)]
    return _scalar(loader, node, source)


def _key(loader: yaml.SafeLoader, node: yaml.Node, source: Source) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise RecipeError("a key must be a word", where=f"{source.name}:{node.start_mark.line + 1}", fix="quote it")
    return str(_scalar(loader, node, source))


def _scalar(loader: yaml.SafeLoader, node: yaml.Node, source: Source) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except ValueError as cause:  # YAML takes 2024-13-45 for a date
        raise RecipeError(
            f"`{node.value}` is not a valid value: {cause}",
            where=f"{source.name}:{node.start_mark.line + 1}",
            fix="correct it, or quote it",
        ) from cause


def apply_overrides(source: Source, overrides: Iterable[str]) -> None:
    """Apply ``a.b=value`` flags in place. Values are YAML; a stage goes by its name, a list item by its index."""
    for override in overrides:
        flag = f"--set {override}"
        dotted, equals, text = override.partition("=")
        if not equals or not all(dotted.split(".")):
            raise RecipeError(f"`{override}` is not of the form key=value", where=flag, fix="--set stages.sft.epochs=2")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, TypeError) as cause:
            raise RecipeError(f"`{text}` is not a valid value", where=flag, fix="write it as in the recipe") from cause
        keys = dotted.split(".")
        target: Any = source.value
        path: KeyPath = ()
        for key in keys[:-1]:
            target, path = _step(target, path, key, flag)
        path = _assign(target, path, keys[-1], value, flag)
        for old in [old for old in source.places if old[: len(path)] == path]:
            del source.places[old]
        source.places[path] = flag


def stage_name(entry: Any) -> str | None:
    """The name of one item of ``stages:``, which is its ``name`` key or else its kind; None when it is malformed."""
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, dict) or len(entry) != 1:
        return None
    kind, settings = next(iter(entry.items()))
    return str(settings.get("name", kind)) if isinstance(settings, dict) else str(kind)


def _step(target: Any, path: KeyPath, key: str, flag: str) -> tuple[Any, KeyPath]:
    if isinstance(target, list):
        if key.isdecimal() and int(key) < len(target):
            return target[int(key)], (*path, int(key))
        names = [stage_name(entry) for entry in target] if path == ("stages",) else []
        if key in names:
            index = names.index(key)
            if isinstance(target[index], str):
                target[index] = {target[index]: {}}
            kind = next(iter(target[index]))
            if target[index][kind] is None:
                target[index][kind] = {}
            return target[index][kind], (*path, index, kind)
        allowed = [name for name in names if name] or [str(index) for index in range(len(target))]
        raise RecipeError(f"`{'.'.join(map(str, path))}` has no `{key}`", where=flag, fix=did_you_mean(key, allowed))
    if not isinstance(target, dict):
        raise RecipeError(f"`{'.'.join(map(str, path))}` holds a single value", where=flag, fix="drop what follows it")
    if target.get(key) is None:
        target[key] = {}
    return target[key], (*path, key)


def _assign(target: Any, path: KeyPath, key: str, value: Any, flag: str) -> KeyPath:
    if isinstance(target, list):
        if not key.isdecimal() or int(key) >= len(target):
            _step(target, path, key, flag)
            raise RecipeError("a whole stage can't be set by one flag", where=flag, fix="name one of its keys")
        target[int(key)] = value
        return (*path, int(key))
    if not isinstance(target, dict):
        raise RecipeError(f"`{'.'.join(map(str, path))}` holds a single value", where=flag, fix="drop what follows it")
    target[key] = value
    return (*path, key)
