"""Reduction of sparse gradients: every rank receives the rows of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from hvdkit.torch.backend import mpi_ops
from hvdkit.torch.compression import Reduction


def sparse_reduction(grad: torch.Tensor, name: str, op: int, process_set: Any) -> Reduction:
    """Gathers indices and values; their sum, divided by the ranks for an average, is the result.

    Args:
        grad: Sparse COO gradient; a rank without one passes an empty one.
        name: Name of the reduction.
        op: ``Average`` or ``Sum``.
        process_set: The ranks that take part.

    Raises:
        ValueError: Another `op` than these two.
    """
    if op not in (mpi_ops.Average, mpi_ops.Sum):
        raise ValueError(
            f"Sparse gradients can be reduced with op=Average or Sum. Received: op={op} for "
            f"{name!r}. Fix: pass sparse_as_dense=True."
        )
    # Adding up equal rows first sends no row twice.
    grad = grad.coalesce()
    indices = yield mpi_ops.allgather_async(
        grad.indices().t().contiguous(), name=f"{name}.indices", process_set=process_set
    )
    values = grad.values()
    wire = values.float() if values.dtype == torch.bfloat16 else values
    gathered = yield mpi_ops.allgather_async(
        wire.contiguous(), name=f"{name}.values", process_set=process_set
    )
    gathered = gathered.to(values.dtype)
    if op == mpi_ops.Average:
        gathered = gathered / process_set.size()
    shape = (-1, grad.sparse_dim())
    result = torch.sparse_coo_tensor(
        indices.reshape(shape).t(), gathered, grad.shape, check_invariants=False
    )
    return [result.coalesce()]
