"""The CUDA and NCCL that a GPU build uses: the system's toolkit, or the index's nvidia wheels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit import envvars
from hvdkit.errors import BuildError

DEFAULT_ARCHITECTURES = "80,90"


@dataclass(frozen=True)
class CudaInstallation:
    """A toolkit and an NCCL to compile with.

    Args:
        home: The toolkit, or the folder of the nvidia wheels that takes its place.
        version: What its nvcc says.
        nccl: Folder with NCCL's ``include`` and ``lib``.
        nccl_version: Version in NCCL's header.
        architectures: Compute capabilities, as in ``80,90``.
        from_wheels: Whether `home` lies in site-packages.
    """

    home: Path
    version: str
    nccl: Path
    nccl_version: str
    architectures: str
    from_wheels: bool

    def environment(self) -> dict[str, str]:
        """Variables for Horovod's build and for torch's search for CUDA."""
        return {
            "CUDA_HOME": str(self.home),
            "HOROVOD_CUDA_HOME": str(self.home),
            "HOROVOD_NCCL_HOME": str(self.nccl),
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_GPU": "CUDA",
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_BUILD_CUDA_CC_LIST": self.architectures,
        }

    def summary(self) -> str:
        """What of it changes the binary."""
        return f"cuda {self.version}, nccl {self.nccl_version}, cc {self.architectures}"

    def library_folders(self, site_packages: Path, to_site: str) -> list[str]:
        """Entries of the extensions' search path for NCCL and the CUDA runtime."""
        folders = []
        for folder in (self.nccl / "lib", self.home / "lib"):
            if folder.is_relative_to(site_packages):
                folders.append(f"{to_site}/{folder.relative_to(site_packages)}")
        if not self.nccl.is_relative_to(site_packages):
            folders.append(str(self.nccl / "lib"))
        return folders


def find_cuda(
    site_packages: Path, torch_cuda: str | None, environment: Mapping[str, str]
) -> CudaInstallation:
    """The toolkit to build with: ``CUDA_HOME``, the nvidia wheels, or the nvcc on PATH.

    The wheels go before PATH since they are the CUDA that torch itself was built with.

    Args:
        site_packages: Where the nvidia wheels would lie.
        torch_cuda: CUDA version of the installed torch, or None.
        environment: The caller's environment.

    Raises:
        BuildError: There is none, or it is of another major version than torch's.
    """
    home, from_wheels = _find_home(site_packages, torch_cuda, environment)
    version = _nvcc_version(home / "bin" / "nvcc", environment)
    if torch_cuda and version.split(".")[0] != torch_cuda.split(".")[0]:
        raise BuildError(
            f"Expected a CUDA toolkit of torch's own major version {torch_cuda}. Received: "
            f"{version} in {home}. Set CUDA_HOME to a matching one, or install it without root: "
            f"{_wheel_command(torch_cuda)}"
        )
    nccl = _find_nccl(site_packages, home, environment)
    return CudaInstallation(
        home=home,
        version=version,
        nccl=nccl,
        nccl_version=_nccl_version(nccl / "include" / "nccl.h"),
        architectures=environment.get(envvars.CUDA_ARCHITECTURES) or DEFAULT_ARCHITECTURES,
        from_wheels=from_wheels,
    )


def _wheel_command(torch_cuda: str | None) -> str:
    version = torch_cuda or "<torch's CUDA version>"
    return f"pip install 'cuda-toolkit[nvcc,cccl]=={version}.*'"


def _find_home(
    site_packages: Path, torch_cuda: str | None, environment: Mapping[str, str]
) -> tuple[Path, bool]:
    given = environment.get(envvars.CUDA_HOME) or environment.get(envvars.CUDA_PATH)
    if given:
        if not Path(given, "bin", "nvcc").exists():
            raise BuildError(
                f"Expected a CUDA toolkit in CUDA_HOME. Received: CUDA_HOME={given}, which has no "
                "bin/nvcc. Set it to the toolkit's folder, or unset it."
            )
        return Path(given), False
    for folder in sorted(site_packages.glob("nvidia/cu[0-9]*"), reverse=True):
        if (folder / "bin" / "nvcc").exists():
            return folder, True
    found = shutil.which("nvcc", path=environment.get("PATH"))
    # An nvcc on PATH may be a script that stands elsewhere; only a real toolkit has the headers.
    for home in [Path(found).resolve().parent.parent] if found else []:
        if (home / "include" / "cuda_runtime.h").exists():
            return home, False
    if Path("/usr/local/cuda/bin/nvcc").exists():
        return Path("/usr/local/cuda"), False
    raise BuildError(
        "Expected a CUDA toolkit, since the GPU operations ask for one. Received: no CUDA_HOME, no "
        "nvcc from the nvidia wheels, none on PATH. Install one without root: "
        f"{_wheel_command(torch_cuda)}"
    )


def _nvcc_version(nvcc: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        [str(nvcc), "--version"], env=dict(environment), capture_output=True, text=True, check=False
    )
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    if found is None:
        raise BuildError(
            f"Expected `nvcc --version` to name its release. Received: {nvcc} said "
            f"{(done.stdout + done.stderr).strip()[:200]!r}. Repair that CUDA toolkit."
        )
    return found.group(1)


def _find_nccl(site_packages: Path, home: Path, environment: Mapping[str, str]) -> Path:
    given = environment.get(envvars.NCCL_HOME)
    places = [Path(given)] if given else [site_packages / "nvidia" / "nccl", home, Path("/usr")]
    for place in places:
        if (place / "include" / "nccl.h").exists():
            return place
    raise BuildError(
        "Expected NCCL's header include/nccl.h, since the GPU operations ask for it. Received: "
        f"none in {[str(place) for place in places]}. Set NCCL_HOME, or install the wheel that "
        "matches torch (it comes with the CUDA build of torch): pip install nvidia-nccl-cu13"
    )


def _nccl_version(header: Path) -> str:
    text = header.read_text(errors="replace")
    numbers = [
        re.search(rf"#define\s+NCCL_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")
    ]
    return ".".join(number.group(1) for number in numbers if number)


def shadow_wheels(cuda: CudaInstallation, folder: Path) -> CudaInstallation:
    """The nvidia wheels, linked into a tree of the shape that CMake knows.

    The wheels have ``lib`` where CMake wants ``lib64``, and versioned libraries only where the
    linker wants plain names. Links in a folder of our own leave the environment as it is.

    Args:
        cuda: An installation from wheels; any other is returned as it is.
        folder: Where the tree is made.
    """
    if not cuda.from_wheels:
        return cuda
    home, nccl = folder / "cuda", folder / "nccl"
    for original, shadow in ((cuda.home, home), (cuda.nccl, nccl)):
        shadow.mkdir(parents=True)
        for entry in original.iterdir():
            if entry.name not in ("lib", "lib64"):
                (shadow / entry.name).symlink_to(entry)
        _link_libraries(original / "lib", shadow / "lib")
        (shadow / "lib64").symlink_to("lib")
    # nvcc finds its parts by its own path; a copy makes that path the tree's.
    (home / "bin").unlink()
    shutil.copytree(cuda.home / "bin", home / "bin", copy_function=_link_or_copy)
    return CudaInstallation(
        home, cuda.version, nccl, cuda.nccl_version, cuda.architectures, from_wheels=True
    )


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _link_libraries(original: Path, shadow: Path) -> None:
    shadow.mkdir()
    for library in original.iterdir():
        (shadow / library.name).symlink_to(library)
        plain = re.sub(r"\.so\..*$", ".so", library.name)
        if not (original / plain).exists() and not (shadow / plain).exists():
            (shadow / plain).symlink_to(library)
