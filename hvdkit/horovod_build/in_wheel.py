"""Runs inside the built Horovod: is the MPI that was loaded the one it was built with?

The builder copies this file into the wheel as ``horovod/common/hvdkit_check.py``; it may use the
standard library and the wheel's ``hvdkit_record`` only.
"""

from __future__ import annotations

import ctypes
import re
import warnings
from pathlib import Path


class WrongMPIError(RuntimeError):
    """The process loaded another MPI than the one this Horovod was built with."""


def family(version: str) -> str:
    """Implementation and release line, within which an MPI library may be exchanged.

    Example:
        >>> family("Open MPI v5.0.11, package: Open MPI root@host, ident: 5.0.11")
        'Open MPI 5.0'
    """
    found = re.match(r"\s*(.*?)(?:\s*version)?\s*:?\s*v?(\d+)\.(\d+)", version, re.IGNORECASE)
    if found is None:
        return version.strip()
    return f"{found.group(1).strip()} {found.group(2)}.{found.group(3)}"


def library_version(library: ctypes.CDLL) -> str | None:
    """What the MPI behind `library` says about itself; None where there is no MPI.

    Example:
        >>> library_version(ctypes.CDLL("libc.so.6")) is None
        True
    """
    function = getattr(library, "MPI_Get_library_version", None)
    if function is None:
        return None
    text = ctypes.create_string_buffer(8192)
    length = ctypes.c_int()
    if function(text, ctypes.byref(length)) != 0:
        return None
    return text.value.decode(errors="replace").strip("\x00\n ")


def loaded_path(maps: str) -> str:
    """Path of the MPI library in the text of ``/proc/self/maps``.

    Example:
        >>> loaded_path("7f00-7f01 r-xp 0000 08:01 42    /opt/an mpi/libmpi.so.40\\n")
        '/opt/an mpi/libmpi.so.40'
    """
    found = re.search(r"^\S+ \S+ \S+ \S+ \S+ +(/.*/libmpi(?:ch)?\.so[^\n]*)$", maps, re.MULTILINE)
    return found.group(1) if found else "unknown"


def compare(built: str, loaded: str, path: str) -> None:
    """Raises for another implementation or release line, warns for another patch release.

    Raises:
        WrongMPIError: The loaded library is of another family.

    Example:
        >>> compare("Open MPI v5.0.11, a", "Open MPI v5.0.11, a", "/lib/libmpi.so.40")
    """
    if built == loaded:
        return
    text = (
        f"This Horovod was built with {built!r}. Received: {loaded!r}, loaded from {path}. "
        "Take that folder out of LD_LIBRARY_PATH (or unload its module), or build Horovod for it: "
        "put its mpicxx first on PATH and run `hvdkit build --install`."
    )
    if family(built) != family(loaded):
        raise WrongMPIError(text)
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def check_loaded_mpi(library: ctypes.CDLL) -> None:
    """Compares the MPI behind Horovod's extension with the one in the wheel's record.

    Raises:
        WrongMPIError: It is another implementation or release line.
    """
    from horovod.common.hvdkit_record import RECORD

    built = RECORD["mpi"]
    loaded = library_version(library) if built else None
    if built and loaded:
        compare(built, loaded, loaded_path(Path("/proc/self/maps").read_text(errors="replace")))
