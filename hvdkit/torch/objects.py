"""Sends Python objects between ranks, as bytes. An object that cannot be sent fails everywhere."""

from __future__ import annotations

from typing import Any

import torch

from hvdkit import pickled
from hvdkit.pickled import CHUNK_BYTES, UNSENDABLE, cannot_be_sent
from hvdkit.torch.backend import mpi_ops


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: Any = mpi_ops.global_process_set,
) -> Any:
    """Returns the root's object on every rank; on the root the very object.

    Args:
        obj: Anything that cloudpickle can send; ignored on the other ranks.
        root_rank: The rank whose object counts, numbered among all ranks.
        name: Name of the operation in timelines.
        process_set: The ranks that take part.

    Raises:
        SynchronizationError: The root's object cannot be sent; on the root, what cloudpickle
            raised.

    Example:
        >>> import hvdkit.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object({"epoch": 3}, root_rank=0)
        {'epoch': 3}
    """
    if process_set.size() == 1:
        return obj
    # Horovod's default name is the object's class, and waits for ever where classes differ.
    label = f"hvdkit.object.{name or 'unnamed'}"
    is_root = mpi_ops.rank() == root_rank
    data, problem = _to_bytes(obj) if is_root else (torch.empty(0, dtype=torch.uint8), None)
    size = torch.tensor([UNSENDABLE if problem else data.numel()], dtype=torch.int64)
    _wait(mpi_ops.broadcast_async_(size, root_rank, f"{label}.size", process_set))
    if problem is not None:
        raise problem
    if size.item() == UNSENDABLE:
        raise cannot_be_sent([root_rank])
    if not is_root:
        data = torch.empty(int(size.item()), dtype=torch.uint8)
    for index, chunk in enumerate(data.split(CHUNK_BYTES)):
        _wait(mpi_ops.broadcast_async_(chunk, root_rank, f"{label}.{index}", process_set))
    return obj if is_root else _from_bytes(data)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns every rank's object, in the order of ranks.

    Args:
        obj: Anything that cloudpickle can send.
        name: Name of the operation in timelines.

    Raises:
        SynchronizationError: Another rank's object cannot be sent; on that rank, what cloudpickle
            raised.

    Example:
        >>> import hvdkit.torch as hvd
        >>> hvd.init()
        >>> hvd.allgather_object("mine")
        ['mine']
    """
    if mpi_ops.size() == 1:
        return [obj]
    label = f"hvdkit.objects.{name or 'unnamed'}"
    data, problem = _to_bytes(obj)
    size = torch.tensor([UNSENDABLE if problem else data.numel()], dtype=torch.int64)
    sizes = _wait(mpi_ops.allgather_async(size, f"{label}.sizes")).tolist()
    if problem is not None:
        raise problem
    if UNSENDABLE in sizes:
        raise cannot_be_sent([rank for rank, size in enumerate(sizes) if size == UNSENDABLE])
    limit = CHUNK_BYTES // len(sizes)
    received: list[list[torch.Tensor]] = [[] for _ in sizes]
    for start in range(0, max(sizes), limit):
        part = data[start : start + limit]
        gathered = _wait(mpi_ops.allgather_async(part, f"{label}.{start}"))
        lengths = [min(max(size - start, 0), limit) for size in sizes]
        for parts, piece in zip(received, gathered.split(lengths), strict=True):
            parts.append(piece)
    return [_from_bytes(torch.cat(parts)) for parts in received]


def _to_bytes(obj: Any) -> tuple[torch.Tensor, Exception | None]:
    data, problem = pickled.to_bytes(obj)
    if problem is not None:
        return torch.empty(0, dtype=torch.uint8), problem
    return torch.frombuffer(data, dtype=torch.uint8), None


def _from_bytes(data: torch.Tensor) -> Any:
    return pickled.from_bytes(data.numpy().tobytes())


def _wait(handle: int) -> Any:
    return mpi_ops.synchronize(handle)
