"""Every collective and every question of ``horovod.torch``, under the same names.

What differs from Horovod stands at the functions: :mod:`~hvdkit.torch.ops_allreduce` (sums and
averages), :mod:`~hvdkit.torch.ops_move` (gather, broadcast, exchange) and
:mod:`~hvdkit.torch.ops_handles` (``poll``, ``synchronize``, ``join``).
"""

from __future__ import annotations

import os
from typing import Any

from hvdkit import world
from hvdkit.errors import LaunchError
from hvdkit.torch import ops_handles
from hvdkit.torch.backend import HOROVOD_INSTALLED, mpi_ops
from hvdkit.torch.ops_allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from hvdkit.torch.ops_device import device
from hvdkit.torch.ops_handles import join, poll, synchronize
from hvdkit.torch.ops_move import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    sparse_allreduce_async,
)

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "device",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

Average: int = mpi_ops.Average
Sum: int = mpi_ops.Sum
Adasum: int = mpi_ops.Adasum
Min: int = mpi_ops.Min
Max: int = mpi_ops.Max
Product: int = mpi_ops.Product

HorovodInternalError = mpi_ops.HorovodInternalError
ProcessSet = mpi_ops.ProcessSet
global_process_set = mpi_ops.global_process_set
add_process_set = mpi_ops.add_process_set
remove_process_set = mpi_ops.remove_process_set

is_initialized = mpi_ops.is_initialized
start_timeline = mpi_ops.start_timeline
stop_timeline = mpi_ops.stop_timeline
barrier = mpi_ops.barrier

rank = mpi_ops.rank
size = mpi_ops.size
local_rank = mpi_ops.local_rank
local_size = mpi_ops.local_size
cross_rank = mpi_ops.cross_rank
cross_size = mpi_ops.cross_size
is_homogeneous = mpi_ops.is_homogeneous

mpi_threads_supported = mpi_ops.mpi_threads_supported
mpi_enabled = mpi_ops.mpi_enabled
mpi_built = mpi_ops.mpi_built
gloo_enabled = mpi_ops.gloo_enabled
gloo_built = mpi_ops.gloo_built
nccl_built = mpi_ops.nccl_built
ddl_built = mpi_ops.ddl_built
ccl_built = mpi_ops.ccl_built
cuda_built = mpi_ops.cuda_built
rocm_built = mpi_ops.rocm_built


def init(*args: Any, **kwargs: Any) -> None:
    """Starts Horovod, or the one-rank stand-in where Horovod is not installed.

    Args:
        args: As for ``horovod.torch.init``.
        kwargs: As for ``horovod.torch.init``: ``comm``, ``process_sets``.

    Raises:
        LaunchError: A launcher started another number of ranks than this process sees, where
            Horovod would run as many jobs of one rank; or MPI has ended in this process.

    Example:
        >>> import hvdkit.torch as hvd
        >>> hvd.init()
        >>> hvd.size()
        1
    """
    world.check_mpi_can_start()
    mpi_ops.init(*args, **kwargs)
    ops_handles.forget_all()
    # With `comm` the user says which of the ranks that were started make up the job.
    if not args and kwargs.get("comm") is None:
        try:
            world.check_launch(
                mpi_ops.size(),
                os.environ,
                horovod_installed=HOROVOD_INSTALLED,
                mpi_built=mpi_ops.mpi_built(),
            )
        except LaunchError:
            mpi_ops.shutdown()
            raise
    world.set_current(world.World.from_horovod(mpi_ops))


def shutdown(*args: Any, **kwargs: Any) -> None:
    """Leaves the job. On Gloo ``init`` may join another; MPI starts once in a process."""
    mpi_ops.shutdown(*args, **kwargs)
    ops_handles.forget_all()
    world.set_current(None)
