"""``import hvdkit.keras as hvd``: the names of ``horovod.tensorflow.keras``, right on Keras 3.

Every public name and signature of ``horovod.keras`` and ``horovod.tensorflow.keras`` is here; a
script changes its import. It works with Keras' TensorFlow and PyTorch backends. What comes on
top: :func:`distribute`, :func:`evaluate`, :func:`shard`, :func:`effective_lr`,
:func:`broadcast_model`, ``Compression.bf16`` and more callbacks.
"""

from __future__ import annotations

from typing import Any

from hvdkit.keras import callbacks
from hvdkit.keras.backend import BACKEND, adapter
from hvdkit.keras.data import set_epoch, shard
from hvdkit.keras.distribute import distribute, effective_lr, evaluate
from hvdkit.keras.optimizer import DistributedOptimizer
from hvdkit.keras.partial import PartialDistributedOptimizer
from hvdkit.keras.saving import load_model
from hvdkit.keras.state import broadcast_global_variables, broadcast_model
from hvdkit.keras.values import allgather, allreduce, broadcast, reducescatter

_OF_THE_ADAPTER = (
    "Adasum",
    "Average",
    "Compression",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
)
globals().update({name: getattr(adapter, name) for name in _OF_THE_ADAPTER})

__all__ = [
    "BACKEND",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_model",
    "callbacks",
    "distribute",
    "effective_lr",
    "elastic",
    "evaluate",
    "load_model",
    "reducescatter",
    "set_epoch",
    "shard",
]
__all__ += _OF_THE_ADAPTER


def __getattr__(name: str) -> Any:
    """What needs more packages than Keras and its backend, loaded when it is asked for."""
    if name == "elastic":
        import importlib

        return importlib.import_module("hvdkit.keras.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
