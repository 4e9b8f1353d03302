"""Finding out whether a training step is being compiled by XLA, which lacks Horovod's ops."""

from __future__ import annotations

import sys
from typing import Any

from hvdkit.keras.backend import BACKEND, keras


def compiling_model(optimizer: Any) -> Any:
    """The model that compiles the running training step by XLA, None if there is none.

    Neither the optimizer nor the graph knows of it, only the model whose ``train_step`` is being
    traced further up in the stack.
    """
    if BACKEND != "tensorflow":
        return None
    import tensorflow as tf

    if tf.executing_eagerly():
        return None
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.Model) and _has(owner, optimizer):
            return owner if owner.jit_compile else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _has(model: Any, optimizer: Any) -> bool:
    own = getattr(model, "optimizer", None)
    while hasattr(own, "inner_optimizer"):
        own = own.inner_optimizer
    return any(part is optimizer for part in getattr(own, "optimizers", [own]))
