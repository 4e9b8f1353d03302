"""Bad input and bad luck: one clear error each, exit code 1, and nothing half-done."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TOOLS = ("setuptools", "wheel", "pip", "cloudpickle", "psutil", "yaml")


def environment(tmp_path: Path, **changes: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        **changes,
    }


def build(tmp_path: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hvdkit", "build", *arguments],
        env=environment(tmp_path, **changes),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def fake_build(
    tmp_path: Path, code: str, *arguments: str, **changes: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.unit.build_fake", str(tmp_path), code, *arguments],
        env=environment(tmp_path, **changes),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=ROOT,
    )


def assert_one_error(done: subprocess.CompletedProcess[str], *texts: str) -> None:
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("hvdkit: error:") == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    for text in texts:
        assert text in done.stderr


def assert_nothing_left(tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "hvdkit"
    assert list((cache / "wheels").iterdir()) == []
    assert list((cache / "work").iterdir()) == []


def test_no_compiler(tmp_path: Path) -> None:
    done = build(tmp_path, PATH=str(tmp_path))
    assert_one_error(done, "Expected a C++ compiler", "'g++'", "apt-get install g++")
    assert not (tmp_path / "cache").exists()


def test_a_compiler_that_compiles_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken-cxx"
    broken.write_text("#!/bin/sh\necho 'cc1plus: not found' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert_one_error(build(tmp_path, CXX=str(broken)), "C++17 or C++20", "cc1plus: not found")


def test_no_framework_and_no_tools(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True
    )
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("click", "packaging", *TOOLS):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        tools.joinpath(name).symlink_to(Path(spec.origin).parent)
    command = [str(tmp_path / "env/bin/python"), "-m", "hvdkit", "build"]
    variables = environment(tmp_path, PYTHONPATH=f"{ROOT}:{tools}")
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert cmake is not None
    variables["PATH"] += f":{Path(cmake).parent}"
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert_one_error(done, "at least one framework", "Install torch or tensorflow-cpu")
    tools.joinpath("psutil").unlink()
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert_one_error(done, "missing=['psutil']", "-m pip install psutil")


@pytest.mark.parametrize("exists", [True, False])
def test_wrong_sdist(tmp_path: Path, exists: bool) -> None:
    file = tmp_path / "horovod-0.28.1.tar.gz"
    if exists:
        file.write_text("another one")
    done = build(tmp_path, "--sdist", str(file))
    assert_one_error(done, "Expected the source release", str(file), "pip download")
    assert not (tmp_path / "cache").exists()


def test_unwritable_cache(tmp_path: Path) -> None:
    tmp_path.joinpath("cache").write_text("a file, which stops root too")
    done = build(tmp_path)
    assert_one_error(done, "Expected a writable cache folder", "XDG_CACHE_HOME")


def test_unwritable_wheel_dir(tmp_path: Path) -> None:
    tmp_path.joinpath("file").write_text("")
    done = fake_build(tmp_path, "pass", "--wheel-dir", str(tmp_path / "file" / "wheels"))
    assert_one_error(done, str(tmp_path / "file"))


def test_full_disk(tmp_path: Path) -> None:
    done = fake_build(tmp_path, "pass", FAKE_FILE_LIMIT="50000")
    assert_one_error(done, "Expected to write below", "File too large", "XDG_CACHE_HOME")
    assert_nothing_left(tmp_path)


def test_full_disk_of_the_compiler(tmp_path: Path) -> None:
    code = "sys.exit('cc1plus: fatal error: writing out.o: No space left on device')"
    assert_one_error(fake_build(tmp_path, code), "Expected room for a build", "XDG_CACHE_HOME")
    assert_nothing_left(tmp_path)


def test_a_compile_error_shows_the_first_errors_and_the_logs_path(tmp_path: Path) -> None:
    code = "print('op.cc:7:1: error: no such thing'); print('make: *** Error 1'); sys.exit(1)"
    done = fake_build(tmp_path, code)
    assert_one_error(done, "did not compile", "op.cc:7:1: error: no such thing", "The log: ")
    assert_nothing_left(tmp_path)
    log = Path(done.stderr.rpartition("The log: ")[2].strip())
    assert "op.cc:7:1: error: no such thing" in log.read_text()


def test_a_wheel_that_fails_its_probe_does_not_count(tmp_path: Path) -> None:
    # The tiny release has no launcher and no extension, so the real probe must refuse it.
    done = fake_build(tmp_path, "pass", "--framework", "torch", FAKE_PROBE="fails")
    assert_one_error(done, "compiled but does not work", "with torch and", "The log: ")
    assert_nothing_left(tmp_path)


def test_a_good_build_is_kept_copied_and_taken_from_the_cache(tmp_path: Path) -> None:
    first = fake_build(tmp_path, "pass", "--wheel-dir", str(tmp_path / "wheels"))
    assert first.returncode == 0, first.stderr
    wheel = Path(first.stdout.strip())
    assert wheel.parent == tmp_path / "wheels"
    assert wheel.name.startswith("horovod-0.28.1+hvdkit.1-")
    assert list((tmp_path / "wheels").iterdir()) == [wheel]
    second = fake_build(tmp_path, "sys.exit('must not be built again')")
    assert second.returncode == 0, second.stderr
    assert Path(second.stdout.strip()).is_relative_to(tmp_path / "cache" / "hvdkit" / "wheels")
    assert Path(second.stdout.strip()).read_bytes() == wheel.read_bytes()


@pytest.mark.parametrize("place", ["plain", "with space"])
def test_the_build_sees_paths_without_spaces(tmp_path: Path, place: str) -> None:
    code = "assert ' ' not in sys.prefix + sys.executable, sys.prefix; "
    code += "import os; assert ' ' not in os.getcwd(), os.getcwd()"
    done = fake_build(tmp_path, code, XDG_CACHE_HOME=str(tmp_path / place))
    assert done.returncode == 0, done.stderr


def test_an_ended_build_takes_its_compilers_along_and_leaves_nothing(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = f"out = open({str(pipe)!r}, 'w'); out.write('compiling'); out.flush(); sys.stdin.close()"
    code += "; import signal; signal.pause()"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.build_fake", str(tmp_path), code],
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with pipe.open() as compiler:
        assert compiler.read(len("compiling")) == "compiling"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        # The end of the pipe comes with the end of the process that held it.
        assert compiler.read() == ""
    assert process.returncode == 128 + signal.SIGTERM
    assert_nothing_left(tmp_path)
    again = fake_build(tmp_path, "pass")
    assert again.returncode == 0, again.stderr


def test_usage_errors_exit_with_2(tmp_path: Path) -> None:
    for arguments in (["--no-mpi", "--no-gloo"], ["--framework", "jax"], ["--jobs", "0"]):
        done = build(tmp_path, *arguments)
        assert done.returncode == 2
        assert "Usage:" in done.stderr
