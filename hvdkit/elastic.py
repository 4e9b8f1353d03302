"""What the elastic states of all adapters share: objects that are kept apart from those in use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from hvdkit.optional import require

_common = require("horovod.common.elastic", feature="hvd.elastic", extra="horovod")

ObjectState: Any = _common.ObjectState
run_fn: Any = _common.run_fn


class CopiedObjects(ObjectState):  # type: ignore[misc]
    """Objects of a state, apart from those that the training goes on to change.

    Horovod's own class keeps the very objects, so that ``restore`` brings back what was appended to
    a list after the last ``commit``.

    Args:
        broadcast_object: Sends rank 0's object to all ranks.
        rank: Number of this rank.
        objects: Become attributes.
    """

    def __init__(
        self, broadcast_object: Callable[[Any], Any], rank: Callable[[], int], **objects: Any
    ) -> None:
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **objects)
        self._set_apart()

    def save(self) -> None:
        """Keeps what is now, for :meth:`restore`."""
        super().save()
        self._set_apart()

    def restore(self) -> None:
        """Goes back to what was kept."""
        super().restore()
        self._set_apart()

    def sync(self) -> None:
        """Takes over what rank 0 has."""
        super().sync()
        self._set_apart()

    def _set_apart(self) -> None:
        self._saved_state = copy.deepcopy(self._saved_state)
