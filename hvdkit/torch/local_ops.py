"""The functions of ``horovod.torch.mpi_ops`` for one rank, used where Horovod is not installed.

Everything gives what a one-rank Horovod job gives: factors are applied, outputs are new tensors,
handles are numbers, and mistakes raise the same kinds of errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor

# Horovod's own numbers.
Average, Sum, Adasum, Min, Max, Product = range(6)

_REDUCED = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
_MOVED = (*_REDUCED, torch.uint8, torch.int8, torch.int16)


class HorovodInternalError(RuntimeError):
    """A collective failed. One rank alone never raises it, but scripts catch it."""


class ProcessSet:
    """Ranks that run collectives together; here only ``[0]`` can exist.

    Args:
        ranks_or_comm: A list of ranks.
    """

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"A process set needs a list of ranks. Received: {ranks_or_comm!r}.")
        self.ranks: list[int] | None = ranks
        self.mpi_comm = None
        self.process_set_id: int | None = None

    def size(self) -> int | None:
        """Number of ranks, None before the set was added."""
        return None if self.process_set_id is None else 1

    def rank(self) -> int | None:
        """This process's rank within the set, None before the set was added."""
        return None if self.process_set_id is None else 0

    def included(self) -> bool:
        """Whether this process belongs to the set."""
        return self.ranks is not None and 0 in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0

_initialized = False
_handle_map: dict[int, Any] = {}
_last_handle = 0


def init(*args: Any, **kwargs: Any) -> None:
    """Starts the one-rank job; the arguments of Horovod's ``init`` have no effect."""
    global _initialized
    _initialized = True
    global_process_set.ranks = [0]
    _handle_map.clear()


def shutdown(*args: Any, **kwargs: Any) -> None:
    """Ends the job; ``init`` may start another."""
    global _initialized
    _initialized = False
    _handle_map.clear()


def is_initialized() -> bool:
    """Whether ``init`` was called."""
    return _initialized


def _check_initialized() -> None:
    if not _initialized:
        raise ValueError("Horovod has not been initialized; use hvd.init().")


def _one() -> int:
    _check_initialized()
    return 1


def _zero() -> int:
    _check_initialized()
    return 0


def size() -> int:
    """Number of ranks."""
    return _one()


def local_size() -> int:
    """Number of ranks on this machine."""
    return _one()


def cross_size() -> int:
    """Number of machines."""
    return _one()


def rank() -> int:
    """Number of this rank."""
    return _zero()


def local_rank() -> int:
    """Number of this rank on its machine."""
    return _zero()


def cross_rank() -> int:
    """Number of this machine."""
    return _zero()


def is_homogeneous() -> bool:
    """Whether all machines have the same number of ranks."""
    return bool(_one())


def mpi_threads_supported() -> bool:
    """Always False: there is no MPI here."""
    _check_initialized()
    return False


def mpi_enabled() -> bool:
    """Always False, like the functions below: there is no Horovod here."""
    return False


mpi_built = gloo_enabled = gloo_built = ddl_built = ccl_built = cuda_built = rocm_built = (
    mpi_enabled
)


def nccl_built() -> int:
    """NCCL's version; 0 stands for none."""
    return 0


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Does nothing: there are no collectives to record."""
    _check_initialized()


def stop_timeline() -> None:
    """Does nothing, as `start_timeline`."""
    _check_initialized()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Refuses every set, as Horovod does: ``[0]`` is the global set, no other rank exists."""
    _check_initialized()
    given = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if given.ranks == [0]:
        raise ValueError(f"Attempted to add a duplicate process set: {given}")
    raise ValueError(f"A process set may hold rank 0 only in a one-rank job. Received: {given}.")


def remove_process_set(process_set: ProcessSet) -> bool:
    """Returns False: the global set cannot be removed, and there is no other."""
    return False


def _finished(output: Any) -> int:
    global _last_handle
    _check_initialized()
    _last_handle += 1
    _handle_map[_last_handle] = output
    return _last_handle


def _check(tensor: Tensor, dtypes: Sequence[torch.dtype], process_set: ProcessSet) -> None:
    _check_initialized()
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
    return _zero()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns at once."""
    _check_initialized()
