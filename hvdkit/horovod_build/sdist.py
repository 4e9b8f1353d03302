"""Horovod's source release: fetched by its pinned hash, or checked against it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from hvdkit.errors import BuildError

HOROVOD_VERSION = "0.28.1"
SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex.

    Example:
        >>> import os
        >>> sha256(Path(os.devnull))[:8]
        'e3b0c442'
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_sdist(path: Path) -> Path:
    """Returns `path` where it is the pinned release.

    Raises:
        BuildError: There is no such file, or it is another one.

    Example:
        >>> import os
        >>> check_sdist(Path(os.devnull))
        Traceback (most recent call last):
        hvdkit.errors.BuildError: Expected the source release horovod-0.28.1.tar.gz ...
    """
    if not path.exists():
        raise BuildError(
            f"Expected the source release {SDIST_NAME}. Received: sdist={path} (no such file). "
            f"Fetch it with: pip download --no-deps --no-binary horovod horovod=={HOROVOD_VERSION}"
        )
    found = sha256(path)
    if found != SDIST_SHA256:
        raise BuildError(
            f"Expected the source release {SDIST_NAME} with sha256 {SDIST_SHA256}. "
            f"Received: sdist={path} with sha256 {found}. The edits are made for that one release; "
            f"fetch it with: pip download --no-deps --no-binary horovod horovod=={HOROVOD_VERSION}"
        )
    return path


def fetch_sdist(folder: Path, environment: dict[str, str]) -> Path:
    """The source release in `folder`, fetched through pip where it is not there yet.

    Pip knows the site's index, proxies and certificates; it checks the hash as well.

    Raises:
        BuildError: Pip could not fetch it.
    """
    target = folder / SDIST_NAME
    # HOROVOD_LOCAL_VERSION would give the release another version than the one asked for.
    environment = {k: v for k, v in environment.items() if not k.startswith("HOROVOD_")}
    if target.exists() and sha256(target) == SDIST_SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        wanted = Path(temporary, "requirements.txt")
        wanted.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "horovod"]
        command += ["--no-build-isolation", "--require-hashes", "-r", str(wanted)]
        command += ["--dest", temporary]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        fetched = Path(temporary, SDIST_NAME)
        if done.returncode != 0 or not fetched.exists():
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
            raise BuildError(
                f"pip could not fetch {SDIST_NAME} from the package index. Where there is no "
                f"network, give the file with --sdist FILE. pip said:\n{tail}"
            )
        check_sdist(fetched)
        os.replace(fetched, target)
    return target


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpacks the release into `folder` and returns the source's root."""
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:
            # An interpreter without extraction filters; the hash says what is inside.
            archive.extractall(folder)
    root = folder / f"horovod-{HOROVOD_VERSION}"
    # What an earlier build left in the release's tree would be taken for a build of ours.
    shutil.rmtree(root / "build", ignore_errors=True)
    return root
