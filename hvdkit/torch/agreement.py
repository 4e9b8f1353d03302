"""The small exchanges by which ranks find out whether they reduce the same gradients."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdkit.torch.backend import mpi_ops


@dataclass(frozen=True)
class Totals:
    """Sums over ranks of what each says at the end of a window."""

    active: int
    """Ranks that have not joined."""
    samples: int
    left: int
    """Ranks that hold gradients whose reduction they could not start."""
    discarding: int
    """Ranks that clear their gradients without a step."""
    checksums: int
    squared_checksums: int
    options: int
    squared_options: int

    @property
    def disagreement(self) -> bool:
        """Whether some gradient is not under way on all active ranks.

        Numbers are equal exactly if n times the sum of their squares is their sum squared.
        """
        return self.left > 0 or self.active * self.squared_checksums != self.checksums**2

    @property
    def other_options(self) -> bool:
        """Whether ranks reduce with different options."""
        return self.active * self.squared_options != self.options**2


def exchange_counts(
    name: str,
    process_set: Any,
    samples: int,
    left: bool,
    discarding: bool,
    launched_mask: int,
    options: object,
    device: torch.device,
) -> Totals:
    """Tells the other ranks about this rank's window, and adds up what they say.

    Args:
        name: Name of the exchange.
        process_set: The ranks that take part.
        samples: Samples that this rank's gradients stand for.
        left: Whether this rank holds gradients whose reduction it could not start.
        discarding: Whether this rank clears its gradients without a step.
        launched_mask: One bit for each reduction that it started.
        options: How it reduces; compared by its text.
        device: Where the gradients are. A joined rank takes part with zeros on one device only.
    """
    mask = launched_mask.to_bytes(launched_mask.bit_length() // 8 + 1, "little")
    numbers = [1, samples, int(left), int(discarding)]
    for told in (mask, repr(options).encode()):
        checksum = zlib.crc32(told) & 0xFFFFF  # its square, added over all ranks, fits 64 bits
        numbers += [checksum, checksum**2]
    counts = torch.tensor(numbers, dtype=torch.int64, device=device)
    handle = mpi_ops.allreduce_async_(counts, name=name, op=mpi_ops.Sum, process_set=process_set)
    return Totals(*mpi_ops.synchronize(handle).tolist())


def agree_on_gradients(
    name: str, process_set: Any, kinds: Sequence[tuple[int, int]], device: torch.device
) -> list[tuple[int, int]]:
    """Which gradients exist on some rank.

    Args:
        name: Name of the exchange.
        process_set: The ranks that take part.
        kinds: For each parameter, the number of sparse dimensions of this rank's gradient (0 if
            it is dense or missing), and 1 if it is to be reduced as a dense one, else 0.
        device: Where the gradients are.

    Returns:
        The largest of each number over all ranks.
    """
    flags = torch.tensor(kinds, dtype=torch.int32, device=device)
    handle = mpi_ops.allreduce_async_(flags, name=name, op=mpi_ops.Max, process_set=process_set)
    return [(sparse, dense) for sparse, dense in mpi_ops.synchronize(handle).tolist()]


def agree_on_largest(name: str, process_set: Any, value: int, device: torch.device) -> int:
    """The largest `value` of all ranks; it must not be negative."""
    largest = torch.tensor([value], dtype=torch.int64, device=device)
    handle = mpi_ops.allreduce_async_(largest, name=name, op=mpi_ops.Max, process_set=process_set)
    return int(mpi_ops.synchronize(handle).item())
