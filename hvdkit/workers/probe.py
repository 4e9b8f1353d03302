"""One allreduce through one framework's extension, on each rank: ``-m hvdkit.workers.probe NAME``.

The builder starts it on two ranks; a wheel that cannot do this does not count as built.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def probe_torch() -> tuple[int, int, float, str]:
    """Rank, size, sum of ``rank + 1`` over the ranks, and where the extension lies."""
    import torch

    hvd = importlib.import_module("horovod.torch")
    hvd.init()
    total = hvd.allreduce(torch.full((3,), float(hvd.rank() + 1)), op=hvd.Sum)
    return hvd.rank(), hvd.size(), float(total.max()), str(hvd.__file__)


def probe_tensorflow() -> tuple[int, int, float, str]:
    """Rank, size, sum of ``rank + 1`` over the ranks, and where the extension lies."""
    tf = importlib.import_module("tensorflow")
    hvd = importlib.import_module("horovod.tensorflow")
    hvd.init()
    total = hvd.allreduce(tf.fill([3], float(hvd.rank() + 1)), op=hvd.Sum)
    return hvd.rank(), hvd.size(), float(total.numpy().max()), str(hvd.__file__)


def main(arguments: list[str]) -> int:
    """Runs the probe named first; the second argument is the folder Horovod must come from."""
    framework, folder = arguments
    probes = {"torch": probe_torch, "tensorflow": probe_tensorflow}
    rank, size, total, file = probes[framework]()
    if size != 2 or total != 3.0:
        print(f"rank {rank}: expected 2 ranks and the sum 3.0, got {size} and {total}")
        return 1
    if not Path(file).is_relative_to(folder):
        print(f"rank {rank}: expected Horovod from {folder}, got {file}")
        return 1
    print(f"hvdkit-probe {framework} rank {rank} of {size}: sum {total}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
