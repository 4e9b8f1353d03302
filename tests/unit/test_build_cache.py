"""The cache between processes: one build for two starts, and nothing left by an interrupted one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.errors import BuildError
from hvdkit.horovod_build.cache import WheelCache, cache_root

ROOT = Path(__file__).parent.parent.parent

# Takes the lock, opens a workspace, says so, and then waits until its input is closed.
HOLDER = """
import sys
from pathlib import Path
from hvdkit.horovod_build.cache import WheelCache
cache = WheelCache(Path(sys.argv[1]))
cache.prepare()
with cache.lock("key", lambda: print("waits", flush=True)):
    with cache.workspace("key") as folder:
        (folder / "out").mkdir()
        (folder / "out" / "horovod.whl").write_text(sys.argv[2])
        print("builds", flush=True)
        sys.stdin.read()
        if cache.find("key") is None:
            cache.publish("key", folder / "out")
"""


def start_holder(root: Path, content: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root), content],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_start_says_that_it_waits_and_gets_the_first_ones_wheel(tmp_path: Path) -> None:
    with start_holder(tmp_path, "first") as first:
        assert next_line(first) == "builds"
        with start_holder(tmp_path, "second") as second:
            assert next_line(second) == "waits"
            first.communicate()
            assert next_line(second) == "builds"
            second.communicate()
    wheel = WheelCache(tmp_path).find("key")
    assert wheel is not None
    assert wheel.read_text() == "first"


def test_a_killed_build_leaves_neither_lock_nor_wheel_nor_folder(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path)
    with start_holder(tmp_path, "half") as holder:
        assert next_line(holder) == "builds"
        holder.send_signal(signal.SIGKILL)
    assert cache.find("key") is None
    assert len(list((tmp_path / "work").iterdir())) == 1
    held = cache.lock("key", lambda: pytest.fail("the lock is still held"))
    with held, cache.workspace("key") as folder:
        assert list((tmp_path / "work").iterdir()) == [folder]
        assert list(folder.iterdir()) == []
    assert list((tmp_path / "work").iterdir()) == []


def test_a_failed_build_removes_its_folder(tmp_path: Path) -> None:
    cache = WheelCache(tmp_path)
    cache.prepare()
    with pytest.raises(RuntimeError, match="no"), cache.workspace("key"):
        raise RuntimeError("no")
    assert list((tmp_path / "work").iterdir()) == []


def test_the_place_follows_the_xdg_rules() -> None:
    assert cache_root({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/hvdkit")
    assert cache_root({"XDG_CACHE_HOME": "", "HOME": "/h"}) == Path("/h/.cache/hvdkit")
    assert cache_root({"XDG_CACHE_HOME": "relative", "HOME": "/h"}) == Path("/h/.cache/hvdkit")


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    # A file where a folder should be stops also root, whom permissions do not stop.
    tmp_path.joinpath("hvdkit").write_text("")
    with pytest.raises(BuildError, match=r"writable cache folder.*XDG_CACHE_HOME"):
        WheelCache(tmp_path / "hvdkit").prepare()
