"""How quantized layers are stored, one format a file. A writer names tensors and describes them; it opens no file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from finetune.config.registry import Registry
from finetune.quant.scheme import QuantScheme

if TYPE_CHECKING:
    from torch import Tensor

    from finetune.quant.methods import QuantizedWeight


class Writer(Protocol):
    def tensors(self, layer: str, weight: QuantizedWeight, scheme: QuantScheme) -> dict[str, Tensor]:
        """What the file holds for ``layer``, by full tensor name."""

    def read(self, layer: str, tensors: dict[str, Tensor], scheme: QuantScheme) -> QuantizedWeight:
        """The inverse of ``tensors``: codes and scales of ``layer``, bit by bit."""

    def tensor_names(self, layer: str, scheme: QuantScheme) -> list[str]:
        """The names that ``tensors`` gives."""

    def quantization_config(self, scheme: QuantScheme, ignore: list[str]) -> dict[str, Any]:
        """The ``quantization_config`` of config.json; ``ignore``: full names of the Linear layers left as they are."""


WRITERS: Registry[Writer] = Registry("quantized format", package="finetune.quant.writers")
