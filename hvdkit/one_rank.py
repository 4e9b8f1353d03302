"""The job of one rank that runs where Horovod is not installed: who it is, and what it lacks.

Both adapters' stand-ins have these functions beside their own operations. Each gives what Horovod
gives in a one-rank job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def check_initialized() -> None:
    """Raises Horovod's ValueError before ``init``."""
    if not _initialized:
        raise ValueError("Horovod has not been initialized; use hvd.init().")


def _one() -> int:
    check_initialized()
    return 1


def _zero() -> int:
    check_initialized()
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
    check_initialized()
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
    check_initialized()


def stop_timeline() -> None:
    """Does nothing, as `start_timeline`."""
    check_initialized()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Refuses every set, as Horovod does: ``[0]`` is the global set, no other rank exists."""
    check_initialized()
    given = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if given.ranks == [0]:
        raise ValueError(f"Attempted to add a duplicate process set: {given}")
    raise ValueError(f"A process set may hold rank 0 only in a one-rank job. Received: {given}.")


def remove_process_set(process_set: ProcessSet) -> bool:
    """Returns False: the global set cannot be removed, and there is no other."""
    return False
