"""Who am I: rank, size and device of this process, and whether its launcher agrees.

Framework-free: adapters hand in what Horovod says.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit import envvars
from hvdkit.errors import DeviceError, LaunchError
from hvdkit.optional import available

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """The place of this process among all ranks.

    Args:
        rank: Number of this process among all, from 0.
        size: Number of all processes.
        local_rank: Number of this process among those of its machine.
        local_size: Number of processes of this machine.
        cross_rank: Number of this machine among those that have this local rank.
        cross_size: Number of machines that have this local rank.

    Raises:
        ValueError: A rank does not lie below its size.

    Example:
        >>> World(rank=1, size=4, local_rank=1, local_size=2, cross_rank=0, cross_size=2).is_root
        False
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def __post_init__(self) -> None:
        for prefix in ("", "local_", "cross_"):
            rank, size = getattr(self, f"{prefix}rank"), getattr(self, f"{prefix}size")
            if not 0 <= rank < size:
                raise ValueError(
                    f"Expected 0 <= {prefix}rank < {prefix}size. "
                    f"Received: {prefix}rank={rank}, {prefix}size={size}."
                )

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @classmethod
    def single(cls) -> World:
        """The world of a process that runs alone.

        Example:
            >>> World.single().size
            1
        """
        return cls(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)

    @classmethod
    def from_horovod(cls, module: Any) -> World:
        """What an initialised Horovod module, or anything with its six functions, says.

        Example:
            >>> from types import SimpleNamespace
            >>> names = ("rank", "local_rank", "cross_rank")
            >>> one = {n: lambda: 0 for n in names} | {
            ...     n: lambda: 1 for n in ("size", "local_size", "cross_size")}
            >>> World.from_horovod(SimpleNamespace(**one)) == World.single()
            True
        """
        return cls(
            rank=module.rank(),
            size=module.size(),
            local_rank=module.local_rank(),
            local_size=module.local_size(),
            cross_rank=module.cross_rank(),
            cross_size=module.cross_size(),
        )


@dataclass(frozen=True)
class Launch:
    """What a launcher's variables say of the job.

    Args:
        launcher: The launcher's name for messages.
        size: Number of ranks that were started; at least so many where `exact` is False.
        rank: This process's number, None if the launcher does not say.
        variable: The variable that says so, for messages.
        exact: Whether `size` is the number itself and not a lower bound.
    """

    launcher: str
    size: int
    rank: int | None
    variable: str
    exact: bool = True


OPEN_MPI, MVAPICH2, PMI, PMIX = "Open MPI", "MVAPICH2", "PMI (MPICH, Intel MPI)", "PMIx"
SLURM, HOROVOD, TORCHRUN = "Slurm (srun)", "horovodrun", "torchrun"

# Innermost first. A launcher's variables are inherited by whatever its processes start, and MPI's
# launchers use srun to start their own daemons, one a node; so the one that starts ranks *within*
# another's process must be asked before it: horovodrun and torchrun run inside mpirun or srun,
# mpirun inside srun, and none the other way around. MVAPICH2's mpiexec also sets PMI's names.
_LAUNCHERS = (
    (HOROVOD, envvars.HOROVOD_SIZE, envvars.HOROVOD_RANK),
    (TORCHRUN, envvars.TORCHRUN_WORLD_SIZE, envvars.TORCHRUN_RANK),
    (OPEN_MPI, envvars.OMPI_COMM_WORLD_SIZE, envvars.OMPI_COMM_WORLD_RANK),
    (MVAPICH2, envvars.MV2_COMM_WORLD_SIZE, envvars.MV2_COMM_WORLD_RANK),
    (PMI, envvars.PMI_SIZE, envvars.PMI_RANK),
    (SLURM, envvars.SLURM_STEP_NUM_TASKS, envvars.SLURM_PROCID),
)


def detect_launch(environ: Mapping[str, str]) -> Launch | None:
    """Which launcher started this process, and as one of how many.

    The innermost launcher counts: ``mpirun -np 1`` inside a Slurm step of four tasks is one rank.
    ``SLURM_NTASKS`` is not asked, since a batch script's own shell has it too.

    Args:
        environ: The environment, usually ``os.environ``.

    Returns:
        What the launcher said; None if there was none.

    Raises:
        LaunchError: A variable is not a number, or a rank does not fit its size.

    Example:
        >>> detect_launch({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}).size
        4
        >>> detect_launch({"SLURM_NTASKS": "4"}) is None
        True
    """
    for launcher, size_name, rank_name in _LAUNCHERS:
        if size_name not in environ or not _is_meant(launcher, environ):
            continue
        size = _number(environ, size_name, minimum=1)
        rank = _number(environ, rank_name, minimum=0) if rank_name in environ else None
        if launcher == HOROVOD and environ.get(envvars.HOROVOD_ELASTIC) == "1":
            # The variable keeps the size of the start while ranks come and go.
            return Launch(launcher, 1, None, envvars.HOROVOD_ELASTIC, exact=False)
        if rank is not None and rank >= size:
            raise LaunchError(
                f"Expected {rank_name} below {size_name}. Received: {rank_name}={rank}, "
                f"{size_name}={size}. Fix: unset what another job left in the environment."
            )
        return Launch(launcher, size, rank, size_name)
    if envvars.PMIX_RANK in environ:
        rank = _number(environ, envvars.PMIX_RANK, minimum=0)
        return Launch(PMIX, rank + 1, rank, envvars.PMIX_RANK, exact=False)
    return None


def _is_meant(launcher: str, environ: Mapping[str, str]) -> bool:
    if launcher == TORCHRUN:
        # Plain names that other programs use as well.
        by_hand = {envvars.TORCHRUN_RANK, envvars.TORCHRUN_LOCAL_RANK} <= environ.keys()
        return by_hand or envvars.TORCHRUN_RUN_ID in environ
    if launcher == SLURM:
        return envvars.SLURM_PROCID in environ
    return True


def _number(environ: Mapping[str, str], name: str, minimum: int) -> int:
    text = environ[name]
    # int() alone would take "1_000" and "+1", which no launcher writes.
    if not (text.isascii() and text.isdigit()) or int(text) < minimum:
        raise LaunchError(
            f"Expected a whole number of at least {minimum} in {name}. Received: {name}={text!r}. "
            "Fix: unset it, or start the job with its launcher again."
        )
    return int(text)


def check_launch(
    seen_size: int,
    environ: Mapping[str, str],
    *,
    horovod_installed: bool | None = None,
    mpi_built: bool | None = None,
) -> None:
    """Stops a process that its launcher counts among more, or fewer, ranks than it sees.

    Without this, a job of N ranks becomes N silent jobs of one rank. Setting
    ``HVDKIT_ALLOW_INDEPENDENT_RANKS=1`` turns the error into a warning.

    Args:
        seen_size: Number of ranks that this process can reach.
        environ: The environment, usually ``os.environ``.
        horovod_installed: Whether Horovod is there; None looks for it.
        mpi_built: Whether Horovod was built with MPI; None if that is not known.

    Raises:
        LaunchError: The launcher's number differs from `seen_size`.

    Example:
        >>> check_launch(1, {})
        >>> check_launch(4, {"OMPI_COMM_WORLD_SIZE": "4"})
    """
    launch = detect_launch(environ)
    if launch is None or (seen_size == launch.size if launch.exact else seen_size >= launch.size):
        return
    if horovod_installed is None:
        horovod_installed = available("horovod")
    count = f"{launch.size}" if launch.exact else f"at least {launch.size}"
    message = (
        f"{launch.launcher} started {count} ranks, but this process sees {seen_size}. "
        f"Received: {launch.variable}={environ[launch.variable]}, ranks seen={seen_size}. "
        f"Fix: {_remedy(launch, horovod_installed, mpi_built)}"
    )
    # Only processes that are truly alone can be independent jobs.
    if seen_size == 1 and environ.get(envvars.ALLOW_INDEPENDENT_RANKS) == "1":
        logger.warning("%s Going on alone: %s=1.", message, envvars.ALLOW_INDEPENDENT_RANKS)
        return
    raise LaunchError(
        f"{message} If independent one-rank jobs are what you want, set "
        f"{envvars.ALLOW_INDEPENDENT_RANKS}=1."
    )


def _remedy(launch: Launch, horovod_installed: bool, mpi_built: bool | None) -> str:
    if not horovod_installed:
        return (
            "Horovod is not installed in this Python environment; run `hvdkit build`, or activate "
            "the environment that has it."
        )
    if launch.launcher == TORCHRUN:
        return "torchrun cannot start Horovod jobs; use `horovodrun -np N python ...`."
    if launch.launcher == HOROVOD:
        return (
            "call hvd.init() before anything else, and start with the horovodrun of this "
            "environment (`horovodrun --check-build` shows what it has)."
        )
    if mpi_built is False:
        return (
            "this Horovod was built without MPI, which this launcher needs; build it with "
            "`hvdkit build --mpi`, or start with `horovodrun --gloo -np N python ...`."
        )
    if launch.launcher in (SLURM, PMIX):
        return (
            "let the launcher speak the protocol of Horovod's MPI: `srun --mpi=pmix` for Open MPI "
            "(`srun --mpi=list` shows what is there), `srun --mpi=pmi2` for MPICH; or start "
            "`horovodrun` from the batch script; for one process in a wide step, `srun -n 1`."
        )
    return (
        "call hvd.init(), and use the mpirun that belongs to the MPI Horovod was built with; the "
        "one of another MPI starts ranks that do not find each other. "
        "`horovodrun -np N python ...` chooses the right one."
    )


def device_index(
    world: World,
    visible_devices: int,
    allow_sharing: bool = False,
    local_identifiers: Sequence[Sequence[str]] | None = None,
) -> int | None:
    """Which of the devices that it sees this rank computes on.

    A launcher may show all ranks of a machine the same devices, or each rank one of its own
    (Slurm's ``--gpus-per-task=1``). The number alone does not tell these apart, nor does
    ``CUDA_VISIBLE_DEVICES``, which is 0 for every task where Slurm confines devices; the devices'
    UUIDs do. Adapters gather them among the local ranks.

    Args:
        world: The place of this process.
        visible_devices: Number of devices that this process sees.
        allow_sharing: Lets ranks take the same device, in turn.
        local_identifiers: For each local rank, the UUIDs of the devices that it sees, in order.

    Returns:
        An index below `visible_devices`; None if this rank sees no device.

    Raises:
        DeviceError: Two ranks of this machine would take the same device.
        ValueError: `local_identifiers` does not fit the other arguments.

    Example:
        >>> second = World(1, 2, 1, 2, 0, 1)
        >>> device_index(second, 4)
        1
        >>> device_index(second, 1, local_identifiers=[["GPU-a"], ["GPU-b"]])
        0
    """
    if visible_devices < 0:
        raise ValueError(f"Expected visible_devices >= 0. Received: {visible_devices=}.")
    if local_identifiers is None:
        lists: list[tuple[str, ...]] = [
            tuple(f"device {index}" for index in range(visible_devices))
        ] * world.local_size
        hint = (
            " If the launcher shows each rank a device of its own, pass local_identifiers."
            if visible_devices == 1
            else ""
        )
    else:
        lists = [tuple(identifiers) for identifiers in local_identifiers]
        hint = ""
        if len(lists) != world.local_size or len(lists[world.local_rank]) != visible_devices:
            raise ValueError(
                "Expected local_identifiers with one list for each local rank, this rank's own of "
                f"length visible_devices. Received: lengths={[len(i) for i in lists]}, "
                f"{visible_devices=}, local_size={world.local_size}."
            )
    if visible_devices == 0:
        return None
    # The k-th of the ranks that see the same list takes the k-th device of it.
    positions = [lists[:local_rank].count(seen) for local_rank, seen in enumerate(lists)]
    if not allow_sharing:
        _check_own_device(lists, positions, hint)
    return positions[world.local_rank] % visible_devices


def _check_own_device(lists: Sequence[Sequence[str]], positions: Sequence[int], hint: str) -> None:
    taken: dict[str, list[int]] = {}
    for local_rank, (seen, position) in enumerate(zip(lists, positions, strict=True)):
        if seen:
            taken.setdefault(seen[position % len(seen)], []).append(local_rank)
    shared = {device: ranks for device, ranks in taken.items() if len(ranks) > 1}
    if shared:
        listed = "; ".join(f"{device}: local ranks {ranks}" for device, ranks in shared.items())
        raise DeviceError(
            f"Expected a device for each rank of this machine. Received: {listed}. Fix: start at "
            "most as many ranks a machine as it has devices, or allow sharing (slow, and NCCL "
            f"refuses it).{hint}"
        )


def check_mpi_can_start() -> None:
    """Says what MPI, which starts once in a process, would say by ending the process.

    Raises:
        LaunchError: MPI has ended in this process.

    Example:
        >>> check_mpi_can_start()
    """
    finalized = getattr(ctypes.CDLL(None), "MPI_Finalized", None)
    ended = ctypes.c_int(0)
    if finalized is not None and finalized(ctypes.byref(ended)) == 0 and ended.value:
        raise LaunchError(
            "MPI has ended in this process and cannot start again. Expected init() before "
            "shutdown(). Fix: shut down once, at the end; or run on Gloo, which can start again: "
            "horovodrun --gloo."
        )


_current: World | None = None


def current() -> World:
    """The world that an adapter's ``init`` set; one rank if there was no launcher.

    Raises:
        LaunchError: A launcher started several ranks and ``init`` was not called.
    """
    if _current is not None:
        return _current
    launch = detect_launch(os.environ)
    alone = os.environ.get(envvars.ALLOW_INDEPENDENT_RANKS) == "1"
    if launch is not None and launch.size > 1 and not alone:
        raise LaunchError(
            "The rank is not known before hvd.init(). Expected a call of init(), since "
            f"{launch.launcher} started several ranks. Received: {launch.variable}="
            f"{os.environ[launch.variable]}. Fix: call hvd.init() first."
        )
    return World.single()


def set_current(world: World | None) -> None:
    """Sets what :func:`current` returns; None, as after ``shutdown``, forgets it.

    Example:
        >>> set_current(World.single())
        >>> current().rank
        0
        >>> set_current(None)
    """
    global _current
    _current = world
