"""Settings of the whole test run."""

from __future__ import annotations

import signal
import sys


def pytest_configure() -> None:
    """A test run that is told to end still ends the jobs that it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the test run was told to end"))
