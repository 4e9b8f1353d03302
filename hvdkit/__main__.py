"""``python -m hvdkit``: the same as the console script."""

from __future__ import annotations

from hvdkit.cli import run

if __name__ == "__main__":
    run()
