"""Runs ``hvdkit build`` on a tiny source release, so that tests need no compiler and no network.

``python -m tests.unit.build_fake FOLDER CODE ARGUMENT...`` makes a release in FOLDER whose
``setup.py`` runs CODE before it does its work, and calls the command on it with the ARGUMENTs.
"""

from __future__ import annotations

import io
import os
import resource
import sys
import tarfile
from pathlib import Path

from hvdkit.cli import main
from hvdkit.horovod_build import plan, probe, sdist

SETUP = """
import sys
if sys.argv[1] == "bdist_wheel":
    {code}
from setuptools import find_packages, setup
setup(name="horovod", version="0.28.1+hvdkit.1", packages=find_packages())
"""


def make_release(folder: Path, code: str) -> Path:
    """A source release of a Horovod without content."""
    path = folder / sdist.SDIST_NAME
    files = {
        "setup.py": SETUP.format(code=code),
        "horovod/__init__.py": "",
        "horovod/common/__init__.py": "",
        "horovod/large.txt": "x" * 100_000,
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            data = text.encode()
            info = tarfile.TarInfo(f"horovod-{sdist.HOROVOD_VERSION}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def run(folder: Path, code: str, arguments: list[str]) -> None:
    """Calls the command with the tiny release in the place of the real one."""
    release = make_release(folder, code)
    sdist.SDIST_SHA256 = sdist.sha256(release)
    plan.EDITS = ()
    if os.environ.get("FAKE_PROBE") != "fails":
        probe.probe_command = lambda framework, controller, site: [
            sys.executable,
            "-c",
            f"[print('hvdkit-probe {framework} rank', r, 'of 2: sum 3.0') for r in (0, 1)]",
        ]
    if "FAKE_FILE_LIMIT" in os.environ:
        limit = int(os.environ["FAKE_FILE_LIMIT"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    main(["build", "--sdist", str(release), *arguments], prog_name="hvdkit")


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
