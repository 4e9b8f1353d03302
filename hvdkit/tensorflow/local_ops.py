"""The functions of ``horovod.tensorflow.mpi_ops`` for one rank, where Horovod is not installed.

Everything gives what a one-rank Horovod job gives: factors are applied, and mistakes raise errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Horovod's own numbers.
Average, Sum, Adasum, Min, Max, Product = range(6)


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


def init(*args: Any, **kwargs: Any) -> None:
    """Starts the one-rank job; the arguments of Horovod's ``init`` have no effect."""
    global _initialized
    _initialized = True
    global_process_set.ranks = [0]


def shutdown() -> None:
    """Ends the job; ``init`` may start another."""
    global _initialized
    _initialized = False


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
    _check_initialized()
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
    return tf.constant(_zero(), dtype=tf.int32)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Number of ranks."""
    return tf.constant(_one(), dtype=tf.int32, name=name or "Const")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1: this rank belongs to every set."""
    return tf.constant(_one(), dtype=tf.int32, name=name or "Const")


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Number of ranks on this machine."""
    return tf.constant(_one(), dtype=tf.int32, name=name or "Const")


def rank_op(name: str | None = None) -> tf.Tensor:
    """Number of this rank."""
    return tf.constant(_zero(), dtype=tf.int32, name=name or "Const")


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Number of this rank on its machine."""
    return tf.constant(_zero(), dtype=tf.int32, name=name or "Const")
