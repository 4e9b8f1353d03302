"""What the Keras adapter needs of PyTorch; :mod:`~hvdkit.keras.tensorflow_collectives` mirrors it.

With the torch backend Keras runs eagerly, so counts of samples are plain numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from hvdkit.compressor import name_of
from hvdkit.errors import SynchronizationError
from hvdkit.keras.groups import plan_groups
from hvdkit.torch.agreement import Totals, agree_on_largest, exchange_counts
from hvdkit.torch.backend import mpi_ops
from hvdkit.torch.buckets import Job
from hvdkit.torch.reduction import ReductionOptions, dense_reduction
from hvdkit.torch.sparse import sparse_reduction
from hvdkit.torch.state import broadcast_parameters

Gradient = torch.Tensor


def reduce_gradients(
    gradients: Sequence[Gradient],
    variables: Sequence[Any],
    label: str,
    settings: Any,
    samples: int | None = None,
    passes: int = 1,
) -> tuple[list[Gradient], int | None]:
    """Reduces gradients over the ranks of a process set.

    Args:
        gradients: Dense, or sparse COO tensors.
        variables: The Keras variables that they belong to.
        label: First part of the reductions' names.
        settings: A :class:`~hvdkit.keras.settings.ReductionSettings`.
        samples: Samples of this rank, None where they are not counted.
        passes: Batches of a step, which has to be the same on all ranks.

    Returns:
        The reduced gradients, and the samples of all ranks.

    Raises:
        SynchronizationError: Ranks have different gradients; on all ranks.
    """
    # Layers may have other names on other ranks.
    names = [f"{label}.{index}.{variable.name}" for index, variable in enumerate(variables)]
    parts = plan_groups(variables, settings.groups)
    kind = name_of(settings.compression)
    shared = (passes, settings.op, settings.gradient_predivide_factor, parts, kind)
    totals = _agree(names, gradients, label, settings, samples or 0, shared)
    options = ReductionOptions(
        compression=settings.compression,
        op=settings.op,
        gradient_predivide_factor=settings.gradient_predivide_factor,
    )
    reduced = list(gradients)
    jobs: list[tuple[Sequence[int], Job]] = []
    with torch.no_grad():
        for part in _separate_sparse(parts, gradients, settings.sparse_as_dense):
            grads = [gradients[index] for index in part]
            name = names[part[0]] if len(part) == 1 else f"{names[part[0]]}.group"
            if grads[0].is_sparse and not settings.sparse_as_dense:
                steps = sparse_reduction(grads[0], name, settings.op, settings.process_set)
            else:
                steps = dense_reduction(options, name, grads, settings.process_set, 1.0)
            jobs.append((part, Job([], steps)))
        for part, job in jobs:
            while job.results is None:
                job.advance(mpi_ops.synchronize(job.handle))
            for index, result in zip(part, job.results, strict=True):
                reduced[index] = result.to(gradients[index].dtype)
    return reduced, None if samples is None else totals.samples


def _agree(
    names: Sequence[str],
    gradients: Sequence[Gradient],
    label: str,
    settings: Any,
    samples: int,
    shared_options: tuple[Any, ...],
) -> Totals:
    """Adds up samples, and makes sure that no rank waits for a gradient that another has not."""
    sparse = [gradient.is_sparse for gradient in gradients]
    checksum = zlib.crc32(repr((names, sparse)).encode())
    totals = exchange_counts(
        f"{label}.counts",
        settings.process_set,
        samples=samples,
        left=False,
        discarding=False,
        launched_mask=checksum,
        options=shared_options,
        device=gradients[0].device,
    )
    if totals.disagreement:
        raise SynchronizationError(
            "Expected gradients of the same variables on all ranks. Received: on this rank "
            f"{len(gradients)} gradients, on some rank others. Fix: compute the same loss from "
            "the same layers on every rank."
        )
    if totals.other_options:
        raise SynchronizationError(
            "Expected the same options on all ranks, whose reductions do not match otherwise. "
            "Received: (batches of a step, op, gradient_predivide_factor, groups, compression)="
            f"{shared_options} on this rank, and others on another. Fix: pass the same on every "
            "rank."
        )
    return totals


def _separate_sparse(
    parts: Sequence[Sequence[int]], gradients: Sequence[Gradient], as_dense: bool
) -> list[Sequence[int]]:
    if as_dense:
        return list(parts)
    split: list[Sequence[int]] = []
    for part in parts:
        split += [[index] for index in part if gradients[index].is_sparse]
        dense = [index for index in part if not gradients[index].is_sparse]
        split += [dense] if dense else []
    return split


def building_graph() -> bool:
    """Whether what runs now only builds a graph; never, with PyTorch."""
    return False


def build_before_training(model: Any) -> None:
    """With PyTorch Keras builds models before their first step anyway."""


def true_on_all(flag: Any, name: str, process_set: Any) -> bool:
    """Whether a boolean is true on every rank of the set."""
    wire = torch.tensor([float(bool(flag))])
    handle = mpi_ops.allreduce_async_(wire, name=name, op=mpi_ops.Min, process_set=process_set)
    return bool(mpi_ops.synchronize(handle)[0])


def scale(gradients: Sequence[Gradient], factor: float) -> list[Gradient]:
    """Gradients times a number."""
    return list(gradients) if factor == 1.0 else [gradient * factor for gradient in gradients]


def length_of(tensor: Any) -> int:
    """Samples of a batch."""
    return int(tensor.shape[0])


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Gives Keras variables the root's values, in place. Their order tells them apart.

    Raises:
        SynchronizationError: The ranks' variables differ in number, shape or dtype.
    """
    tensors = [variable.value.data for variable in variables]
    broadcast_parameters([(str(index), tensor) for index, tensor in enumerate(tensors)], root_rank)


class WindowCounter:
    """Samples of the micro-batches between two optimizer steps, on this rank.

    Gradients are accumulated as ``sum(g_m * n_m / reference)``, which needs no scaling while all
    batches have the same size.

    Args:
        process_set: The ranks whose batches make up a step.
        label: First part of the reductions' names.
    """

    def __init__(self, process_set: Any, label: str) -> None:
        self._process_set = process_set
        self._label = label
        self._reference: int | None = None
        self._total = 0
        self._current = 0

    def begin(self, samples: int) -> None:
        """A micro-batch of so many samples is about to be applied."""
        self._current = samples
        self._total += samples
        if self._reference is None:
            name = f"{self._label}.reference"
            agreed = samples
            if self._process_set.included() and self._process_set.size() > 1:
                agreed = agree_on_largest(name, self._process_set, samples, torch.device("cpu"))
            self._reference = max(1, agreed)

    def weigh(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """The current micro-batch's gradients, as they are accumulated."""
        assert self._reference is not None
        if not self._current:  # the mean loss of no sample is not a number
            return [torch.zeros_like(gradient) for gradient in gradients]
        return scale(gradients, self._current / self._reference)

    def take(self) -> int:
        """Ends the window; the samples of this rank in it."""
        total, self._total = self._total, 0
        return total

    def correction(self, passes: int, ranks: int, total: int) -> float:
        """What a mean over ranks and micro-batches is multiplied by to be one over samples.

        Args:
            passes: Micro-batches of a window.
            ranks: Ranks that the mean was taken over.
            total: Their samples.
        """
        assert self._reference is not None
        return passes * ranks * self._reference / total if total else 1.0
