"""What this machine offers a build: Python, frameworks, compiler, MPI. Imports no framework."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit import envvars
from hvdkit.errors import BuildError

_TENSORFLOW_NAMES = (
    "tensorflow",
    "tensorflow-cpu",
    "tf-nightly",
    "tf-nightly-cpu",
    "tensorflow-rocm",
)
# What the build and the launcher import, and the packages that bring it.
_TOOLS = {
    "setuptools": "setuptools",
    "wheel": "wheel",
    "packaging": "packaging",
    "pip": "pip",
    "cloudpickle": "cloudpickle",
    "psutil": "psutil",
    "yaml": "pyyaml",
}
_ARCH_FLAGS = {"f16c": "-mf16c", "avx": "-mavx", "fma": "-mfma"}


@dataclass(frozen=True)
class MpiInstallation:
    """An MPI to build with: its wrapper compiler, its library and what that calls itself."""

    mpicxx: Path
    library: Path
    version: str


@dataclass(frozen=True)
class Machine:
    """Facts of this machine that a build depends on."""

    python: str
    """Full version and ABI tag of the interpreter."""
    prefix: Path
    site_packages: Path
    libc: str
    torch: str | None
    torch_cuda: str | None
    tensorflow: str | None
    cxx: str
    """The compiler's command."""
    cxx_version: str
    cxx_standard: int
    """The newest C++ standard the compiler knows of those that the frameworks ask for."""
    arch_flags: str
    mpi: MpiInstallation | None


def inspect_machine(environment: Mapping[str, str]) -> Machine:
    """Looks at this interpreter, its environment and the compilers on PATH.

    Raises:
        BuildError: There is no usable C++ compiler, or Python's headers or a build tool is missing.
    """
    _check_build_tools(environment)
    cxx = environment.get(envvars.CXX) or "g++"
    cxx_version, cxx_standard = _inspect_compiler(cxx, environment)
    torch, torch_cuda = _find_torch()
    return Machine(
        python=f"{platform.python_version()} {sysconfig.get_config_var('SOABI')}",
        prefix=Path(sys.prefix),
        site_packages=Path(sysconfig.get_path("platlib")),
        libc=" ".join(platform.libc_ver()),
        torch=torch,
        torch_cuda=torch_cuda,
        tensorflow=_find_tensorflow(),
        cxx=cxx,
        cxx_version=cxx_version,
        cxx_standard=cxx_standard,
        arch_flags=arch_flags(_cpu_flags()),
        mpi=find_mpi(environment),
    )


def arch_flags(cpu_flags: set[str]) -> str:
    """The vector options that Horovod compiles with, for those that this processor has.

    Example:
        >>> arch_flags({"avx", "fma", "sse2"})
        '-mavx -mfma'
    """
    return " ".join(option for flag, option in _ARCH_FLAGS.items() if flag in cpu_flags)


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return set(found.group(1).split()) if found else set()


def _check_build_tools(environment: Mapping[str, str]) -> None:
    missing = [
        package for name, package in _TOOLS.items() if importlib.util.find_spec(name) is None
    ]
    # Without one, Horovod's setup.py would fetch a cmake of its own choice, years old.
    if shutil.which("cmake", path=search_path(environment)) is None:
        missing.append("cmake")
    if missing:
        raise BuildError(
            "Expected what Horovod is built and started with in this environment. Received: "
            f"missing={missing}. Run: {sys.executable} -m pip install {' '.join(missing)}"
        )
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.exists():
        raise BuildError(
            f"Expected Python's headers. Received: no {headers}. Install them (Debian: python3-dev "
            "of this version), or use an interpreter that brings them."
        )


def search_path(environment: Mapping[str, str]) -> str:
    """PATH, and after it the programs of this interpreter's environment.

    Example:
        >>> search_path({"PATH": "/usr/bin"}).split(os.pathsep)[0]
        '/usr/bin'
    """
    return os.pathsep.join([environment.get("PATH", ""), str(Path(sys.prefix, "bin"))])


def _inspect_compiler(cxx: str, environment: Mapping[str, str]) -> tuple[str, int]:
    command = shlex.split(cxx)
    remedy = "Install g++ (Debian: apt-get install g++ make), or set CXX to a C++ compiler."
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise BuildError(f"Expected a C++ compiler. Received: no {cxx!r} on PATH. {remedy}")
    if shutil.which("make", path=environment.get("PATH")) is None:
        raise BuildError(f"Expected make. Received: no 'make' on PATH. {remedy}")
    version = _output([*command, "--version"], environment).partition("\n")[0]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.cc")
        source.write_text("#include <string>\nint main() { return std::string().size(); }\n")
        errors = ""
        for standard in (20, 17):
            done = subprocess.run(
                [*command, f"-std=c++{standard}", str(source), "-o", str(Path(folder, "try"))],
                env=dict(environment),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                return version, standard
            errors = done.stderr.strip()
    raise BuildError(
        f"Expected a compiler that compiles C++17 or C++20. Received: CXX={cxx!r} ({version}), "
        f"which says: {errors[:400]}. {remedy}"
    )


def _output(command: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _find_torch() -> tuple[str | None, str | None]:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None, None
    # Importing torch takes seconds; its version file is plain assignments.
    facts = runpy.run_path(str(Path(spec.submodule_search_locations[0], "version.py")))
    cuda = facts.get("cuda")
    return str(facts["__version__"]), str(cuda) if cuda else None


def _find_tensorflow() -> str | None:
    if importlib.util.find_spec("tensorflow") is None:
        return None
    for name in _TENSORFLOW_NAMES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise BuildError(
        "Expected the version of the installed TensorFlow. Received: a `tensorflow` package that "
        f"no distribution of {list(_TENSORFLOW_NAMES)} brought. Install it through pip."
    )


def find_mpi(environment: Mapping[str, str]) -> MpiInstallation | None:
    """The MPI whose ``mpicxx`` is first on PATH, or else in this interpreter's environment.

    Raises:
        BuildError: There is an ``mpicxx`` whose library cannot be found or loaded.
    """
    path = search_path(environment)
    found = shutil.which("mpicxx", path=path)
    if found is None:
        return None
    mpicxx = Path(found)
    shown = _output([str(mpicxx), "-show"], {**environment, "PATH": path})
    # What it shows is not quoted, so an environment with a space in its path is looked at first.
    inside = [Path(sys.prefix, "lib")] if mpicxx.is_relative_to(sys.prefix) else []
    library = find_mpi_library(inside + library_folders(shown) + _default_folders())
    if library is None:
        raise BuildError(
            f"Expected the library of the MPI behind {mpicxx}. Received: {shown!r}, which leads to "
            "no libmpi. Install that MPI's runtime, put another mpicxx first on PATH, or build "
            "with --no-mpi."
        )
    version = mpi_library_version(library, environment)
    if version is None:
        raise BuildError(
            f"Expected an MPI library that can be loaded. Received: {library}, behind {mpicxx}. "
            "Repair that MPI, put another mpicxx first on PATH, or build with --no-mpi."
        )
    return MpiInstallation(mpicxx, library, version)


def library_folders(shown: str) -> list[Path]:
    """Library folders in the command line that an MPI compiler shows.

    Example:
        >>> library_folders("c++ -I/m/include -L/m/lib -Wl,-rpath -Wl,/m/lib64 -lmpi")
        [PosixPath('/m/lib'), PosixPath('/m/lib64')]
    """
    folders: list[Path] = []
    for word in shlex.split(shown):
        found = re.match(r"(?:-L|-Wl,(?:-rpath[,=])?)(/.*)", word)
        if found and Path(found.group(1)) not in folders:
            folders.append(Path(found.group(1)))
    return folders


def _default_folders() -> list[Path]:
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    names = (f"/usr/lib/{multiarch}", f"/lib/{multiarch}", "/usr/lib64", "/lib64", "/usr/lib")
    return [Path(name) for name in names]


def is_default_folder(folder: Path) -> bool:
    """Whether the dynamic linker looks there without being told.

    Example:
        >>> is_default_folder(Path("/usr/lib64")), is_default_folder(Path("/opt/mpi/lib"))
        (True, False)
    """
    return folder in _default_folders()


def find_mpi_library(folders: list[Path]) -> Path | None:
    """The versioned MPI library in the first folder that has one, or a link to one."""
    for folder in folders:
        link = folder / "libmpi.so"
        if link.is_symlink() and link.exists() and not list(folder.glob("libmpi.so.*")):
            # Debian keeps the linker's names in a folder of their own.
            return link.resolve()
        for pattern in ("libmpi.so.*", "libmpich.so.*"):
            found = sorted(folder.glob(pattern), key=lambda path: len(path.name))
            if found:
                return found[0]
    return None


def mpi_library_version(library: Path, environment: Mapping[str, str]) -> str | None:
    """What an MPI library says about itself, asked in a process of its own."""
    script = (
        "import ctypes, sys\n"
        "text, length = ctypes.create_string_buffer(8192), ctypes.c_int()\n"
        "ctypes.CDLL(sys.argv[1]).MPI_Get_library_version(text, ctypes.byref(length))\n"
        "print(text.value.decode(errors='replace').strip())\n"
    )
    return _output([sys.executable, "-c", script, str(library)], environment) or None
