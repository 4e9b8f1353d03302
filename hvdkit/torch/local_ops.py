"""The functions of ``horovod.torch.mpi_ops`` for one rank, used where Horovod is not installed.

Everything gives what a one-rank Horovod job gives: factors are applied, outputs are new tensors,
handles are numbers, and mistakes raise the same kinds of errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdkit import one_rank
from hvdkit.one_rank import (  # noqa: F401
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    size,
    start_timeline,
    stop_timeline,
)

Tensor = torch.Tensor

_REDUCED = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
_MOVED = (*_REDUCED, torch.uint8, torch.int8, torch.int16)


class HorovodInternalError(RuntimeError):
    """A collective failed. One rank alone never raises it, but scripts catch it."""


_handle_map: dict[int, Any] = {}
_last_handle = 0


def init(*args: Any, **kwargs: Any) -> None:
    """Starts the one-rank job; the arguments of Horovod's ``init`` have no effect."""
    one_rank.init()
    _handle_map.clear()


def shutdown(*args: Any, **kwargs: Any) -> None:
    """Ends the job; ``init`` may start another."""
    one_rank.shutdown()
    _handle_map.clear()


def _finished(output: Any) -> int:
    global _last_handle
    one_rank.check_initialized()
    _last_handle += 1
    _handle_map[_last_handle] = output
    return _last_handle


def _check(tensor: Tensor, dtypes: Sequence[torch.dtype], process_set: ProcessSet) -> None:
    one_rank.check_initialized()
    if process_set.process_set_id != 0:
        raise ValueError(f"The process set was not added. Received: {process_set}.")
    if tensor.dtype not in dtypes:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")


def _scaled(tensor: Tensor, *factors: float) -> Tensor:
    result = tensor.detach().clone()
    for factor in factors:
        if factor != 1.0:
            result = (result.double() * factor).to(tensor.dtype)
    return result


def _reduced(tensor: Tensor, factors: Sequence[float], process_set: ProcessSet) -> Tensor:
    _check(tensor, _REDUCED, process_set)
    return _scaled(tensor, *factors)


def _resolve_op(op: int | None, average: bool | None) -> None:
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """The tensor itself, scaled."""
    _resolve_op(op, average)
    return _finished(_reduced(tensor, (prescale_factor, postscale_factor), process_set))


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Scales the tensor in place."""
    _resolve_op(op, average)
    result = _reduced(tensor, (prescale_factor, postscale_factor), process_set)
    return _finished(_written(result, tensor))


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """The tensors themselves, scaled."""
    _resolve_op(op, average)
    factors = (prescale_factor, postscale_factor)
    return _finished(tuple(_reduced(tensor, factors, process_set) for tensor in tensors))


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Scales the tensors in place."""
    _resolve_op(op, average)
    factors = (prescale_factor, postscale_factor)
    return _finished(tuple(_written(_reduced(t, factors, process_set), t) for t in tensors))


def _written(result: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        target.copy_(result)
    return target


def _moved(tensor: Tensor, process_set: ProcessSet) -> Tensor:
    _check(tensor, _MOVED, process_set)
    return tensor.detach().clone()


def _moved_rows(tensor: Tensor, process_set: ProcessSet) -> Tensor:
    if tensor.dim() == 0:
        raise HorovodInternalError("A tensor without dimensions has no rows to gather.")
    return _moved(tensor, process_set)


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """A copy."""
    return _finished(_moved_rows(tensor, process_set))


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Copies."""
    return _finished(tuple(_moved_rows(tensor, process_set) for tensor in tensors))


def _check_root(root_rank: int) -> None:
    if root_rank != 0:
        raise ValueError(f"root_rank must be 0 in a one-rank job. Received: root_rank={root_rank}.")


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """A copy."""
    _check_root(root_rank)
    return _finished(_moved(tensor, process_set))


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """The tensor as it is."""
    _check_root(root_rank)
    _check(tensor, _MOVED, process_set)
    return _finished(tensor)


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """A copy of the rows that `splits` counts (all without), and their number."""
    rows = _moved_rows(tensor, process_set)
    given = torch.as_tensor([len(rows)] if splits is None else splits).to(torch.int32)
    if given.numel() != 1 or int(given) > len(rows):
        raise ValueError(
            f"splits must hold one number of at most {len(rows)}, the rows of this tensor. "
            f"Received: splits={given.tolist()}."
        )
    return _finished((rows[: int(given)], given.clone()))


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """The tensor itself, scaled."""
    return _finished(_reduced(tensor, (prescale_factor, postscale_factor), process_set))


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """The tensors themselves, scaled."""
    factors = (prescale_factor, postscale_factor)
    return _finished(tuple(_reduced(tensor, factors, process_set) for tensor in tensors))


def poll(handle: int) -> bool:
    """True: everything is finished when its handle is returned."""
    if handle not in _handle_map:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return True


def synchronize(handle: int) -> Any:
    """The output of the operation; None for a handle that was used before."""
    return _handle_map.pop(handle, None)


def join(device: int = -1) -> int:
    """Returns 0, the rank that joined last."""
    return rank()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns at once."""
    one_rank.check_initialized()
