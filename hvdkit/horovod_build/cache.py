"""The wheel cache: one folder a key, filled by an atomic rename under a lock between processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hvdkit import envvars
from hvdkit.errors import BuildError


def cache_root(environment: Mapping[str, str]) -> Path:
    """``${XDG_CACHE_HOME:-~/.cache}/hvdkit``.

    Example:
        >>> str(cache_root({"XDG_CACHE_HOME": "/scratch/cache"}))
        '/scratch/cache/hvdkit'
    """
    base = environment.get(envvars.XDG_CACHE_HOME, "")
    # The XDG rules say that a relative path is to be ignored.
    if os.path.isabs(base):
        return Path(base, "hvdkit")
    return Path(environment.get("HOME") or os.path.expanduser("~"), ".cache", "hvdkit")


class WheelCache:
    """Wheels by key, with a lock and a workspace for each key.

    Args:
        root: The cache's folder; made when it is first needed.

    Example:
        >>> import tempfile
        >>> WheelCache(Path(tempfile.mkdtemp())).find("0123") is None
        True
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, key: str) -> Path | None:
        """The finished wheel of this key, or None."""
        return next(iter(sorted((self.root / "wheels" / key).glob("*.whl"))), None)

    def log_path(self, key: str) -> Path:
        """Where the log of this key's build lies; it stays after a failure."""
        return self.root / "logs" / f"{key}.log"

    def prepare(self) -> None:
        """Makes the folders.

        Raises:
            BuildError: The cache cannot be written.
        """
        try:
            for name in ("wheels", "logs", "locks", "work", "sdist"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root / "work"):
                pass
        except OSError as error:
            raise BuildError(
                f"Expected a writable cache folder. Received: {self.root} ({error.strerror}). "
                "Make it writable, or set XDG_CACHE_HOME to a folder that is."
            ) from error

    @contextlib.contextmanager
    def lock(self, key: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Holds this key's lock; calls `on_wait` once where another process holds it.

        The kernel drops the lock with the process that held it, however that process ended.
        """
        with (self.root / "locks" / f"{key}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def workspace(self, key: str) -> Iterator[Path]:
        """A folder to build in, gone afterwards. Call it with the key's lock held."""
        for stale in (self.root / "work").glob(f"{key}-*"):
            # Whoever made it held the lock that we hold now, so its process is gone.
            shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=self.root / "work"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, key: str, folder: Path) -> Path:
        """Moves a folder with one finished wheel to its final place, in one step."""
        os.replace(folder, self.root / "wheels" / key)
        wheel = self.find(key)
        assert wheel is not None
        return wheel
