"""The device that this rank computes on."""

from __future__ import annotations

import json
import socket
from typing import Any

import torch

from hvdkit import world
from hvdkit.torch.ops_move import allgather


def device(allow_sharing: bool = False) -> torch.device:
    """Chooses a GPU of its own for each rank of a machine, the CPU where there is none.

    Every rank has to call it: the ranks compare which GPUs they see, since a launcher may show
    all ranks the same ones or each rank one of its own. The current device is left as it is.

    Args:
        allow_sharing: Lets several ranks use one GPU. NCCL refuses that.

    Raises:
        DeviceError: Two ranks would use the same GPU.

    Example:
        >>> import hvdkit.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1).to(hvd.device())
    """
    if torch.version.cuda is None and torch.version.hip is None:
        return torch.device("cpu")
    here = world.current()
    own = [str(_uuid(index)) for index in range(torch.cuda.device_count())]
    told = _gather([socket.gethostname(), here.local_rank, own]) if here.size > 1 else []
    neighbours = sorted(entry[1:] for entry in told if entry[0] == socket.gethostname())
    # Machines of one name cannot be told apart, so nothing is known of this one.
    known = [local_rank for local_rank, _ in neighbours] == list(range(here.local_size))
    index = world.device_index(
        here,
        len(own),
        allow_sharing,
        [uuids for _, uuids in neighbours] if known else None,
    )
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def _uuid(index: int) -> Any:
    return torch.cuda.get_device_properties(index).uuid


def _gather(entry: list[Any]) -> list[Any]:
    text = json.dumps(entry) + "\n"
    gathered = allgather(torch.tensor(list(text.encode()), dtype=torch.uint8))
    return [json.loads(line) for line in bytes(gathered.tolist()).decode().splitlines()]
