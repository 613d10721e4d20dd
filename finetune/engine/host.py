"""The optimizer in the host's memory (ZeRO-Offload): gradients stream down, stepped weights stream up.

Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training", section 4: the device keeps weights in the
compute type alone; float32 masters and both moments, and the step, are the host's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from finetune.engine.adamw import AdamW
from finetune.engine.protocol import AdamWSettings


class HostAdamW:
    """AdamW over float32 masters on the host for ``parameters`` on ``device``, whole tensors or local shards.

    A parameter of n elements takes 12n bytes there, n of ``staging_dtype`` for what crosses in both directions, and 4n
    more where micro-batches are added up. On a GPU the gradients cross on a stream of their own while the backward goes
    on, into pinned memory, and a slice's weights go up while the next slice is stepped. On the cpu the same code copies
    from memory to memory.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        masters: Sequence[Tensor],
        *,
        is_matrix: Sequence[bool],
        settings: AdamWSettings,
        device: torch.device,
        staging_dtype: torch.dtype,
    ) -> None:
        self._flats = [parameter.detach().view(-1) for parameter in parameters]
        self.optimizer = AdamW(masters, is_matrix=is_matrix, settings=settings)
        pinned = device.type == "cuda"
        self._staging = [
            torch.empty(parameter.shape, dtype=staging_dtype, device="cpu", pin_memory=pinned)
            for parameter in parameters
        ]
        self._stream = torch.cuda.Stream(device) if pinned else None
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._arrived: list[int] = []
        self.grads: list[Tensor | None] = [None] * len(parameters)
        """The step's gradients on the host, once ``add_up`` was called for its last micro-batch."""

    def take(self, index: int, grad: Tensor) -> None:
        """Let one parameter's gradient of this micro-batch cross; the caller may drop it at once."""
        self._arrived.append(index)
        if self._stream is None:
            self._staging[index].copy_(grad)
            return
        self._stream.wait_stream(torch.cuda.current_stream(grad.device))
        with torch.cuda.stream(self._stream):
            self._staging[index].copy_(grad, non_blocking=True)
        grad.record_stream(self._stream)

    def add_up(self, *, is_only: bool) -> None:
        """After each micro-batch's backward: add its gradients to the step's, in float32 unless it ``is_only`` one."""
        if self._stream is not None:
            self._stream.synchronize()
        for index in self._arrived:
            if is_only:
                self.grads[index] = self._staging[index]
                continue
            total = self._sums[index]
            if total is None:
                total = self._sums[index] = torch.empty(self._staging[index].shape, dtype=torch.float32)
            if self.grads[index] is None:
                self.grads[index] = total.copy_(self._staging[index])
            else:
                total.add_(self._staging[index])
        self._arrived.clear()

    def step(self, *, learning_rate: float, clip_coefficient: float) -> None:
        """Step the masters by ``grads`` and write the weights to the device."""
        self.optimizer.step(
            self.grads, learning_rate=learning_rate, clip_coefficient=clip_coefficient, after=self._upload
        )

    def clear(self) -> None:
        """Drop the step's gradients; their memory stays for the next step."""
        self.grads = [None] * len(self._flats)

    def upload_all(self) -> None:
        """Write every master to the device, after they were loaded."""
        for index, (flat, master) in enumerate(zip(self._flats, self.optimizer.masters, strict=True)):
            self._upload(index, slice(0, flat.numel()), master.view(-1))

    def _upload(self, index: int, part: slice, master_N: Tensor) -> None:
        # Cast here, so that half the bytes cross; the gradient that was staged there has been used by now.
        staged_N = self._staging[index].view(-1)[part]
        staged_N.copy_(master_N)
        self._flats[index][part].copy_(staged_N, non_blocking=True)
