"""Runs one long step: output into a log, progress to the user, and no process left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_ERROR = re.compile(
    r"(?:error:|CMake Error|fatal error|undefined reference|No space left|File size limit"
    r"|Killed|cannot find -l|^\w*Error: )",
    re.IGNORECASE | re.MULTILINE,
)
_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")
# Lines of a wrapper that says again what the compiler has said.
_NOISE = re.compile(r"subprocess-exited-with-error|CalledProcessError|note: This error originates")


def run_logged(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    cwd: Path,
    log: Path,
    on_percent: Callable[[int], None] = lambda percent: None,
    timeout_s: float | None = None,
) -> int:
    """Runs `command` in a process group of its own and appends its output to `log`.

    The whole group ends when this function does, whatever the reason.

    Args:
        command: Program and arguments.
        environment: Its whole environment.
        cwd: Its working folder.
        log: File that the output is appended to.
        on_percent: Called with each new percentage that make prints.
        timeout_s: Limit in seconds.

    Returns:
        The exit code; negative for a signal, as the one that ended it past the limit.
    """
    with log.open("a", errors="replace") as file:
        file.write(f"\n$ {' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=dict(environment),
            cwd=cwd,
            start_new_session=True,
        )
        timer = threading.Timer(timeout_s or 0, _end_group, [process.pid])
        if timeout_s is not None:
            timer.start()
        try:
            assert process.stdout is not None
            percent = -1
            for line in process.stdout:
                file.write(line)
                found = _PERCENT.match(line)
                if found and int(found.group(1)) > percent:
                    percent = int(found.group(1))
                    on_percent(percent)
            return process.wait()
        finally:
            timer.cancel()
            _end_group(process.pid)
            process.wait()


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def first_errors(text: str, limit: int = 5) -> list[str]:
    """The first lines of a build's log that name an error.

    Example:
        >>> first_errors("g++ -c a.cc\\na.cc:1:2: error: no\\nmake: *** [a.o] Error 1\\n")
        ['a.cc:1:2: error: no']
    """
    lines = (line.strip() for line in text.splitlines())
    unique = dict.fromkeys(
        line for line in lines if _ERROR.search(line) and not _NOISE.search(line)
    )
    return list(unique)[:limit]
