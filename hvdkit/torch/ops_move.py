"""allgather, broadcast and alltoall: tensors of any dtype and layout, moved bit for bit.

Horovod moves eight dtypes and contiguous tensors only; others travel here as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdkit.torch import ops_handles, ops_reduce
from hvdkit.torch.backend import mpi_ops
from hvdkit.torch.ops_handles import Steps
from hvdkit.torch.ops_wire import Tensor, from_bytes, op_name, to_bytes

_global = mpi_ops.global_process_set


def _mean_gradients(
    gradients: Sequence[Tensor], name: str | None, process_set: Any
) -> list[Tensor]:
    return ops_reduce.run_reduction(
        [gradient.contiguous() for gradient in gradients],
        None if name is None else f"{name}.grad",
        None,
        mpi_ops.Average,
        1.0,
        1.0,
        process_set,
        True,
    )


def _gathering(tensors: Sequence[Tensor], name: str, process_set: Any, grouped: bool) -> Steps:
    wires = [to_bytes(tensor.reshape(1) if tensor.dim() == 0 else tensor) for tensor in tensors]
    if grouped:
        outputs = yield mpi_ops.grouped_allgather_async(wires, name=name, process_set=process_set)
    else:
        output = yield mpi_ops.allgather_async(wires[0], name=name, process_set=process_set)
        outputs = (output,)
    results = [from_bytes(o, t.dtype) for o, t in zip(outputs, tensors, strict=True)]
    return tuple(results) if grouped else results[0]


class _Allgather(torch.autograd.Function):
    """Each rank's gradient is its part of the mean gradient of the gathered tensor."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: Any, grouped: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.name, ctx.process_set = name, process_set
        ctx.shapes = [tensor.shape for tensor in tensors]
        kind = "grouped_allgather" if grouped else "allgather"
        # A name of its own for each call: Horovod dies of a remembered allgather beside `join`.
        steps = _gathering(
            tensors, ops_handles.name_for(kind, name, process_set), process_set, grouped
        )
        gathered = ops_handles.run(steps)
        return tuple(gathered) if grouped else (gathered,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        means = _mean_gradients(gradients, ctx.name, ctx.process_set)
        rows = torch.tensor([shape[0] if shape else 1 for shape in ctx.shapes])
        all_rows = allgather(rows, process_set=ctx.process_set).view(-1, len(ctx.shapes))
        rank = ctx.process_set.rank()
        starts = all_rows[:rank].sum(0).tolist()
        own = [
            mean.narrow(0, start, count).reshape(shape)
            for mean, start, count, shape in zip(
                means, starts, rows.tolist(), ctx.shapes, strict=True
            )
        ]
        return (None, None, None, *own)


def allgather(tensor: Tensor, name: str | None = None, process_set: Any = _global) -> Tensor:
    """Concatenates every rank's `tensor` along the first dimension; differentiable.

    Other than in Horovod any dtype and layout; a scalar counts as one row.

    Args:
        tensor: Shape ``(rows, ...)``; ranks may differ in rows only.
        name: The same on all ranks; None numbers the calls.
        process_set: The ranks that take part.

    Example:
        >>> import torch, hvdkit.torch as hvd
        >>> hvd.init()
        >>> hvd.allgather(torch.tensor(True))
        tensor([True])
    """
    gathered: Tensor = _Allgather.apply(name, process_set, False, tensor)[0]
    return gathered


def allgather_async(tensor: Tensor, name: str | None = None, process_set: Any = _global) -> int:
    """Like :func:`allgather`, but returns a handle for `poll` and `synchronize`."""
    chosen = ops_handles.name_for("allgather", name, process_set)
    return ops_handles.start(_gathering([tensor], chosen, process_set, False))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: Any = _global
) -> tuple[Tensor, ...]:
    """Like :func:`allgather` for several tensors that are ready together."""
    gathered: tuple[Tensor, ...] = _Allgather.apply(name, process_set, True, *tensors)
    return gathered


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: Any = _global
) -> int:
    """Like :func:`grouped_allgather`, but returns a handle; its output is a tuple."""
    chosen = ops_handles.name_for("grouped_allgather", name, process_set)
    return ops_handles.start(_gathering(list(tensors), chosen, process_set, True))


def _sending(
    tensor: Tensor, target: Tensor | None, root_rank: int, name: str, process_set: Any
) -> Steps:
    if process_set.ranks and root_rank not in process_set.ranks:
        raise ValueError(
            f"root_rank must be one of the ranks that take part: {list(process_set.ranks)}. "
            f"Received: root_rank={root_rank}."
        )
    wire = to_bytes(tensor)
    in_place = target is not None or wire.data_ptr() != tensor.data_ptr()
    send = mpi_ops.broadcast_async_ if in_place else mpi_ops.broadcast_async
    output = yield send(wire, root_rank, name=name, process_set=process_set)
    result = from_bytes(output, tensor.dtype)
    if target is None:
        return result
    if result.data_ptr() != target.data_ptr():
        with torch.no_grad():
            target.copy_(result)
    return target


class _Broadcast(torch.autograd.Function):
    """The root's gradient is the mean of the ranks' gradients, the others' is zero."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: Any
    ) -> Tensor:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, name, process_set
        with ops_handles.blocking_name("broadcast", name) as chosen:
            result = ops_handles.run(_sending(tensor, None, root_rank, chosen, process_set))
        assert isinstance(result, Tensor)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (mean,) = _mean_gradients(gradients, ctx.name, ctx.process_set)
        own = mean if mpi_ops.rank() == ctx.root_rank else torch.zeros_like(mean)
        return own, None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = _global
) -> Tensor:
    """Returns the root's `tensor` on every rank; differentiable.

    Other than in Horovod any dtype and layout.

    Args:
        tensor: The same shape and dtype on all ranks; its values count on the root only.
        root_rank: A rank of the whole job, also where `process_set` is a part of it.
        name: The same on all ranks; None numbers the calls.
        process_set: The ranks that take part.

    Example:
        >>> import torch, hvdkit.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast(torch.tensor([1 + 2j]), root_rank=0)
        tensor([1.+2.j])
    """
    result: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return result


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = _global
) -> int:
    """Like :func:`broadcast`, but returns a handle for `poll` and `synchronize`."""
    chosen = ops_handles.name_for("broadcast", name, process_set)
    return ops_handles.start(_sending(tensor, None, root_rank, chosen, process_set))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = _global
) -> Tensor:
    """Like :func:`broadcast`, but writes the result to `tensor`; not differentiable."""
    with ops_handles.blocking_name("broadcast", name) as chosen:
        result = ops_handles.run(_sending(tensor, tensor, root_rank, chosen, process_set))
    assert isinstance(result, Tensor)
    return result


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = _global
) -> int:
    """Like :func:`broadcast_async`, but writes the result to `tensor`."""
    chosen = ops_handles.name_for("broadcast", name, process_set)
    return ops_handles.start(_sending(tensor, tensor, root_rank, chosen, process_set))


def _exchanging(tensor: Tensor, splits: Any, name: str, process_set: Any) -> Steps:
    if tensor.dim() == 0:
        raise ValueError(
            "alltoall splits the first dimension of a tensor among ranks. Received: a tensor "
            "without dimensions. Fix: pass one with a row for each rank."
        )
    counts = None if splits is None else torch.as_tensor(splits)
    output, received = yield mpi_ops.alltoall_async(
        to_bytes(tensor),
        None if counts is None else counts.to("cpu", torch.int32),
        name=name,
        process_set=process_set,
    )
    if counts is not None:
        received = received.to(counts.device)
    return from_bytes(output, tensor.dtype), received


class _Alltoall(torch.autograd.Function):
    """Sends each gradient back to where its row came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: Any) -> Any:
        steps = _exchanging(
            tensor, splits, ops_handles.name_for("alltoall", name, process_set), process_set
        )
        output, received = ops_handles.run(steps)
        ctx.name, ctx.process_set, ctx.received = name, process_set, received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        name = None if ctx.name is None else f"{ctx.name}.grad"
        returned, _ = _Alltoall.apply(gradients[0], ctx.received, name, ctx.process_set)
        return returned, None, None, None


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: Any = _global
) -> Any:
    """Sends to each rank its rows of `tensor`; differentiable.

    Other than in Horovod any dtype and layout.

    Args:
        tensor: Shape ``(rows, ...)``.
        splits: How many rows go to each rank, as a list or a tensor; None for equal parts.
        name: The same on all ranks; None numbers the calls.
        process_set: The ranks that take part.

    Returns:
        The rows received, in the order of ranks; with `splits` also how many came from each.

    Example:
        >>> import torch, hvdkit.torch as hvd
        >>> hvd.init()
        >>> hvd.alltoall(torch.tensor([1, 2]))
        tensor([1, 2])
    """
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: Any = _global
) -> int:
    """Like :func:`alltoall`, but returns a handle; its output is rows and counts."""
    chosen = ops_handles.name_for("alltoall", name, process_set)
    return ops_handles.start(_exchanging(tensor, splits, chosen, process_set))


def sparse_allreduce_async(tensor: Tensor, name: str, op: int, process_set: Any = _global) -> Any:
    """Starts the sum or average of a sparse COO tensor.

    Other than in Horovod bfloat16 values work, and an `op` it cannot do is refused.

    Returns:
        A function without arguments that waits and returns the sparse result.

    Example:
        >>> import torch, hvdkit.torch as hvd
        >>> hvd.init()
        >>> wait = hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), name="s", op=hvd.Sum)
        >>> wait().to_dense()
        tensor([[1., 0.],
                [0., 1.]])
    """
    if op not in (mpi_ops.Average, mpi_ops.Sum):
        raise ValueError(
            f"Sparse tensors can be reduced with op=Average or op=Sum. Received: op={op_name(op)}. "
            "Fix: reduce tensor.to_dense()."
        )
    # Adding up equal rows first sends no row twice.
    tensor = tensor.detach().coalesce()
    indices = allgather_async(tensor.indices().t(), f"{name}.indices", process_set)
    values = allgather_async(tensor.values(), f"{name}.values", process_set)

    def wait() -> Tensor:
        rows = ops_handles.synchronize(values)
        places = ops_handles.synchronize(indices)
        # 16-bit floats are added up as float32, like in allreduce.
        wide = rows.float() if rows.is_floating_point() and rows.element_size() < 4 else rows
        total = torch.sparse_coo_tensor(places.t(), wide, tensor.shape).coalesce()
        mean = total / process_set.size() if op == mpi_ops.Average else total
        return mean.to(tensor.dtype)

    return wait
