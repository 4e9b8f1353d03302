"""Objects of all ranks, from the same point of their work."""

from __future__ import annotations

from typing import Any

from hvdkit.errors import SynchronizationError
from hvdkit.keras.backend import adapter


def gather(what: str, obj: Any) -> list[Any]:
    """Every rank's object, in the order of ranks.

    Args:
        what: What it is for. All of an adapter's questions share one name, so that ranks that ask
            different ones do not wait for each other.
        obj: Anything that cloudpickle can send.

    Raises:
        SynchronizationError: Ranks are at different points; on all ranks.
    """
    told = adapter.allgather_object((what, obj), name="hvdkit.keras")
    points: dict[str, list[int]] = {}
    for rank, (point, _) in enumerate(told):
        points.setdefault(point, []).append(rank)
    if len(points) > 1:
        received = "; ".join(f"ranks {ranks}: {point}" for point, ranks in points.items())
        raise SynchronizationError(
            f"Expected all ranks at the same point of the training. Received: {received}. Fix: "
            "pass the same callbacks on all ranks, and validation data on all or on none of them: "
            "hvd.shard(data, batch_size, train=False)."
        )
    return [obj for _, obj in told]
