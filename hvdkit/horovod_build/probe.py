"""Proves a wheel before it counts: two ranks and one allreduce, for each framework and controller.

The wheel is unpacked into a *stage*: a folder with the shape of the environment, in which all but
Horovod is a link. So the extension's relative library paths are proved as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from hvdkit.errors import BuildError
from hvdkit.horovod_build.machine import Machine
from hvdkit.horovod_build.plan import BuildPlan
from hvdkit.horovod_build.processes import first_errors, run_logged

PROBE_TIMEOUT_S = 180
# The launcher is started through Python: the stage has no scripts, and an environment that was
# copied has scripts that start the interpreter of the original.
_LAUNCHER = "import sys; from horovod.runner.launch import run_commandline; run_commandline()"


def make_stage(machine: Machine, wheel: Path, folder: Path, environment: Mapping[str, str]) -> Path:
    """Unpacks `wheel` into a copy of the environment made of links; returns its site-packages.

    Raises:
        BuildError: pip could not unpack the wheel.
    """
    inside = machine.site_packages.relative_to(machine.prefix)
    site = folder / inside
    site.mkdir(parents=True)
    original, shadow = machine.prefix, folder
    for part in inside.parts:
        _link_entries(original, shadow, skip=part)
        original, shadow = original / part, shadow / part
    for name in ("torch", "tensorflow", "nvidia"):
        if (machine.site_packages / name).exists():
            (site / name).symlink_to(machine.site_packages / name)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--quiet"]
    command += ["--target", str(site), str(wheel)]
    done = subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"pip could not unpack {wheel}:\n{done.stderr.strip()[-2000:]}")
    return site


def _link_entries(original: Path, shadow: Path, skip: str) -> None:
    for entry in original.iterdir():
        if entry.name != skip:
            (shadow / entry.name).symlink_to(entry)


def probe_command(framework: str, controller: str, site: Path) -> list[str]:
    """The job that proves one framework with one controller.

    Example:
        >>> probe_command("torch", "gloo", Path("/stage"))[3:6]
        ['--gloo', '-np', '2']
    """
    worker = [sys.executable, "-m", "hvdkit.workers.probe", framework, str(site)]
    return [sys.executable, "-c", _LAUNCHER, f"--{controller}", "-np", "2", *worker]


def probe_environment(site: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a probe: the stage first, and this package's own folder."""
    import hvdkit

    own = str(Path(hvdkit.__file__).resolve().parent.parent)
    return {
        **base,
        "PYTHONPATH": os.pathsep.join([str(site), own]),
        "PYTHONUNBUFFERED": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def probe_wheel(
    wheel: Path,
    plan: BuildPlan,
    machine: Machine,
    *,
    workspace: Path,
    log: Path,
    environment: Mapping[str, str],
    report: Callable[[str], None],
) -> None:
    """Runs every probe of the plan.

    Raises:
        BuildError: A probe failed; the wheel must not be used.
    """
    site = make_stage(machine, wheel, workspace / "stage", environment)
    variables = probe_environment(site, environment)
    for framework in plan.frameworks:
        for controller in plan.controllers:
            report(f"probing {framework} on two ranks with {controller}")
            start = log.stat().st_size if log.exists() else 0
            code = run_logged(
                probe_command(framework, controller, site),
                environment=variables,
                cwd=workspace,
                log=log,
                timeout_s=PROBE_TIMEOUT_S,
            )
            with log.open("rb") as file:
                file.seek(start)
                text = file.read().decode(errors="replace")
            passed = [f"hvdkit-probe {framework} rank {rank} of 2: sum 3.0" for rank in (0, 1)]
            if code != 0 or not all(line in text for line in passed):
                lines = first_errors(text) or text.strip().splitlines()[-5:]
                raise BuildError(
                    f"Horovod was compiled but does not work: expected one allreduce on two ranks "
                    f"with {framework} and {controller}. Received: exit code {code}.\n"
                    + "\n".join(f"  {line}" for line in lines)
                    + f"\nThe log: {log}"
                )
