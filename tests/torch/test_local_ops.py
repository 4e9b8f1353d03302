"""The one-rank stand-in gives what a one-rank Horovod job gives."""

from __future__ import annotations

import inspect
from pathlib import Path

import horovod.torch.mpi_ops
import pytest

from hvdkit.torch import local_ops
from tests.one_rank_job import assert_same_report, run_alone


def test_results_are_those_of_one_horovod_rank(tmp_path: Path) -> None:
    assert_same_report("tests.torch.one_rank_report", tmp_path)


def test_stand_in_refuses_to_be_one_of_several(tmp_path: Path) -> None:
    launched = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    job = run_alone(["-c", "import hvdkit.torch as hvd; hvd.init()"], tmp_path, **launched)
    assert job.returncode == 1
    assert "LaunchError" in job.stderr
    assert "OMPI_COMM_WORLD_SIZE=2" in job.stderr
    assert "Horovod is not installed" in job.stderr


def test_errors_can_be_caught_by_name(tmp_path: Path) -> None:
    code = "import hvdkit.torch as hvd; print(issubclass(hvd.HorovodInternalError, RuntimeError))"
    job = run_alone(["-c", code], tmp_path)
    assert job.stdout.strip() == "True", job.stderr


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, value in vars(local_ops).items()
        if inspect.isfunction(value) and name[0] != "_"
    ],
)
def test_signatures_are_those_of_horovod(name: str) -> None:
    theirs = getattr(horovod.torch.mpi_ops, name)
    ours = getattr(local_ops, name)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
