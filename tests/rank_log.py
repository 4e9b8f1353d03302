"""Runs a Python program as one rank, its output in ``rank-N.log``: ``rank_log FOLDER ARGS...``."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("HOROVOD_RANK", "0")
    log = os.open(Path(sys.argv[1]) / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.execv(sys.executable, [sys.executable, "-X", "faulthandler", *sys.argv[2:]])


if __name__ == "__main__":
    main()
