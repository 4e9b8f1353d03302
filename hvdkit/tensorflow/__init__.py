"""``import hvdkit.tensorflow as hvd``: the names of ``horovod.tensorflow``, right on Keras 3.

Every public name and signature of ``horovod.tensorflow`` is here; a script changes its import.
What comes on top: ``Compression.bf16``, :func:`barrier`, :func:`shard` and
:func:`set_epoch`.
"""

from __future__ import annotations

from typing import Any

from hvdkit.tensorflow.backend import HOROVOD_INSTALLED  # noqa: F401 - says if TF is missing
from hvdkit.tensorflow.compression import Compression
from hvdkit.tensorflow.objects import allgather_object, broadcast_object, broadcast_object_fn
from hvdkit.tensorflow.ops import *  # noqa: F403 - its __all__ is the list of Horovod's names
from hvdkit.tensorflow.ops import __all__ as _ops_names
from hvdkit.tensorflow.optimizer import DistributedOptimizer
from hvdkit.tensorflow.state import (
    BroadcastGlobalVariablesHook,
    broadcast_global_variables,
    broadcast_variables,
)
from hvdkit.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",  # noqa: F405
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "set_epoch",  # noqa: F405
    "shard",  # noqa: F405
]
__all__ += _ops_names

_HOROVODS_OWN = (
    "LocalGradientAggregationHelper",
    "check_extension",
    "gpu_available",
    "refs_to_vars",
    "split_list",
    "vars_to_refs",
)


def __getattr__(name: str) -> Any:
    """What needs more than TensorFlow, loaded when it is asked for."""
    if name == "SyncBatchNormalization":
        from hvdkit.tensorflow.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    if name in ("set_epoch", "shard"):
        from hvdkit import tfdata

        return getattr(tfdata, name)
    if name == "elastic":
        import importlib

        return importlib.import_module("hvdkit.tensorflow.elastic")
    if name in _HOROVODS_OWN:
        from hvdkit.optional import require

        horovod = require("horovod.tensorflow", feature=f"hvd.{name}", extra="horovod")
        return getattr(horovod, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
