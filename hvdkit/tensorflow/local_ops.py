"""The functions of ``horovod.tensorflow.mpi_ops`` for one rank, where Horovod is not installed.

Everything gives what a one-rank Horovod job gives: factors are applied, and mistakes raise errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

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
    init,
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
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether Adasum can run on so many ranks."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Which operation the old argument `average` and `op` stand for."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        return Average if average else Sum
    return Average if op is None else op


def _scaled(tensor: Any, *factors: float) -> tf.Tensor:
    one_rank.check_initialized()
    result = tf.identity(tensor)
    for factor in factors:
        if factor != 1.0:
            result = tf.cast(tf.cast(result, tf.float64) * factor, result.dtype)
    return result


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The tensor itself, scaled."""
    return _scaled(tensor, prescale_factor, postscale_factor)


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """The tensors themselves, scaled."""
    return [_scaled(tensor, prescale_factor, postscale_factor) for tensor in tensors]


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """The tensor itself, scaled."""
    return _scaled(tensor, prescale_factor, postscale_factor)


def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """The tensors themselves, scaled."""
    return [_scaled(tensor, prescale_factor, postscale_factor) for tensor in tensors]


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The tensor itself."""
    return _scaled(tensor)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """The tensors themselves."""
    return [_scaled(tensor) for tensor in tensors]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The tensor itself."""
    return _scaled(tensor)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The rows that `splits` counts (all without it), and with `splits` their number."""
    rows = _scaled(tensor)
    if splits is None:
        return rows
    given = tf.cast(tf.convert_to_tensor(splits), tf.int32)
    tf.debugging.assert_equal(tf.size(given), 1, "splits must hold one number on one rank")
    tf.debugging.assert_less_equal(given[0], tf.shape(rows)[0], "splits counts too many rows")
    return rows[: given[0]], tf.identity(given)


def join() -> tf.Tensor:
    """Returns 0, the rank that joined last."""
    return tf.constant(rank(), dtype=tf.int32)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Number of ranks."""
    return tf.constant(size(), dtype=tf.int32, name=name or "Const")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1: this rank belongs to every set."""
    return tf.constant(size(), dtype=tf.int32, name=name or "Const")


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Number of ranks on this machine."""
    return tf.constant(size(), dtype=tf.int32, name=name or "Const")


def rank_op(name: str | None = None) -> tf.Tensor:
    """Number of this rank."""
    return tf.constant(rank(), dtype=tf.int32, name=name or "Const")


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Number of this rank on its machine."""
    return tf.constant(rank(), dtype=tf.int32, name=name or "Const")
