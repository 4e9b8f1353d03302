"""Handles of operations that take more than one step, their names, and ``join``.

An operation is a generator: it yields the handle of a Horovod operation to wait for, is sent
that operation's output, and returns the result. To the caller it is one handle, a number, that
``poll`` and ``synchronize`` accept.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from hvdkit.torch.backend import mpi_ops

Steps = Generator[int, Any, Any]

_POLL_INTERVAL_S = 0.001  # what Horovod itself sleeps between two looks at a handle


class _Pending:
    """An operation under way."""

    def __init__(self, steps: Steps, may_repeat: bool) -> None:
        self.may_repeat = may_repeat
        self.done = False
        self.result: Any = None
        self.error: mpi_ops.HorovodInternalError | None = None
        self.handle = next(steps)
        self._steps = steps
        self._lock = threading.Lock()

    def advance(self, block: bool) -> None:
        """Takes the next step; without `block` only if that needs no waiting."""
        if not self._lock.acquire(blocking=block):
            return
        try:
            if self.done or not (block or mpi_ops.poll(self.handle)):
                return
            try:
                output = mpi_ops.synchronize(self.handle)
            except mpi_ops.HorovodInternalError as error:
                self.handle = self._steps.throw(_explained(error))
            else:
                self.handle = self._steps.send(output)
        except StopIteration as end:
            self.done, self.result = True, end.value
        except mpi_ops.HorovodInternalError as error:
            self.done, self.error = True, error
        finally:
            self._lock.release()


_pending: dict[int, _Pending] = {}
_unnamed: Counter[tuple[str, int]] = Counter()
_blocking: set[str] = set()


def start(steps: Steps, may_repeat: bool = False) -> int:
    """Starts an operation and returns its handle.

    Args:
        steps: The operation.
        may_repeat: Whether it may communicate again at a time that the program does not choose.
            Every rank must then take the next step whichever handle it waits for.
    """
    pending = _Pending(steps, may_repeat)
    handle = pending.handle
    _pending[handle] = pending
    return handle


def poll(handle: int) -> bool:
    """Whether `synchronize` would return without waiting.

    Example:
        >>> import torch, hvdkit.torch as hvd
        >>> hvd.init()
        >>> handle = hvd.allreduce_async(torch.ones(2))
        >>> hvd.synchronize(handle)
        tensor([1., 1.])
    """
    pending = _pending.get(handle)
    if pending is None:
        return bool(mpi_ops.poll(handle))
    _advance_others(pending)
    while not pending.done and mpi_ops.poll(pending.handle):
        pending.advance(block=False)
    return pending.done


def synchronize(handle: int) -> Any:
    """Waits for an operation and returns its output; None for a handle that was used before.

    Raises:
        HorovodInternalError: The operation failed on some rank.
    """
    pending = _pending.get(handle)
    if pending is None:
        return mpi_ops.synchronize(handle)
    try:
        _finish(pending)
    finally:
        _pending.pop(handle, None)
    if pending.error is not None:
        raise pending.error
    return pending.result


def run(steps: Steps, may_repeat: bool = False) -> Any:
    """Runs an operation to its end and returns its result."""
    return synchronize(start(steps, may_repeat))


def join(device: int = -1) -> int:
    """Says that this rank has no more data; blocks until every rank has said so.

    Unlike in Horovod a joined rank weighs nothing in an average, minimum, maximum or product:
    these are over the ranks that have not joined. Operations in flight are finished first, and
    unnamed operations still find each other afterwards.

    Args:
        device: The GPU whose tensors the other ranks still reduce, -1 for tensors on the CPU.

    Returns:
        The rank that joined last.

    Example:
        >>> import hvdkit.torch as hvd
        >>> hvd.init()
        >>> hvd.join()
        0
    """
    for pending in list(_pending.values()):
        _finish(pending)
    # Operations that were started past this module: Horovod would drop them, or crash.
    while not all(mpi_ops.poll(handle) for handle in list(mpi_ops._handle_map)):
        time.sleep(_POLL_INTERVAL_S)
    last = int(mpi_ops.join(device))
    _unnamed.clear()
    return last


def forget_all() -> None:
    """Forgets handles and counters, as after a new start of Horovod."""
    _pending.clear()
    _unnamed.clear()
    _blocking.clear()


def name_for(kind: str, name: str | None, process_set: Any) -> str:
    """`name`, or a new one that is the same on all ranks of `process_set`.

    Horovod numbers unnamed operations by handle, and so ranks that joined early, or that do not
    belong to a process set, never meet the others again.
    """
    if name is not None:
        return name
    key = (kind, process_set.process_set_id)
    _unnamed[key] += 1
    return f"hvdkit.unnamed.{_unnamed[key]}"


@contextmanager
def blocking_name(kind: str, name: str | None) -> Iterator[str]:
    """Like :func:`name_for`, for an operation that ends within the ``with`` block.

    The name is free again afterwards. Horovod remembers the ranks' agreement on a name,
    and an operation under a known name is faster than one under a new name.
    """
    if name is not None:
        yield name
        return
    depth = 0
    while (chosen := f"hvdkit.{kind}.{depth}") in _blocking:
        depth += 1
    _blocking.add(chosen)
    try:
        yield chosen
    finally:
        _blocking.discard(chosen)


def _finish(pending: _Pending) -> None:
    while not pending.done:
        others = _advance_others(pending)
        if not others or mpi_ops.poll(pending.handle):
            pending.advance(block=True)
        else:
            time.sleep(_POLL_INTERVAL_S)


def _advance_others(pending: _Pending) -> bool:
    """Advances operations that may repeat; whether there are any besides `pending`."""
    others = [other for other in list(_pending.values()) if other.may_repeat and not other.done]
    for other in others:
        if other is not pending:
            other.advance(block=False)
    return any(other is not pending for other in others)


def _explained(error: Exception) -> Exception:
    """The same error with the remedy, where it comes of ``join``."""
    if "with Join" not in str(error):
        return error
    explained = mpi_ops.HorovodInternalError(
        "Some ranks have called join(), and only allreduce works beside joined ranks. Received: "
        f"{error} Fix: call allgather, broadcast, alltoall and reducescatter before the first "
        "rank joins or after all have, and keep sparse gradients and Compression.bf16 out of "
        "jobs that use join()."
    )
    explained.__cause__ = error
    return explained
