"""``import hvdkit.torch as hvd``: the names of ``horovod.torch``, right on current PyTorch.

Every public name and signature of ``horovod.torch`` is here; a script changes its import. What
comes on top: :func:`distribute`, :class:`GradScaler`, :func:`clip_grad_norm_`,
``Compression.bf16`` and :func:`effective_lrs`.
"""

from __future__ import annotations

from typing import Any

from hvdkit.torch.amp import GradScaler, clip_grad_norm_, clip_grad_value_
from hvdkit.torch.compression import Compression
from hvdkit.torch.distribute import distribute
from hvdkit.torch.ops import *  # noqa: F403 - its __all__ is the list of Horovod's names
from hvdkit.torch.ops import __all__ as _ops_names
from hvdkit.torch.optimizer import DistributedOptimizer
from hvdkit.torch.schedule import effective_lrs
from hvdkit.torch.state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "GradScaler",
    "SyncBatchNorm",  # noqa: F405
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "clip_grad_norm_",
    "clip_grad_value_",
    "distribute",
    "effective_lrs",
    "elastic",  # noqa: F405
]
__all__ += _ops_names


def __getattr__(name: str) -> Any:
    """What is Horovod's own, loaded when it is asked for."""
    if name in ("SyncBatchNorm", "check_extension", "elastic"):
        from hvdkit.optional import require

        return getattr(require("horovod.torch", feature=f"hvd.{name}", extra="horovod"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
