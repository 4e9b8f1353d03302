"""The one-rank stand-in gives what a one-rank Horovod job gives."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import horovod.tensorflow.mpi_ops
import pytest

from hvdkit.tensorflow import local_ops
from tests.ranks import ROOT, job_environment

HIDE_HOROVOD = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: (
        None if name.partition(".")[0] == "horovod" else find_spec(name, path, target)
    )
)
"""


def run_alone(
    arguments: list[str], folder: Path, **environment: str
) -> subprocess.CompletedProcess:
    """Runs Python in one process, which finds no Horovod."""
    (folder / "sitecustomize.py").write_text(HIDE_HOROVOD)
    variables = job_environment({"PYTHONPATH": f"{folder}:{ROOT}", **environment})
    return subprocess.run(
        [sys.executable, *arguments], env=variables, capture_output=True, text=True, timeout=120
    )


def test_results_are_those_of_one_horovod_rank(tmp_path: Path) -> None:
    module = ["-m", "tests.tensorflow.one_rank_report"]
    with_horovod = subprocess.run(
        [sys.executable, *module],
        env=job_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert with_horovod.returncode == 0, with_horovod.stderr
    without = run_alone(module, tmp_path)
    assert without.returncode == 0, without.stderr
    installed, theirs = json.loads(with_horovod.stdout.splitlines()[-1])
    hidden, ours = json.loads(without.stdout.splitlines()[-1])
    assert (installed, hidden) == (True, False)
    differing = {key: (theirs[key], ours[key]) for key in theirs if theirs[key] != ours.get(key)}
    assert differing == {}
    assert ours.keys() == theirs.keys()


def test_stand_in_refuses_to_be_one_of_several(tmp_path: Path) -> None:
    launched = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    job = run_alone(["-c", "import hvdkit.tensorflow as hvd; hvd.init()"], tmp_path, **launched)
    assert job.returncode == 1
    assert "LaunchError" in job.stderr
    assert "OMPI_COMM_WORLD_SIZE=2" in job.stderr
    assert "Horovod is not installed" in job.stderr


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, value in vars(local_ops).items()
        if inspect.isfunction(value) and hasattr(horovod.tensorflow.mpi_ops, name)
    ],
)
def test_signatures_are_those_of_horovod(name: str) -> None:
    theirs = getattr(horovod.tensorflow.mpi_ops, name)
    ours = getattr(local_ops, name)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
