"""How quantized layers are stored, one format a file. A writer names tensors and describes them; it opens no file.

Which writers there are, and which scheme each holds, is data (``QuantScheme.formats``), readable without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from finetune.config.registry import Registry
from finetune.quant.scheme import QuantScheme

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from finetune.quant.decoder import StreamedDecoder
    from finetune.quant.methods import QuantizedWeight
    from finetune.quant.shards import StoredTensor


class Writer(Protocol):
    def check(self, decoder: StreamedDecoder, schemes: Mapping[str, QuantScheme]) -> None:
        """Raise RecipeError (DependencyError) for what this format, or its loader, can't do; before any calibration.

        ``schemes``: by the full name of each layer to quantize.
        """

    def scale_dtype(self, scheme: QuantScheme, model_dtype: Any) -> Any:
        """The torch dtype in which a layer's scales are stored; methods round them to it before they round weights."""

    def tensors(self, layer: str, weight: QuantizedWeight, scheme: QuantScheme) -> dict[str, Tensor]:
        """What the file holds for ``layer``, by full tensor name."""

    def read(self, layer: str, tensors: dict[str, Tensor], scheme: QuantScheme) -> QuantizedWeight:
        """The inverse of ``tensors``: codes, scales and zero points of ``layer``, bit by bit."""

    def tensor_names(self, layer: str, scheme: QuantScheme) -> list[str]:
        """The names that ``tensors`` gives."""

    def publish(
        self,
        folder: Path,
        tensors: Sequence[StoredTensor],
        *,
        decoder: StreamedDecoder,
        schemes: Mapping[str, QuantScheme],
        kept: list[str],
        max_shard_size_bytes: int,
    ) -> int:
        """Write weights and configuration into ``folder``; returns the bytes of the weights.

        ``tensors``: where every tensor of the output lies now, in the model's order; ``kept``: full names of the
        layers that stay as they are.
        """


WRITERS: Registry[Writer] = Registry("quantized format", package="finetune.quant.writers")
