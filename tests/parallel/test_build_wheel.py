"""The Horovod that the set-up built and installed: its libraries, its launchers, its guard."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks import job_environment, run_job

horovod_record = pytest.importorskip("horovod.common.hvdkit_record")

SITE = Path(sysconfig.get_path("platlib"))
PREFIX = Path(sys.prefix)
OWN_MPI = PREFIX / "lib" / "libmpi.so.40"
needs_own_mpi = pytest.mark.skipif(
    not OWN_MPI.exists(), reason="the MPI is the machine's, not the environment's"
)

LOADED = """
import horovod.torch as hvd
hvd.init()
assert hvd.size() == 1
lines = [line for line in open("/proc/self/maps") if "libmpi.so" in line]
print(lines[0].split(None, 5)[5].strip())
"""


def python(code: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=job_environment(changes),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd="/",
    )


@needs_own_mpi
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_every_library_path_is_relative(framework: str) -> None:
    (extension,) = (SITE / "horovod" / framework).glob("mpi_lib*.so")
    shown = subprocess.run(
        ["readelf", "-d", str(extension)], capture_output=True, text=True, check=True
    ).stdout
    (runpath,) = re.findall(r"R(?:UN)?PATH\).*\[(.*)\]", shown)
    assert all(folder.startswith("$ORIGIN/") for folder in runpath.split(":"))
    found = [extension.parent / folder.removeprefix("$ORIGIN/") for folder in runpath.split(":")]
    assert any(folder.resolve() == OWN_MPI.parent.resolve() for folder in found)


@needs_own_mpi
def test_a_copied_environment_uses_its_own_mpi(tmp_path: Path) -> None:
    copy = tmp_path / "a copy"
    inside = SITE.relative_to(PREFIX)
    (copy / inside).mkdir(parents=True)
    shutil.copytree(PREFIX / "bin", copy / "bin", symlinks=True)
    shutil.copytree(SITE / "horovod", copy / inside / "horovod")
    for name in ("pyvenv.cfg", "share", "etc"):
        if (PREFIX / name).is_file():
            shutil.copy(PREFIX / name, copy / name)
        elif (PREFIX / name).exists():
            shutil.copytree(PREFIX / name, copy / name)
    for entry in (PREFIX / "lib").iterdir():
        if entry.is_file():
            shutil.copy(entry, copy / "lib" / entry.name)
        elif entry.name == "openmpi":
            shutil.copytree(entry, copy / "lib" / "openmpi")
    # The frameworks are gigabytes, and which of their copies is used is not the question here.
    for entry in SITE.iterdir():
        if not (copy / inside / entry.name).exists():
            (copy / inside / entry.name).symlink_to(entry)
    done = subprocess.run(
        [str(copy / "bin" / "python"), "-c", LOADED],
        env={**os.environ, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(copy / "lib" / "libmpi.so.40")


@needs_own_mpi
def test_another_mpi_of_the_same_library_name_stops_the_process(tmp_path: Path) -> None:
    # The same library under another name of its own; all else that Horovod needs stays in it.
    library = OWN_MPI.read_bytes()
    assert b"Open MPI v" in library
    other = library.replace(b"Open MPI v", b"Fake MPI v")
    tmp_path.joinpath("libmpi.so.40").write_bytes(other)
    for name in ("openmpi", "libopen-pal.so.80"):
        tmp_path.joinpath(name).symlink_to(OWN_MPI.parent / name)
    done = python("import horovod.torch", LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 1
    assert "WrongMPIError" in done.stderr
    assert f"loaded from {tmp_path}/libmpi.so.40" in done.stderr
    assert "built with 'Open MPI v" in done.stderr
    assert "Received: 'Fake MPI v" in done.stderr
    assert python("import horovod.torch").returncode == 0


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_horovodrun_runs_two_ranks_and_passes_the_exit_code(
    controller: str, tmp_path: Path
) -> None:
    script = tmp_path / "a script.py"
    script.write_text(
        "import sys, torch, horovod.torch as hvd\n"
        "hvd.init()\n"
        "total = hvd.allreduce(torch.ones(3), op=hvd.Sum)\n"
        "print('size', hvd.size(), 'sum', total.tolist(), 'gloo', hvd.gloo_enabled(), flush=True)\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    launcher = [sys.executable, str(PREFIX / "bin" / "horovodrun"), f"--{controller}", "-np", "2"]
    for code in (0, 7):
        job = run_job([*launcher, sys.executable, str(script), str(code)])
        used = "True" if controller == "gloo" else "False"
        assert job.stdout.count(f"size 2 sum [2.0, 2.0, 2.0] gloo {used}") == 2, job.report()
        assert (job.returncode == 0) == (code == 0), job.report()


def launch_command(
    monkeypatch: pytest.MonkeyPatch, module: Any, function: Any, **changes: Any
) -> str:
    """The command line that a launcher would execute."""
    commands: list[str] = []
    monkeypatch.setattr(module.os, "execve", lambda path, argv, env: commands.append(argv[-1]))
    settings: dict[str, Any] = {
        "hosts": "localhost:2",
        "num_proc": 2,
        "ssh_port": None,
        "ssh_identity_file": None,
        "tcp_flag": None,
        "binding_args": None,
        "prefix_output_with_timestamp": False,
        "output_filename": None,
        "extra_mpi_args": None,
        "run_func_mode": False,
        "verbose": 0,
    }
    function(
        SimpleNamespace(**{**settings, **changes}), None, {"PATH": os.environ["PATH"]}, ["job"]
    )
    return commands[0]


def test_ssh_settings_reach_open_mpi_4_and_5(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi_run = pytest.importorskip("horovod.runner.mpi_run")
    monkeypatch.setattr(mpi_run, "_get_mpi_implementation", lambda env=None: "OpenMPI")
    hosts = ",".join(f"host{number}:1" for number in range(64))
    command = launch_command(monkeypatch, mpi_run, mpi_run.mpi_run, hosts=hosts, ssh_port=2222)
    assert " --bind-to none --map-by slot " in command
    for name in ("rsh", "ssh"):
        assert f'-mca plm_{name}_args "-p 2222"' in command
        assert f"-mca plm_{name}_no_tree_spawn true" in command
        assert f"-mca plm_{name}_num_concurrent 64" in command


def test_jsrun_gets_a_command_and_a_rank_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    js_run = pytest.importorskip("horovod.runner.js_run")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    flags = (["-tcp"], ["--none"], "SpectrumMPI")
    monkeypatch.setattr(js_run, "_get_mpi_implementation_flags", lambda tcp, env=None: flags)
    monkeypatch.setattr(js_run, "is_jsrun_installed", lambda: True)
    for name, value in (("get_num_cores", 4), ("get_num_threads", 1), ("get_num_gpus", 2)):
        monkeypatch.setattr(js_run.lsf.LSFUtils, name, lambda value=value: value)
    command = launch_command(monkeypatch, js_run, js_run.js_run)
    found = re.fullmatch(r"jsrun --erf_input (\S+) +--smpiargs -tcp +job", command)
    assert found is not None, command
    assert "rank: 1: { hostname: localhost; cpu: {2-3}" in Path(found.group(1)).read_text()
