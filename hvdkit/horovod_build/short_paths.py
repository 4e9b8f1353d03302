"""Paths without spaces for the time of a build.

CMake's search for MPI, TensorFlow's own flags and make all split paths at spaces. Links with short
names make every environment and cache look alike to them, and the links are gone afterwards; the
wheel names none of them, since its library paths are relative.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MPI_PROGRAMS = ("mpicc", "mpicxx", "mpic++", "mpiCC", "mpiexec", "mpirun")


@dataclass(frozen=True)
class ShortPaths:
    """Stand-ins for the build.

    Args:
        python: The interpreter, reached through a link to its environment.
        work: Folder to compile in.
        mpi_bin: Folder with the ``mpicxx`` to use, or None.
    """

    python: Path
    work: Path
    mpi_bin: Path | None


@contextlib.contextmanager
def short_paths(prefix: Path, workspace: Path, mpi_bin: Path | None) -> Iterator[ShortPaths]:
    """Makes the links, and removes them afterwards.

    Args:
        prefix: The environment.
        workspace: Folder to compile in where its path is fit for it.
        mpi_bin: Folder of the MPI's ``mpicxx``, or None.
    """
    base = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix="hvdkit-", dir="/tmp" if re.search(r"\s", base) else base
    ) as folder:
        link = Path(folder, "env")
        link.symlink_to(prefix)
        python = Path(sys.executable)
        if python.is_relative_to(prefix):
            python = link / python.relative_to(prefix)
        work = workspace
        if re.search(r"\s", str(workspace)):
            work = Path(folder, "work")
            work.mkdir()
        if mpi_bin is not None and mpi_bin.is_relative_to(prefix):
            shim = Path(folder, "bin")
            shim.mkdir()
            # CMake looks for the compilers next to the launcher before it looks on PATH.
            for name in _MPI_PROGRAMS:
                shim.joinpath(name).write_text(mpi_shim(mpi_bin / name, prefix, link))
                shim.joinpath(name).chmod(0o755)
            mpi_bin = shim
        yield ShortPaths(python, work, mpi_bin)


def mpi_shim(program: Path, prefix: Path, link: Path) -> str:
    """A script that runs an MPI program, and shows its flags with `link` in place of `prefix`.

    The wrapper compiler resolves links itself, so it would show the long path again.

    Example:
        >>> print(mpi_shim(Path("/e/bin/mpicxx"), Path("/e"), Path("/l")).splitlines()[2])
        -show*) /e/bin/mpicxx "$@" | sed 's|/e|/l|g' ;;
    """
    # Only what sed reads as more than itself; a backslash before another letter means something.
    pattern = re.sub(r"([\\|.*\[\]^$])", r"\\\1", str(prefix.resolve()))
    command = shlex.quote(str(program))
    return (
        f'#!/bin/sh\ncase "$1" in\n-show*) {command} "$@" | '
        f"sed {shlex.quote(f's|{pattern}|{link}|g')} ;;\n"
        f'*) exec {command} "$@" ;;\nesac\n'
    )
