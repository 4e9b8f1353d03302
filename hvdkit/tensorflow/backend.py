"""Which module communicates: Horovod's, or, where Horovod is not installed, a one-rank stand-in.

Both have the functions of ``horovod.tensorflow.mpi_ops``. The rest of the adapter imports names
from here and need not know which one it has.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from hvdkit.errors import MissingDependencyError
from hvdkit.optional import require

require("tensorflow", feature="hvdkit.tensorflow", extra="tensorflow")

HOROVOD_INSTALLED = importlib.util.find_spec("horovod") is not None


def _load() -> ModuleType:
    if not HOROVOD_INSTALLED:
        return importlib.import_module("hvdkit.tensorflow.local_ops")
    try:
        return importlib.import_module("horovod.tensorflow.mpi_ops")
    except Exception as error:
        raise MissingDependencyError(
            "Horovod is installed, but its TensorFlow extension cannot be loaded. Expected a "
            "Horovod built for this environment's TensorFlow. Received: "
            f"{type(error).__name__}: {error}. "
            "Fix: build it again with `hvdkit build`, or uninstall horovod to run on one rank."
        ) from error


mpi_ops: ModuleType = _load()
