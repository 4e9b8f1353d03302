"""Keras, and the adapter and collectives of the framework that it computes with."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from hvdkit.errors import UnsupportedError
from hvdkit.optional import require

COLLECTIVES = {"tensorflow": "tensorflow_collectives", "torch": "torch_collectives"}

keras: Any = require("keras", feature="hvdkit.keras", extra="tensorflow")


def _checked_backend() -> str:
    version = getattr(keras, "__version__", "unknown")
    if int(version.split(".")[0]) < 3:
        raise UnsupportedError(
            f"Expected Keras 3. Received: keras.__version__={version!r}. Fix: pip install "
            "'keras>=3'."
        )
    backend = str(keras.backend.backend())
    if backend not in COLLECTIVES:
        raise UnsupportedError(
            "Expected Keras to compute with 'tensorflow' or 'torch', for which Horovod has "
            f"operations. Received: keras.backend.backend()={backend!r}. Fix: set KERAS_BACKEND "
            "before Keras is imported."
        )
    return backend


BACKEND = _checked_backend()
"""``"tensorflow"`` or ``"torch"``."""

adapter: ModuleType = importlib.import_module(f"hvdkit.{BACKEND}")
"""hvdkit's adapter of that framework: ranks, objects, single tensors."""

collectives: ModuleType = importlib.import_module(f"hvdkit.keras.{COLLECTIVES[BACKEND]}")
"""What the Keras adapter needs of the framework, under the same names for both."""
