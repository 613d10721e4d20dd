"""A table of the variants of one idea (a data format, a quantization method, a stage), each in a file of its own."""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from finetune.errors import RecipeError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to objects. The first look-up imports every module of ``package``, so a new file registers itself."""

    def __init__(self, what: str, *, package: str) -> None:
        self.what = what
        self._package = package
        self._entries: dict[str, T] = {}
        self._loaded = self._loading = False
        # A thread that looks up while another one imports must see all entries, not those so far.
        self._lock = threading.RLock()

    def register(self, name: str) -> Callable[[T], T]:
        def add(entry: T) -> T:
            assert name not in self._entries, f"{self.what} {name} is registered twice"
            self._entries[name] = entry
            return entry

        return add

    def _load(self) -> None:
        if self._loaded:
            return
        with self._lock:
            if self._loading or self._loaded:
                return
            self._loading = True
            try:
                package = importlib.import_module(self._package)
                for module in pkgutil.iter_modules(package.__path__):
                    importlib.import_module(f"{self._package}.{module.name}")
                self._loaded = True
            finally:
                self._loading = False

    def __getitem__(self, name: str) -> T:
        self._load()
        if name not in self._entries:
            raise RecipeError(f"unknown {self.what} `{name}`", fix=did_you_mean(name, self._entries))
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        self._load()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._entries))
