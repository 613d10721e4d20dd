"""The package bitsandbytes, imported late and quietly."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from finetune.errors import MissingDependencyError

_TALKATIVE = ("bitsandbytes.backends.cpu.ops", "bitsandbytes.autograd._functions")
"""They warn of an optional kernel that nothing here uses, and of a cast in every forward of every llm_int8 layer."""


def bitsandbytes_package() -> Any:
    """Raises MissingDependencyError where it isn't installed."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as cause:
        raise MissingDependencyError(
            f"nf4, fp4 and llm_int8 need the package bitsandbytes: {cause}",
            fix="pip install 'bitsandbytes>=0.49'",
        ) from cause
