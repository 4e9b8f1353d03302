"""What the gradient reducer keeps of each parameter, and which parameters are reduced together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvdkit.torch.compression import Reduction

COMPRESSED_BUCKET_BYTES = 8 * 2**20
"""Compression costs several operations a bucket, so small gradients share one."""


@dataclass(eq=False)
class Slot:
    """One parameter of the optimizer and how far its gradient is in the current window.

    A *window* is the backward passes between two optimizer steps.
    """

    parameter: torch.Tensor
    name: str
    index: int
    passes: int = 0
    hooked: bool = False
    grad: torch.Tensor | None = None
    """The gradient tensor in flight, None before its reduction was started."""
    version: int = 0
    hook_handles: list[Any] = field(default_factory=list)

    def start(self) -> torch.Tensor:
        """Marks the gradient as being reduced and returns it."""
        grad = self.parameter.grad
        assert grad is not None
        self.grad, self.version = grad, grad._version
        return grad

    def touched(self) -> bool:
        """Whether somebody changed or replaced the gradient since :meth:`start`."""
        return self.parameter.grad is not self.grad or (
            self.grad is not None and self.grad._version != self.version
        )


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients go into one reduction."""

    name: str
    slots: list[Slot]
    ready: int = 0
    launched: bool = False


class Job:
    """A reduction on its way: a generator, and the handle that it waits for now."""

    def __init__(self, slots: Sequence[Slot], steps: Reduction) -> None:
        self.slots = slots
        self.stage = 1
        self.results: list[torch.Tensor] | None = None
        self.handle = next(steps)
        self._steps = steps

    def advance(self, output: Any) -> None:
        """Sends the output of the finished operation; starts the next one, if there is one."""
        self.stage += 1
        try:
            self.handle = self._steps.send(output)
        except StopIteration as end:
            self.results = end.value


def unique_names(named: Sequence[tuple[str, torch.Tensor]]) -> dict[torch.Tensor, str]:
    """Names by parameter, without the prefix that ``torch.compile`` adds.

    Raises:
        ValueError: An entry is not a ``(name, parameter)`` pair, or a name stands twice.
    """
    names: dict[torch.Tensor, str] = {}
    seen: set[str] = set()
    for entry in named:
        if not (isinstance(entry, tuple) and len(entry) == 2):
            raise ValueError(
                "named_parameters must be (name, parameter) pairs, as model.named_parameters() "
                f"gives them. Received: {type(entry).__name__}. Fix: pass "
                "named_parameters=model.named_parameters()."
            )
        name = entry[0].replace("_orig_mod.", "")
        if name in seen:
            raise ValueError(
                f"Parameter names must be unique. Received: {name!r} twice. Fix: prefix the names "
                "of each model, for example ('encoder.' + name, parameter)."
            )
        seen.add(name)
        names[entry[1]] = name
    return names


def plan_buckets(slots: Sequence[Slot], groups: Any, compressed: bool) -> list[Bucket]:
    """Splits the parameters that want a gradient into buckets, the same on every rank.

    Args:
        slots: In the order of the optimizer's parameter groups.
        groups: Horovod's ``groups``: None, a number of groups, or lists of parameters.
        compressed: Whether small gradients should share a bucket where `groups` is None.
    """
    trainable = [slot for slot in slots if slot.parameter.requires_grad]
    if isinstance(groups, int):
        parts = list(_even_parts(trainable, groups))
    elif groups is not None:
        by_parameter = {slot.parameter: slot for slot in trainable}
        parts = [[by_parameter[p] for p in group if p in by_parameter] for group in groups]
        grouped = {slot.index for part in parts for slot in part}
        parts += [[slot] for slot in trainable if slot.index not in grouped]
    elif compressed:
        parts = list(_parts_by_size(trainable))
    else:
        parts = [[slot] for slot in trainable]
    return [single_bucket(part) for part in parts if part]


def single_bucket(slots: list[Slot]) -> Bucket:
    """A bucket named after its first parameter."""
    name = slots[0].name if len(slots) == 1 else f"group.{slots[0].name}"
    return Bucket(name, slots)


def check_groups(groups: Any) -> None:
    """Raises ValueError where `groups` is not what Horovod's ``groups`` may be."""
    if groups is None or (isinstance(groups, int) and groups > 0):
        return
    if not isinstance(groups, list):
        raise ValueError(
            "groups must be a positive number or a list of lists of parameters. "
            f"Received: groups={groups!r}."
        )
    seen: set[int] = set()
    for parameter in (p for group in groups for p in group):
        if not isinstance(parameter, torch.Tensor):
            raise ValueError(
                f"groups must hold torch.Tensor. Received: {type(parameter).__name__}."
            )
        if id(parameter) in seen:
            raise ValueError("A parameter may stand in one of the groups only.")
        seen.add(id(parameter))


def _even_parts(slots: Sequence[Slot], count: int) -> Iterator[list[Slot]]:
    for part in range(count):
        start, end = (len(slots) * edge // count for edge in (part, part + 1))
        yield list(slots[start:end])


def _parts_by_size(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Groups neighbours of one device, last parameters first: their gradients come first."""
    part: list[Slot] = []
    size = 0
    for slot in reversed(slots):
        nbytes = slot.parameter.numel() * slot.parameter.element_size()
        full = size + nbytes > COMPRESSED_BUCKET_BYTES
        if part and (full or slot.parameter.device != part[0].parameter.device):
            yield part
            part, size = [], 0
        part.append(slot)
        size += nbytes
    if part:
        yield part
