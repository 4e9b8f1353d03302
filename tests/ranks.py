"""Runs check functions on real ranks, one group of processes for many checks.

A *check module* is a file of functions named ``check_*`` that take the adapter as ``hvd``. Every
rank of a group runs the checks in the order of the file; each becomes one pytest case::

    test_on_ranks = rank_tests("tests.torch.checks_optimizer", sizes=(2, 4))

A check that fails ends its group: the ranks that wait for the failed one could wait for ever.
The checks after it are reported as not run.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
GROUP_TIMEOUT_S = 300
STACKS_S = 5
"""How long a job that is being ended may take to print where it was."""


@dataclass(frozen=True)
class JobResult:
    """What a job of several ranks left behind."""

    returncode: int | None
    """Exit code, or None where the job ran past its limit and was ended."""
    stdout: str
    rank_logs: dict[int, str]

    def report(self) -> str:
        """Exit code and every rank's log, one block each."""
        code = "ran past its time limit" if self.returncode is None else f"exit {self.returncode}"
        blocks = [f"job: {code}\n{self.stdout}"]
        blocks += [f"--- rank {rank} ---\n{log}" for rank, log in sorted(self.rank_logs.items())]
        return "\n".join(blocks)


def horovodrun_gloo(size: int) -> list[str]:
    """Arguments that start `size` ranks here which communicate over Gloo."""
    return [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", str(size)]


def mpirun(size: int) -> list[str]:
    """Arguments that start `size` ranks here, also where that is more than there are cores."""
    program = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.fail("mpirun is on neither the environment's nor the system's PATH; run `make test`")
    return [program, "-np", str(size), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]


def job_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a job: one compute thread a rank, this checkout and its tools first."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE",
    }
    return {**environment, **(extra or {})}


def run_job(
    command: Sequence[str],
    *,
    timeout_s: float = GROUP_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    log_dir: Path | None = None,
    cwd: Path | None = None,
) -> JobResult:
    """Runs `command` in a process group of its own, which ends whole when the time is up."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment) if environment is not None else job_environment(),
            cwd=cwd,
            start_new_session=True,
        )
        returncode: int | None
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            end_job(process)
        output.seek(0)
        stdout = output.read()
    logs = {}
    for path in sorted(log_dir.glob("rank-*.log")) if log_dir else []:
        logs[int(path.stem.removeprefix("rank-"))] = path.read_text(errors="replace")
    return JobResult(returncode, stdout, logs)


def end_job(process: subprocess.Popen[bytes]) -> None:
    """Ends a job with all its processes, also those that its launcher moved to other groups."""
    try:
        leader = psutil.Process(process.pid)
        members = leader.children(recursive=True)
    except psutil.NoSuchProcess:
        members = []
    try:
        os.killpg(process.pid, signal.SIGTERM)
    except ProcessLookupError:
        members = [member for member in members if member.is_running()]
    else:
        psutil.wait_procs(members, timeout=STACKS_S)
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


def run_ranks(
    size: int,
    arguments: Sequence[str],
    *,
    timeout_s: float = GROUP_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    launcher: Callable[[int], list[str]] = mpirun,
) -> JobResult:
    """Runs ``python *arguments`` on `size` ranks, each rank's output in a log of its own."""
    with tempfile.TemporaryDirectory() as folder:
        logged = [sys.executable, "-m", "tests.rank_log", folder, *arguments]
        return run_job(
            [*launcher(size), *logged],
            timeout_s=timeout_s,
            environment=job_environment(environment),
            log_dir=Path(folder),
            cwd=cwd or ROOT,
        )


def check_names(module: str) -> list[str]:
    """Names of the checks in a module, read without importing it."""
    source = ROOT / (module.replace(".", "/") + ".py")
    tree = ast.parse(source.read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    ]


@functools.cache
def _run_group(
    module: str,
    size: int,
    timeout_s: float,
    launcher: Callable[[int], list[str]],
    environment: tuple[tuple[str, str], ...],
) -> tuple[dict[str, str], JobResult]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["-m", "tests.rank_main", module, folder]
        job = run_ranks(
            size,
            arguments,
            timeout_s=timeout_s,
            launcher=launcher,
            environment=dict(environment),
        )
        outcomes: dict[str, str] = {}
        for path in sorted(Path(folder).glob("rank-*.json")):
            for name, outcome in json.loads(path.read_text()).items():
                if outcome != "passed":
                    outcomes[name] = outcome
                else:
                    outcomes.setdefault(name, outcome)
    return outcomes, job


def rank_tests(
    module: str,
    sizes: Sequence[int],
    timeout_s: float = GROUP_TIMEOUT_S,
    launcher: Callable[[int], list[str]] = mpirun,
    environment: Mapping[str, str] | None = None,
) -> Callable[[int, str], None]:
    """A pytest function with one case for each check and group size."""
    variables = tuple(sorted((environment or {}).items()))

    @pytest.mark.parametrize("name", check_names(module))
    @pytest.mark.parametrize("size", sizes)
    def test_on_ranks(size: int, name: str) -> None:
        outcomes, job = _run_group(module, size, timeout_s, launcher, variables)
        outcome = outcomes.get(name)
        if outcome is None and outcomes:
            pytest.fail(f"{name} on {size} ranks: not run, the group ended before", pytrace=False)
        if outcome != "passed":
            pytest.fail(f"{name} on {size} ranks: {outcome}\n{job.report()}", pytrace=False)
        if job.returncode != 0 and name == check_names(module)[-1]:
            pytest.fail(f"every check passed, but the job failed\n{job.report()}", pytrace=False)

    return test_on_ranks
