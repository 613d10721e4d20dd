"""Matrix products on the cpu that round alike on any number of threads, and linear layers that use them.

oneDNN cuts a bfloat16 product into pieces by its shape and by the number of threads, and sums differently with each
cut (512 x 1536 @ 1536 x 576 on one thread and on two: another last bit in one element of 200). Two ranks of one thread
then part from one process of two threads at the first step, by 6e-4 of SmolLM2-135M's loss, and drift from there. Here
the cut depends on the shape alone and each piece is computed by one thread: the two agree to the last bits of a float32
loss, step after step. A step of SmolLM2 takes about a seventh longer for it; more threads than pieces gain nothing.
"""

from __future__ import annotations

import functools
import os
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

MAX_ROWS = 512
"""Rows of a piece. With 256 a product takes a quarter longer on one thread, with 512 a tenth."""
MAX_COLUMNS = 8192
"""Columns of a piece of a product whose right-hand side is large."""
LARGE = 1 << 22
"""Elements from which on a matrix is cut by columns, so that each part of it is read once: 8 MiB in bfloat16."""
MATRIX_PIECES = 4
"""Pieces of a product of many small matrices."""
ALIGNMENT = 64
"""Where a product may be cut: two cache lines of bfloat16."""


def matmul(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """``left @ right``; on the cpu in bfloat16 bit for bit the same on any number of threads. Has no gradient."""
    left_MK, right_KN = left_MK.detach(), right_KN.detach()
    if left_MK.device.type != "cpu" or left_MK.dtype != torch.bfloat16:
        return left_MK @ right_KN
    out_MN = left_MK.new_empty(left_MK.shape[0], right_KN.shape[1])
    if right_KN.numel() < LARGE:
        pieces = [
            functools.partial(torch.mm, left_MK[rows], right_KN, out=out_MN[rows])
            for rows in _cut(out_MN.shape[0], MAX_ROWS)
        ]
    else:
        pieces = [
            functools.partial(torch.mm, left_MK, right_KN[:, columns], out=out_MN[:, columns])
            for columns in _cut(out_MN.shape[1], MAX_COLUMNS)
        ]
    _run(pieces)
    return out_MN


def bmm(left_BMK: Tensor, right_BKN: Tensor) -> Tensor:
    """``torch.bmm``, cut as ``matmul`` is: by matrices, or by rows where there is one matrix. Has no gradient."""
    left_BMK, right_BKN = left_BMK.detach(), right_BKN.detach()
    if left_BMK.device.type != "cpu" or left_BMK.dtype != torch.bfloat16:
        return torch.bmm(left_BMK, right_BKN)
    if len(left_BMK) == 1:
        return matmul(left_BMK[0], right_BKN[0])[None]
    out_BMN = left_BMK.new_empty(*left_BMK.shape[:2], right_BKN.shape[2])
    step = -(-len(left_BMK) // MATRIX_PIECES)
    _run(
        [
            functools.partial(torch.bmm, left_BMK[batch], right_BKN[batch], out=out_BMN[batch])
            for batch in (slice(start, start + step) for start in range(0, len(left_BMK), step))
        ]
    )
    return out_BMN


def _cut(length: int, longest: int) -> list[slice]:
    """Two pieces or more of about one length, none above ``longest``; one where it is too short to be cut."""
    num_pieces = max(2, -(-length // longest))
    step = -(-length // (num_pieces * ALIGNMENT)) * ALIGNMENT
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _run(pieces: Sequence[Callable[[], object]]) -> None:
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        _run_share(pieces)
        return
    shares = [pieces[worker::num_threads] for worker in range(min(num_threads, len(pieces)))]
    pool = _pool(num_threads)
    for done in [pool.submit(_run_share, share) for share in shares]:
        done.result()


def _run_share(pieces: Sequence[Callable[[], object]]) -> None:
    for piece in pieces:
        piece()


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    """Workers of one thread each. Products release the interpreter's lock, so they run side by side."""
    # All workers start now and meet: a worker that sets its own count of threads sets that of threads to come, too,
    # which the caller's count replaces before there are any.
    met = threading.Barrier(num_threads)
    pool = ThreadPoolExecutor(num_threads, "matmul", initializer=_be_one_thread)
    list(pool.map(lambda _: met.wait(), range(num_threads)))
    torch.set_num_threads(num_threads)
    return pool


def _be_one_thread() -> None:
    torch.set_num_threads(1)
    # A thread's first parallel operation, or this question, gives it torch's count of that moment: here, one.
    torch.get_num_threads()


# A forked child has no workers.
os.register_at_fork(after_in_child=_pool.cache_clear)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(input, weight_NK)
        out = matmul(input.reshape(-1, input.shape[-1]), weight_NK.T)
        if bias_N is not None:
            out += bias_N
        return out.view(*input.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input, weight_NK = ctx.saved_tensors
        grad_TN, input_TK = grad.reshape(-1, grad.shape[-1]), input.reshape(-1, input.shape[-1])
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            matmul(grad_TN, weight_NK).view_as(input) if needs_input else None,
            matmul(grad_TN.T, input_TK) if needs_weight else None,
            grad_TN.sum(0) if needs_bias else None,
        )


def _linear_forward(module: nn.Linear, input: Tensor) -> Tensor:
    if input.device.type != "cpu" or input.dtype != torch.bfloat16:
        return nn.functional.linear(input, module.weight, module.bias)
    out: Tensor = _Linear.apply(input, module.weight, module.bias)
    return out


def _conv1d_forward(module: Conv1D, input: Tensor) -> Tensor:
    out: Tensor
    if input.device.type != "cpu" or input.dtype != torch.bfloat16:
        out = nn.functional.linear(input, module.weight.T, module.bias)
    else:
        out = _Linear.apply(input, module.weight.T, module.bias)
    return out


class _LayerNorm(torch.autograd.Function):
    """Torch's own, but for the gradients of weight and bias, which torch sums a thread at a time."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: Tensor, weight_N: Tensor | None, bias_N: Tensor | None, epsilon: float
    ) -> Tensor:
        out, mean, inverse_std = torch.native_layer_norm(input, input.shape[-1:], weight_N, bias_N, epsilon)
        ctx.save_for_backward(input, weight_N, bias_N, mean, inverse_std)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input, weight_N, bias_N, mean, inverse_std = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_input = torch.ops.aten.native_layer_norm_backward(
            grad, input, input.shape[-1:], mean, inverse_std, weight_N, bias_N, [needs_input, False, False]
        )[0]
        grad_weight = grad_bias = None
        if needs_weight:
            normalized = (input.float() - mean) * inverse_std
            grad_weight = (grad * normalized).view(-1, input.shape[-1]).sum(0).to(weight_N.dtype)
        if needs_bias:
            grad_bias = grad.reshape(-1, input.shape[-1]).sum(0)
        return grad_input, grad_weight, grad_bias, None


def _layer_norm_forward(module: nn.LayerNorm, input: Tensor) -> Tensor:
    if input.device.type != "cpu" or input.dtype != torch.bfloat16 or len(module.normalized_shape) != 1:
        return nn.functional.layer_norm(input, module.normalized_shape, module.weight, module.bias, module.eps)
    out: Tensor = _LayerNorm.apply(input, module.weight, module.bias, module.eps)
    return out


def round_alike(model: nn.Module) -> None:
    """Let ``model`` round alike on any number of threads on the cpu in bfloat16, forward and backward.

    ``nn.Linear`` and ``Conv1D`` compute by ``matmul``; ``nn.LayerNorm`` sums its gradients in one order. Subclasses
    keep their own forward, and so do experts that hold their weights in three dimensions.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = types.MethodType(_linear_forward, module)  # type: ignore[method-assign]
        elif type(module) is Conv1D:
            module.forward = types.MethodType(_conv1d_forward, module)  # type: ignore[method-assign]
        elif type(module) is nn.LayerNorm:
            module.forward = types.MethodType(_layer_norm_forward, module)  # type: ignore[method-assign]
