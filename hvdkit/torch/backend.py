"""Which module communicates: Horovod's, or, where Horovod is not installed, a one-rank stand-in.

Both have the functions of ``horovod.torch.mpi_ops``. The rest of the adapter imports names from
here and need not know which one it has.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from hvdkit.errors import MissingDependencyError

HOROVOD_INSTALLED = importlib.util.find_spec("horovod") is not None


def _load() -> ModuleType:
    if not HOROVOD_INSTALLED:
        return importlib.import_module("hvdkit.torch.local_ops")
    try:
        return importlib.import_module("horovod.torch.mpi_ops")
    except Exception as error:
        raise MissingDependencyError(
            "Horovod is installed, but its PyTorch extension cannot be loaded. Expected a Horovod "
            f"built for this environment's torch. Received: {type(error).__name__}: {error}. "
            "Fix: build it again with `hvdkit build`, or uninstall horovod to run on one rank."
        ) from error


mpi_ops: ModuleType = _load()
