"""Sends Python objects between ranks, as bytes. An object that cannot be sent fails everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit import pickled
from hvdkit.pickled import CHUNK_BYTES, UNSENDABLE, cannot_be_sent
from hvdkit.tensorflow.backend import mpi_ops
from hvdkit.tensorflow.ops_move import allgather, broadcast, check_root
from hvdkit.tensorflow.values import normalized

_global = mpi_ops.global_process_set


@tf.autograph.experimental.do_not_convert
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = _global,
) -> Any:
    """Returns the root's object on every rank; on the root the very object.

    Args:
        obj: Anything that cloudpickle can send; ignored on the other ranks.
        root_rank: The rank whose object counts, numbered among all ranks.
        session: A TensorFlow 1 session, where graphs are built by hand.
        name: Name of the operation in timelines.
        process_set: The ranks that take part.

    Raises:
        SynchronizationError: The root's object cannot be sent; on the root, what cloudpickle
            raised.

    Example:
        >>> import hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object({"epoch": 3}, root_rank=0)
        {'epoch': 3}
    """
    check_root(root_rank, process_set)
    if process_set.size() == 1:
        return obj
    # Horovod's default name is the object's class, and waits for ever where classes differ.
    label = normalized(f"hvdkit.object.{name or 'unnamed'}")
    is_root = mpi_ops.rank() == root_rank
    data, problem = _to_bytes(obj) if is_root else (np.empty(0, np.uint8), None)
    announced = np.array([UNSENDABLE if problem else data.size], np.int64)

    def send(values: np.ndarray, part: str) -> np.ndarray:
        return _evaluate(
            lambda: broadcast(values, root_rank, f"{label}.{part}", False, process_set), session
        )

    size = int(send(announced, "size")[0])
    if problem is not None:
        raise problem
    if size == UNSENDABLE:
        raise cannot_be_sent([root_rank])
    if not is_root:
        data = np.zeros(size, np.uint8)
    parts = [
        send(data[start : start + CHUNK_BYTES], f"{start}") for start in range(0, size, CHUNK_BYTES)
    ]
    return obj if is_root else _from_bytes(np.concatenate(parts))


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = _global,
) -> Callable[[Any], Any]:
    """Returns ``f(obj)``, which is :func:`broadcast_object` with these options.

    Example:
        >>> import hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object_fn(root_rank=0)([1, 2])
        [1, 2]
    """

    def send(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name or "function", process_set)

    return send


@tf.autograph.experimental.do_not_convert
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: Any = _global
) -> list[Any]:
    """Returns every rank's object, in the order of ranks.

    Args:
        obj: Anything that cloudpickle can send.
        session: A TensorFlow 1 session, where graphs are built by hand.
        name: Name of the operation in timelines.
        process_set: The ranks that take part.

    Raises:
        SynchronizationError: Another rank's object cannot be sent; on that rank, what cloudpickle
            raised.

    Example:
        >>> import hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.allgather_object("mine")
        ['mine']
    """
    if process_set.size() == 1:
        return [obj]
    label = normalized(f"hvdkit.objects.{name or 'unnamed'}")
    data, problem = _to_bytes(obj)

    def send(values: np.ndarray, part: str) -> np.ndarray:
        return _evaluate(lambda: allgather(values, f"{label}.{part}", False, process_set), session)

    announced = np.array([UNSENDABLE if problem else data.size], np.int64)
    sizes = [int(size) for size in send(announced, "sizes")]
    if problem is not None:
        raise problem
    if UNSENDABLE in sizes:
        ranks = process_set.ranks or range(len(sizes))
        raise cannot_be_sent(
            [rank for rank, size in zip(ranks, sizes, strict=True) if size == UNSENDABLE]
        )
    limit = CHUNK_BYTES // len(sizes)
    received: list[list[np.ndarray]] = [[] for _ in sizes]
    for start in range(0, max(sizes), limit):
        gathered = send(data[start : start + limit], f"{start}")
        lengths = [min(max(size - start, 0), limit) for size in sizes]
        pieces = np.split(gathered, np.cumsum(lengths)[:-1])
        for parts, piece in zip(received, pieces, strict=True):
            parts.append(piece)
    return [_from_bytes(np.concatenate(parts)) for parts in received]


def _evaluate(build: Callable[[], tf.Tensor], session: Any) -> np.ndarray:
    """Runs an operation now, also while a function is being traced or in a TF 1 session."""
    if tf.executing_eagerly() or tf.inside_function():
        with tf.init_scope():
            return build().numpy()
    running = session or tf.compat.v1.get_default_session()
    if running is None:
        raise ValueError(
            "Expected a session, since operations do not run eagerly here. Received: "
            "session=None. Fix: pass session, or call within `with tf.compat.v1.Session():`."
        )
    return running.run(build())


def _to_bytes(obj: Any) -> tuple[np.ndarray, Exception | None]:
    data, problem = pickled.to_bytes(obj)
    return np.frombuffer(data, np.uint8), problem


def _from_bytes(data: np.ndarray) -> Any:
    return pickled.from_bytes(data.tobytes())
