"""Every collective and every question of ``horovod.tensorflow``, under the same names.

What differs from Horovod stands at the functions: :mod:`~hvdkit.tensorflow.ops_reduce` (sums and
averages) and :mod:`~hvdkit.tensorflow.ops_move` (gather, broadcast, exchange).
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from hvdkit import world
from hvdkit.errors import HvdkitError
from hvdkit.tensorflow import devices
from hvdkit.tensorflow.backend import HOROVOD_INSTALLED, mpi_ops
from hvdkit.tensorflow.ops_move import (
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
)
from hvdkit.tensorflow.ops_reduce import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

Average: int = mpi_ops.Average
Sum: int = mpi_ops.Sum
Adasum: int = mpi_ops.Adasum
Min: int = mpi_ops.Min
Max: int = mpi_ops.Max
Product: int = mpi_ops.Product

ProcessSet = mpi_ops.ProcessSet
global_process_set = mpi_ops.global_process_set
add_process_set = mpi_ops.add_process_set
remove_process_set = mpi_ops.remove_process_set

is_initialized = mpi_ops.is_initialized
start_timeline = mpi_ops.start_timeline
stop_timeline = mpi_ops.stop_timeline

rank = mpi_ops.rank
size = mpi_ops.size
local_rank = mpi_ops.local_rank
local_size = mpi_ops.local_size
cross_rank = mpi_ops.cross_rank
cross_size = mpi_ops.cross_size
is_homogeneous = mpi_ops.is_homogeneous

rank_op = mpi_ops.rank_op
local_rank_op = mpi_ops.local_rank_op
size_op = mpi_ops.size_op
local_size_op = mpi_ops.local_size_op
process_set_included_op = mpi_ops.process_set_included_op

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

check_num_rank_power_of_2 = mpi_ops.check_num_rank_power_of_2
handle_average_backwards_compatibility = mpi_ops.handle_average_backwards_compatibility


def init(*args: Any, **kwargs: Any) -> None:
    """Starts Horovod, or the one-rank stand-in where Horovod is not installed.

    Where TensorFlow sees GPUs, it is shown only this rank's, and takes memory as it needs it.

    Args:
        args: As for ``horovod.tensorflow.init``.
        kwargs: As for ``horovod.tensorflow.init``: ``comm``, ``process_sets``.

    Raises:
        LaunchError: A launcher started another number of ranks than this process sees, where
            Horovod would run as many jobs of one rank; or MPI has ended in this process.
        DeviceError: TensorFlow holds all GPUs already, or there are too few.

    Example:
        >>> import hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.size()
        1
    """
    world.check_mpi_can_start()
    mpi_ops.init(*args, **kwargs)
    try:
        # With `comm` the user says which of the ranks that were started make up the job.
        if not args and kwargs.get("comm") is None:
            world.check_launch(
                mpi_ops.size(),
                os.environ,
                horovod_installed=HOROVOD_INSTALLED,
                mpi_built=mpi_ops.mpi_built(),
            )
        place = world.World.from_horovod(mpi_ops)
        devices.pin_device(place, tf.config)
    except HvdkitError:
        mpi_ops.shutdown()
        raise
    world.set_current(place)


def shutdown() -> None:
    """Leaves the job. On Gloo ``init`` may join another; MPI starts once in a process."""
    mpi_ops.shutdown()
    world.set_current(None)


def join() -> tf.Tensor:
    """Says that this rank has no more data, and waits until all ranks have said so.

    Until then averages and sums of the other ranks go on without this one. Horovod cannot
    gather, broadcast or exchange beside joined ranks: that, and with it sparse gradients and
    ``Compression.bf16``, raises an error there; so do Min, Max and Product.

    Returns:
        The rank that joined last.

    Example:
        >>> import hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> int(hvd.join())
        0
    """
    return mpi_ops.join()


@tf.autograph.experimental.do_not_convert
def barrier(process_set: Any = mpi_ops.global_process_set) -> None:
    """Waits until all ranks of the process set are here. Not meant for use within a graph.

    Example:
        >>> import hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.barrier()
    """
    with tf.init_scope():
        allreduce(tf.zeros([1]), op=Sum, name="hvdkit.barrier", process_set=process_set)
