"""Runs Python in one process, with and without Horovod, for the tests of the one-rank stand-ins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


def assert_same_report(module: str, folder: Path) -> None:
    """Runs a module that prints JSON, with Horovod and without: both must print the same."""
    with_horovod = subprocess.run(
        [sys.executable, "-m", module],
        env=job_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert with_horovod.returncode == 0, with_horovod.stderr
    without = run_alone(["-m", module], folder)
    assert without.returncode == 0, without.stderr
    installed, theirs = json.loads(with_horovod.stdout.splitlines()[-1])
    hidden, ours = json.loads(without.stdout.splitlines()[-1])
    assert (installed, hidden) == (True, False)
    differing = {key: (theirs[key], ours[key]) for key in theirs if theirs[key] != ours.get(key)}
    assert differing == {}
    assert ours.keys() == theirs.keys()
