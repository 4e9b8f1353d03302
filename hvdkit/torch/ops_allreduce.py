"""The public allreduce and reducescatter functions, with gradients."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from hvdkit.torch import ops_handles, ops_reduce
from hvdkit.torch.backend import mpi_ops
from hvdkit.torch.compression import Compression
from hvdkit.torch.ops_move import grouped_allgather
from hvdkit.torch.ops_wire import Tensor

_global = mpi_ops.global_process_set


def _chosen_op(op: int | None, average: bool | None) -> int:
    if average is None:
        return mpi_ops.Average if op is None else op
    if op is not None:
        raise ValueError(
            "Expected op or average, not both. Received: "
            f"op={op}, average={average}. Fix: leave average out."
        )
    warnings.warn(
        "Parameter `average` has been replaced with `op`.", DeprecationWarning, stacklevel=3
    )
    return int(mpi_ops.Average if average else mpi_ops.Sum)


def _listed(tensors: Any) -> list[Tensor]:
    listed = list(tensors)
    if not listed:
        raise ValueError("A grouped operation needs at least one tensor. Received: tensors=[].")
    return listed


def _start(
    tensors: Sequence[Tensor],
    in_place: bool,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    grouped: bool,
) -> int:
    kind = "grouped_allreduce" if grouped else "allreduce"
    steps = ops_reduce.reduction(
        tensors,
        tensors if in_place else None,
        ops_handles.name_for(kind, name, process_set),
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        grouped,
    )
    shaped = _as_tuple(steps) if grouped else _first(steps)
    return ops_handles.start(shaped, ops_reduce.repeats(op, process_set))


def _first(steps: ops_handles.Steps) -> ops_handles.Steps:
    results = yield from steps
    return results[0]


def _as_tuple(steps: ops_handles.Steps) -> ops_handles.Steps:
    results = yield from steps
    return tuple(results)


class _Allreduce(torch.autograd.Function):
    """The gradient of a sum is the sum of the gradients, of an average their average."""

    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        return tuple(ops_reduce.run_reduction(tensors, *options))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        name, *rest = ctx.options
        reduced = _Allreduce.apply((None if name is None else f"{name}.grad", *rest), *gradients)
        return (None, *reduced)


def _reduce_compressed(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: Any,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    grouped: bool,
) -> list[Tensor]:
    factors = (op, prescale_factor, postscale_factor, process_set, grouped)
    if hasattr(compression, "reduce"):
        # Only sums are worth compressing, and only floats can be.
        summed = op in (mpi_ops.Average, mpi_ops.Sum)
        if summed and all(tensor.is_floating_point() for tensor in tensors):
            return list(_Allreduce.apply((name, compression, *factors), *tensors))
        return list(_Allreduce.apply((name, None, *factors), *tensors))
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _Allreduce.apply((name, None, *factors), *(wire for wire, _ in pairs))
    return [
        compression.decompress(wire, context)
        for wire, (_, context) in zip(reduced, pairs, strict=True)
    ]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _global,
) -> Tensor:
    """Averages (or sums, ...) `tensor` over ranks into a new tensor; differentiable.

    Other than in Horovod: bfloat16 and every other dtype listed in the error for an unknown one;
    any memory layout; integer averages are rounded, not truncated; 16-bit floats are summed in
    float32; ranks that have joined weigh nothing; ``Compression.fp16`` cannot overflow.

    Args:
        tensor: The same shape and dtype on all ranks.
        average: Deprecated; use `op`.
        name: The same on all ranks; None numbers the calls.
        compression: How the numbers travel.
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: Applied to `tensor`.
        postscale_factor: Applied to the result.
        process_set: The ranks that take part.

    Raises:
        ValueError: The dtype cannot be reduced with `op`.
        HorovodInternalError: The operation failed on some rank.

    Example:
        >>> import torch, hvdkit.torch as hvd
        >>> hvd.init()
        >>> hvd.allreduce(torch.tensor([1.5], dtype=torch.bfloat16), op=hvd.Sum)
        tensor([1.5000], dtype=torch.bfloat16)
    """
    op = _chosen_op(op, average)
    factors = (prescale_factor, postscale_factor)
    return _reduce_compressed([tensor], name, compression, op, *factors, process_set, False)[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _global,
) -> int:
    """Like :func:`allreduce`, but returns a handle for `poll` and `synchronize`."""
    op = _chosen_op(op, average)
    return _start([tensor], False, name, op, prescale_factor, postscale_factor, process_set, False)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _global,
) -> Tensor:
    """Like :func:`allreduce`, but writes the result to `tensor`; not differentiable."""
    op = _chosen_op(op, average)
    factors = (prescale_factor, postscale_factor)
    with ops_handles.blocking_name("allreduce", name) as chosen:
        handle = _start([tensor], True, chosen, op, *factors, process_set, False)
        result: Tensor = ops_handles.synchronize(handle)
    return result


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _global,
) -> int:
    """Like :func:`allreduce_async`, but writes the result to `tensor`."""
    op = _chosen_op(op, average)
    return _start([tensor], True, name, op, prescale_factor, postscale_factor, process_set, False)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _global,
) -> list[Tensor]:
    """Like :func:`allreduce` for several tensors, of any dtypes, that are ready together.

    Example:
        >>> import torch, hvdkit.torch as hvd
        >>> hvd.init()
        >>> hvd.grouped_allreduce([torch.ones(1), torch.tensor([2])])
        [tensor([1.]), tensor([2])]
    """
    op = _chosen_op(op, average)
    factors = (prescale_factor, postscale_factor)
    listed = _listed(tensors)
    return _reduce_compressed(listed, name, compression, op, *factors, process_set, True)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _global,
) -> int:
    """Like :func:`grouped_allreduce`, but returns a handle; its output is a tuple."""
    op = _chosen_op(op, average)
    factors = (prescale_factor, postscale_factor)
    return _start(_listed(tensors), False, name, op, *factors, process_set, True)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _global,
) -> tuple[Tensor, ...]:
    """Like :func:`grouped_allreduce`, but writes the results to `tensors`."""
    op = _chosen_op(op, average)
    factors = (prescale_factor, postscale_factor)
    with ops_handles.blocking_name("grouped_allreduce", name) as chosen:
        handle = _start(_listed(tensors), True, chosen, op, *factors, process_set, True)
        result: tuple[Tensor, ...] = ops_handles.synchronize(handle)
    return result


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _global,
) -> int:
    """Like :func:`grouped_allreduce_async`, but writes the results to `tensors`."""
    op = _chosen_op(op, average)
    factors = (prescale_factor, postscale_factor)
    return _start(_listed(tensors), True, name, op, *factors, process_set, True)


class _Reducescatter(torch.autograd.Function):
    """Gathers the gradients of the parts; the scale is Horovod's."""

    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        name, op, *factors, process_set, grouped = options
        kind = "grouped_reducescatter" if grouped else "reducescatter"
        with ops_handles.blocking_name(kind, name) as chosen:
            steps = ops_reduce.scattering(tensors, chosen, op, *factors, process_set, grouped)
            return tuple(ops_handles.run(steps))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        name, op, prescale_factor, postscale_factor, process_set, _ = ctx.options
        factor = prescale_factor * postscale_factor
        factor *= process_set.size() if op == mpi_ops.Sum else 1
        scaled = [gradient * factor for gradient in gradients]
        gathered = grouped_allgather(
            scaled, name=None if name is None else f"{name}.grad", process_set=process_set
        )
        return (None, *gathered)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = mpi_ops.Average,
    process_set: Any = _global,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduces `tensor` over ranks and gives each rank its part of the first dimension.

    `compression` with a ``reduce`` of its own (fp16, bf16) has no form for this operation; such
    tensors travel uncompressed. Dtypes are as in :func:`allreduce`.

    Args:
        tensor: Shape ``(rows, ...)``, the same on all ranks.
        name: The same on all ranks; None numbers the calls.
        compression: How the numbers travel.
        op: Average (the default) or Sum.
        process_set: The ranks that take part.
        prescale_factor: Applied to `tensor`.
        postscale_factor: Applied to the result.

    Returns:
        Shape ``(rows / ranks, ...)``; the first ranks have one row more where it does not divide.

    Example:
        >>> import torch, hvdkit.torch as hvd
        >>> hvd.init()
        >>> hvd.reducescatter(torch.ones(2), op=hvd.Sum)
        tensor([1., 1.])
    """
    factors = (prescale_factor, postscale_factor)
    return _scatter_compressed([tensor], name, compression, op, *factors, process_set, False)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = mpi_ops.Average,
    process_set: Any = _global,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Like :func:`reducescatter` for several tensors that are ready together."""
    factors = (prescale_factor, postscale_factor)
    listed = _listed(tensors)
    return _scatter_compressed(listed, name, compression, op, *factors, process_set, True)


def _scatter_compressed(
    tensors: Sequence[Tensor], name: str | None, compression: Any, *options: Any
) -> list[Tensor]:
    if hasattr(compression, "reduce"):
        compression = Compression.none
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _Reducescatter.apply((name, *options), *(wire for wire, _ in pairs))
    return [
        compression.decompress(wire, context)
        for wire, (_, context) in zip(reduced, pairs, strict=True)
    ]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = mpi_ops.Average,
    process_set: Any = _global,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Like :func:`reducescatter`, but returns a handle for `poll` and `synchronize`."""
    chosen = ops_handles.name_for("reducescatter", name, process_set)
    factors = (prescale_factor, postscale_factor)
    steps = ops_reduce.scattering([tensor], chosen, op, *factors, process_set, False)
    return ops_handles.start(_first(steps))


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = mpi_ops.Average,
    process_set: Any = _global,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Like :func:`grouped_reducescatter`, but returns a handle; its output is a tuple."""
    chosen = ops_handles.name_for("grouped_reducescatter", name, process_set)
    factors = (prescale_factor, postscale_factor)
    steps = ops_reduce.scattering(_listed(tensors), chosen, op, *factors, process_set, True)
    return ops_handles.start(_as_tuple(steps))
