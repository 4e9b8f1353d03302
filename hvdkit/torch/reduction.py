"""What a gradient reduction is asked to do, and how one bucket of dense gradients is reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdkit.options import check_predivide
from hvdkit.torch.backend import mpi_ops
from hvdkit.torch.buckets import check_groups
from hvdkit.torch.compression import Compression, Reduction


@dataclass(frozen=True)
class ReductionOptions:
    """The options of ``DistributedOptimizer``; see there."""

    compression: Any = Compression.none
    backward_passes_per_step: int = 1
    op: int = mpi_ops.Average
    gradient_predivide_factor: float = 1.0
    groups: Any = None
    sparse_as_dense: bool = False
    process_set: Any = None
    """None stands for all ranks: Horovod's global set cannot be copied or pickled."""

    def __post_init__(self) -> None:
        check_groups(self.groups)
        if self.backward_passes_per_step <= 0:
            raise ValueError(
                "backward_passes_per_step must be at least 1. "
                f"Received: backward_passes_per_step={self.backward_passes_per_step}."
            )
        check_predivide(self.gradient_predivide_factor, self.op, mpi_ops.Average)

    @property
    def multi_stage(self) -> bool:
        """Whether a reduction is more than one collective, one after the other."""
        return hasattr(self.compression, "reduce")


def dense_reduction(
    options: ReductionOptions,
    name: str,
    grads: Sequence[torch.Tensor],
    process_set: Any,
    scale: float,
) -> Reduction:
    """Reduces the gradients of one bucket; gradients of float32 and float64 in place.

    Args:
        options: What was asked for.
        name: Name of the reduction.
        grads: Dense or sparse gradients, which are reduced as dense ones.
        process_set: The ranks that take part.
        scale: Multiplies the result.
    """
    dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
    predivide = options.gradient_predivide_factor
    factors = {"prescale_factor": 1.0 / predivide, "postscale_factor": predivide * scale}
    if options.multi_stage:
        return options.compression.reduce(  # type: ignore[no-any-return]
            dense, name, options.op, process_set=process_set, **factors
        )
    return _one_stage(
        dense, options.compression, name=name, op=options.op, process_set=process_set, **factors
    )


def _one_stage(grads: Sequence[torch.Tensor], compression: Any, **keywords: Any) -> Reduction:
    pairs = [compression.compress(_addable(grad)) for grad in grads]
    wires = [wire.contiguous() for wire, _ in pairs]
    if len(wires) == 1:
        yield mpi_ops.allreduce_async_(wires[0], **keywords)
    else:
        yield mpi_ops.grouped_allreduce_async_(wires, **keywords)
    results = [
        compression.decompress(wire, context)
        for wire, (_, context) in zip(wires, pairs, strict=True)
    ]
    return [
        torch.view_as_complex(result) if grad.is_complex() else result
        for result, grad in zip(results, grads, strict=True)
    ]


def _addable(grad: torch.Tensor) -> torch.Tensor:
    """The gradient in a dtype that Horovod adds without harm.

    16-bit gradients are added in float32: their sum may overflow where their mean fits.
    """
    if grad.is_complex():
        return torch.view_as_real(grad)
    return grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
