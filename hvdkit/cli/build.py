"""``hvdkit build``: options in, one call of the library, the wheel's path out."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import click

from hvdkit.horovod_build.builder import build, default_jobs, install, plan_build
from hvdkit.horovod_build.plan import FRAMEWORKS, BuildOptions


@click.command("build")
@click.option(
    "--framework",
    "frameworks",
    multiple=True,
    type=click.Choice(FRAMEWORKS),
    help="Build for this framework; may be given twice.  [default: all that are installed]",
)
@click.option(
    "--mpi/--no-mpi",
    default=None,
    help="Build with MPI, found as mpicxx on PATH or in this environment.  [default: where found]",
)
@click.option("--gloo/--no-gloo", default=True, show_default=True, help="Build with Gloo.")
@click.option(
    "--gpu",
    type=click.Choice(["nccl"]),
    help="GPU operations. The toolkit is CUDA_HOME, the nvidia wheels, or the nvcc on PATH; NCCL "
    "is NCCL_HOME or its wheel; HVDKIT_CUDA_ARCHITECTURES lists what to compile for.",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Compilers at a time.  [default: by cores]"
)
@click.option(
    "--sdist",
    type=click.Path(path_type=Path),
    help="Horovod's source release, instead of fetching it through pip.",
)
@click.option(
    "--wheel-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Copy the wheel into this folder.",
)
@click.option("--install", "do_install", is_flag=True, help="Install the wheel here afterwards.")
@click.option("--dry-run", is_flag=True, help="Print edits, environment and command, do nothing.")
def command(
    frameworks: tuple[str, ...],
    mpi: bool | None,
    gloo: bool,
    gpu: str | None,
    jobs: int | None,
    sdist: Path | None,
    wheel_dir: Path | None,
    do_install: bool,
    dry_run: bool,
) -> None:
    """Build Horovod for the frameworks of this environment.

    The finished wheel is proved on two ranks, kept in ${XDG_CACHE_HOME:-~/.cache}/hvdkit, and its
    path is the only line on standard output.
    """
    if not gloo and mpi is False:
        raise click.UsageError("--no-mpi and --no-gloo leave no controller; drop one of them")
    options = BuildOptions(
        frameworks=frameworks or None, mpi=mpi, gloo=gloo, gpu=gpu, jobs=jobs or default_jobs()
    )
    if dry_run:
        _, plan = plan_build(options, os.environ)
        click.echo(plan.describe())
        return
    # An ended session sends these; as exceptions they let the build remove what it made.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    started = time.monotonic()

    def report(line: str) -> None:
        click.echo(f"hvdkit [{time.monotonic() - started:4.0f} s] {line}", err=True)

    result = build(options, sdist=sdist, wheel_dir=wheel_dir, report=report)
    if do_install:
        install(result, plan_site_packages(), report)
    click.echo(result.wheel)


def plan_site_packages() -> Path:
    """Where this interpreter installs extensions."""
    import sysconfig

    return Path(sysconfig.get_path("platlib"))


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
