"""Python objects as bytes, for the adapters that send them between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvdkit.errors import SynchronizationError
from hvdkit.optional import require

CHUNK_BYTES = 2**30
"""The most bytes of one collective: MPI counts in 32-bit integers."""

UNSENDABLE = -1
"""Announced in place of a size by a rank whose object cannot be sent."""


def to_bytes(obj: Any) -> tuple[bytearray, Exception | None]:
    """The object as bytes, or what came of it, which the other ranks have to hear of first."""
    try:
        return bytearray(_cloudpickle().dumps(obj)), None
    except Exception as problem:  # noqa: BLE001 - raised by the caller
        return bytearray(), problem


def from_bytes(data: bytes) -> Any:
    """The object that :func:`to_bytes` was given."""
    return _cloudpickle().loads(data)


def cannot_be_sent(ranks: Iterable[int]) -> SynchronizationError:
    """What the other ranks raise where some ranks' objects cannot be sent."""
    return SynchronizationError(
        "Expected objects that cloudpickle can send. Received: one that it cannot, on rank "
        f"{', '.join(map(str, ranks))}. Fix: see that rank's error for the object."
    )


def _cloudpickle() -> Any:
    return require("cloudpickle", feature="sending objects between ranks", extra="build")
