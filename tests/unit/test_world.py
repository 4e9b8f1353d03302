"""Ranks, launchers' variables and the launched-but-alone check."""

from __future__ import annotations

import logging
import string
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit import world as w
from hvdkit.errors import LaunchError

OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"}
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
PMI = {"PMI_SIZE": "4", "PMI_RANK": "1"}
MVAPICH = {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "1"}
GLOO = {"HOROVOD_SIZE": "4", "HOROVOD_RANK": "1"}
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
ALL = [
    (OMPI, "Open MPI", "OMPI_COMM_WORLD_SIZE"),
    (SRUN, "Slurm (srun)", "SLURM_STEP_NUM_TASKS"),
    (PMI, "PMI (MPICH, Intel MPI)", "PMI_SIZE"),
    (MVAPICH, "MVAPICH2", "MV2_COMM_WORLD_SIZE"),
    (GLOO, "horovodrun", "HOROVOD_SIZE"),
    (TORCHRUN, "torchrun", "WORLD_SIZE"),
]


@pytest.fixture(autouse=True)
def _no_world_left() -> Iterator[None]:
    yield
    w.set_current(None)


@pytest.mark.parametrize(("environ", "launcher", "variable"), ALL)
def test_each_launcher_is_named_with_its_variable(
    environ: dict[str, str], launcher: str, variable: str
) -> None:
    launch = w.detect_launch(environ)
    assert launch is not None
    assert (launch.launcher, launch.size, launch.variable) == (launcher, 4, variable)
    w.check_launch(4, environ)
    for seen in (1, 2, 5):
        with pytest.raises(LaunchError, match=f"{variable}=4, ranks seen={seen}"):
            w.check_launch(seen, environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},  # a batch script itself
        {"WORLD_SIZE": "8"},  # anybody's variable
        {"RANK": "1", "LOCAL_RANK": "1"},
    ],
)
def test_no_launcher(environ: dict[str, str]) -> None:
    assert w.detect_launch(environ) is None
    w.check_launch(1, environ)


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, SRUN),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, SRUN),
        ({"HOROVOD_SIZE": "1", "HOROVOD_RANK": "0"}, OMPI),
        ({"HOROVOD_SIZE": "1", "HOROVOD_RANK": "0"}, SRUN),
        ({"WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, SRUN),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, {"PMIX_RANK": "3"}),
    ],
)
def test_the_innermost_launcher_counts(inner: dict[str, str], outer: dict[str, str]) -> None:
    w.check_launch(1, outer | inner)
    launch = w.detect_launch(outer | inner)
    assert launch is not None
    assert launch.size == 1


def test_mpirun_whose_daemons_are_a_slurm_step() -> None:
    daemons = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}  # two nodes, eight ranks
    environ = daemons | {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "7"}
    w.check_launch(8, environ)


def test_pmix_alone_gives_a_lower_bound() -> None:
    w.check_launch(1, {"PMIX_RANK": "0"})
    w.check_launch(9, {"PMIX_RANK": "2"})
    with pytest.raises(LaunchError, match="PMIx started at least 3 ranks"):
        w.check_launch(1, {"PMIX_RANK": "2"})


def test_an_elastic_job_may_change_its_size() -> None:
    for seen in (1, 3, 6):
        w.check_launch(seen, GLOO | {"HOROVOD_ELASTIC": "1"})


@given(st.text(string.printable, max_size=6))
def test_malformed_sizes_name_the_variable(text: str) -> None:
    environ = {"OMPI_COMM_WORLD_SIZE": text}
    if text.isdigit() and int(text) > 0:
        launch = w.detect_launch(environ)
        assert launch is not None
        assert launch.size == int(text)
    else:
        with pytest.raises(LaunchError, match="OMPI_COMM_WORLD_SIZE"):
            w.detect_launch(environ)


def test_a_rank_beyond_its_size_names_both() -> None:
    with pytest.raises(LaunchError, match=r"PMI_RANK=4, PMI_SIZE=4"):
        w.detect_launch({"PMI_SIZE": "4", "PMI_RANK": "4"})


@pytest.mark.parametrize(
    ("environ", "installed", "mpi_built", "remedy"),
    [
        (OMPI, False, None, "not installed in this Python environment"),
        (OMPI, True, False, "hvdkit build --mpi"),
        (OMPI, True, True, "belongs to the MPI"),
        (SRUN, True, True, "srun --mpi=pmix"),
        (SRUN, True, False, "without MPI"),
        (TORCHRUN, True, True, "horovodrun -np N"),
        (GLOO, True, False, "hvd.init"),
    ],
)
def test_the_remedy_fits(
    environ: dict[str, str], installed: bool, mpi_built: bool | None, remedy: str
) -> None:
    with pytest.raises(LaunchError, match=remedy):
        w.check_launch(1, environ, horovod_installed=installed, mpi_built=mpi_built)


def test_independent_jobs_must_be_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    environ = SRUN | {"HVDKIT_ALLOW_INDEPENDENT_RANKS": "1"}
    with caplog.at_level(logging.WARNING):
        w.check_launch(1, environ)
    assert "SLURM_STEP_NUM_TASKS=4" in caplog.text
    with pytest.raises(LaunchError):
        w.check_launch(2, environ)  # half a job is nobody's wish
    with pytest.raises(LaunchError):
        w.check_launch(1, SRUN | {"HVDKIT_ALLOW_INDEPENDENT_RANKS": "0"})


@given(st.integers(1, 6), st.integers(1, 4))
def test_worlds_of_a_grid(machines: int, per_machine: int) -> None:
    for rank in range(machines * per_machine):
        numbers = {
            "rank": rank,
            "size": machines * per_machine,
            "local_rank": rank % per_machine,
            "local_size": per_machine,
            "cross_rank": rank // per_machine,
            "cross_size": machines,
        }
        functions = {name: (lambda value=value: value) for name, value in numbers.items()}
        found = w.World.from_horovod(SimpleNamespace(**functions))
        assert found == w.World(**numbers)
        assert found.is_root == (rank == 0)


def test_an_impossible_world_is_refused() -> None:
    with pytest.raises(ValueError, match="local_rank=2, local_size=2"):
        w.World(2, 4, 2, 2, 0, 2)


def test_current_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for environ, _, _ in ALL:
        for name in environ:
            monkeypatch.delenv(name, raising=False)
    assert w.current() == w.World.single()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match=r"OMPI_COMM_WORLD_SIZE=2.*call hvd.init"):
        w.current()
    world = w.World(1, 2, 1, 2, 0, 1)
    w.set_current(world)
    assert w.current() is world
    w.set_current(None)
    monkeypatch.setenv("HVDKIT_ALLOW_INDEPENDENT_RANKS", "1")
    assert w.current() == w.World.single()
