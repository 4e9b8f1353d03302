"""16-bit gradient compression that neither overflows nor loses small gradients.

Horovod's own fp16 compression casts and then sums, so gradients of 4e4 on two ranks become inf,
although their mean fits, and gradients of 2e-8 become 0. Here each tensor is brought into the
middle of the 16-bit range first. Both compressors are generators that hand out the collectives
they wait for, so that a caller may overlap many of them with the backward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from typing import Any

import torch

from hvdkit.compressor import (
    FP16_HEADROOM_EXPONENT,
    SCALE_EXPONENTS,
    Compressor,
    NoneCompressor,
)
from hvdkit.errors import SynchronizationError
from hvdkit.torch.backend import mpi_ops

Reduction = Generator[int, Any, list[torch.Tensor]]
"""Yields a handle to wait for, is sent that operation's output, returns the reduced tensors."""


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.dtype]:
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor), tensor.dtype


class FP16Compressor(Compressor):
    """Halves the traffic of float32 gradients; all ranks agree on a power of two per tensor first.

    With `M` the largest magnitude on any rank and `R` ranks, the scale `s` is the largest power
    of two with ``M * R * s < 2**15``: no partial sum can overflow, whatever the order of the sum.
    The mean of finite gradients is therefore finite for any `M` and `R`. Its error is at most
    ``R * 2**-11 * mean(|g|)`` from rounding each addend and partial sum, plus ``M * R * 2**-38``
    for elements so small beside `M` that fp16 holds them as subnormals: at R = 1024 that is
    ``M * 2**-28``. Libraries that add pairwise round ``log2(R)`` times instead of ``R`` times.
    Where that is too coarse, bf16 rounds only twice whatever `R` is.
    Infinities and NaN stay what they are, so that loss scaling still sees them.

    ``compress`` and ``decompress`` alone only cast, as in ``horovod.torch``; the scale needs
    the other ranks and is part of :meth:`reduce`.

    Example:
        >>> FP16Compressor.compress(torch.ones(1))[0].dtype
        torch.float16
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _cast(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return _cast(tensor, ctx)[0]

    @staticmethod
    def reduce(
        tensors: Sequence[torch.Tensor],
        name: str | None,
        op: int,
        prescale_factor: float,
        postscale_factor: float,
        process_set: Any,
    ) -> Reduction:
        """Reduces floating-point tensors of any shapes; the inputs are not changed."""
        _check_op("fp16", op)
        magnitudes = torch.stack([_largest_magnitude(tensor) for tensor in tensors])
        agreed = yield mpi_ops.allreduce_async_(
            magnitudes, name=_suffixed(name, "max"), op=mpi_ops.Max, process_set=process_set
        )
        ranks = process_set.size()
        scales = fp16_scales(agreed, ranks)
        wires = [
            (tensor.float() * scale).to(torch.float16).contiguous()
            for tensor, scale in zip(tensors, scales, strict=True)
        ]
        summing = op in (mpi_ops.Average, mpi_ops.Sum)
        reduced = yield mpi_ops.grouped_allreduce_async_(
            wires,
            name=_suffixed(name, "fp16"),
            op=mpi_ops.Sum if summing else op,
            process_set=process_set,
        )
        factor = _factor(op, prescale_factor, postscale_factor, ranks)
        return [
            (wire.float() * (factor / scale)).to(tensor.dtype)
            for tensor, wire, scale in zip(tensors, reduced, scales, strict=True)
        ]


class BF16Compressor(Compressor):
    """Halves the traffic of float32 gradients; keeps float32's range and 8 bits of precision.

    Horovod cannot add bfloat16, so each rank receives its share of every rank's gradient
    (alltoall), adds it in float32, and sends the rounded result to all (allgather): the traffic
    of a 16-bit allreduce. The error of the mean is at most ``2**-9 * mean(|g|)`` plus
    ``2**-9 * |mean(g)|``, whatever the number of ranks. Horovod's ``join`` knows neither
    operation, so jobs that use ``join`` need ``Compression.none`` or ``Compression.fp16``.

    Example:
        >>> BF16Compressor.compress(torch.ones(1))[0].dtype
        torch.bfloat16
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _cast(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return _cast(tensor, ctx)[0]

    @staticmethod
    def reduce(
        tensors: Sequence[torch.Tensor],
        name: str | None,
        op: int,
        prescale_factor: float,
        postscale_factor: float,
        process_set: Any,
    ) -> Reduction:
        """Reduces floating-point tensors of any shapes; the inputs are not changed."""
        _check_op("bf16", op)
        ranks = process_set.size()
        flat = torch.cat([tensor.reshape(-1).to(torch.bfloat16) for tensor in tensors])
        share = -(-flat.numel() // ranks)
        padded = torch.nn.functional.pad(flat, (0, share * ranks - flat.numel()))
        # Horovod moves 16-bit integers; the bits are those of the bfloat16 numbers. It does not see
        # the tensors' shapes, so each share has a header that tells them.
        header = _header(tensors, flat.device).expand(ranks, -1)
        received, _ = yield mpi_ops.alltoall_async(
            torch.cat([header, padded.view(torch.int16).view(ranks, share)], dim=1),
            name=_suffixed(name, "bf16.scatter"),
            process_set=process_set,
        )
        headers, shares = received.split([header.shape[1], share], dim=1)
        if not torch.equal(headers, header):
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise SynchronizationError(
                "Expected tensors of the same shapes on all ranks, in the same order. Received: "
                f"{shapes} on this rank, and others on another."
            )
        addends = shares.contiguous().view(torch.bfloat16).float()
        if op == mpi_ops.Min:
            result = addends.amin(0)
        elif op == mpi_ops.Max:
            result = addends.amax(0)
        else:
            result = addends.sum(0)
        result *= _factor(op, prescale_factor, postscale_factor, ranks)
        gathered = yield mpi_ops.allgather_async(
            result.to(torch.bfloat16).view(torch.int16),
            name=_suffixed(name, "bf16.gather"),
            process_set=process_set,
        )
        whole = gathered.view(torch.bfloat16)[: flat.numel()]
        parts = whole.split([tensor.numel() for tensor in tensors])
        return [
            part.view(tensor.shape).to(tensor.dtype)
            for part, tensor in zip(parts, tensors, strict=True)
        ]


class Compression:
    """The compressions to choose from: ``Compression.none``, ``.fp16``, ``.bf16``.

    Example:
        >>> Compression.fp16.__name__
        'FP16Compressor'
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def fp16_scales(magnitudes: torch.Tensor, ranks: int) -> torch.Tensor:
    """The power of two by which each tensor is multiplied before it becomes fp16.

    Args:
        magnitudes: Largest magnitude of each tensor over all ranks, shape ``(tensors,)``.
        ranks: How many addends the sum has.

    Returns:
        Scales, float32, shape ``(tensors,)``; 1 where the magnitude is not finite.

    Example:
        >>> fp16_scales(torch.tensor([4e4]), ranks=2)
        tensor([0.2500])
    """
    exponents = torch.frexp(magnitudes.double() * ranks).exponent
    exponents = (FP16_HEADROOM_EXPONENT - exponents).clamp(*SCALE_EXPONENTS)
    scales = torch.ldexp(torch.ones_like(magnitudes, dtype=torch.float32), exponents)
    return torch.where(torch.isfinite(magnitudes), scales, 1.0)


def _largest_magnitude(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=tensor.device)
    largest = torch.linalg.vector_norm(tensor.float(), float("inf"))
    # MPI's maximum is undefined for NaN; infinity says the same to the scale.
    return torch.where(torch.isfinite(largest), largest, float("inf"))


def _header(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    digest = zlib.crc32(repr([tuple(tensor.shape) for tensor in tensors]).encode())
    return torch.tensor([digest], dtype=torch.int64, device=device).view(torch.int16)


def _factor(op: int, prescale_factor: float, postscale_factor: float, ranks: int) -> float:
    mean = 1.0 / ranks if op == mpi_ops.Average else 1.0
    return prescale_factor * postscale_factor * mean


def _check_op(name: str, op: int) -> None:
    if op not in (mpi_ops.Average, mpi_ops.Sum, mpi_ops.Min, mpi_ops.Max):
        raise ValueError(
            f"Compression.{name} supports op=Average, Sum, Min and Max. Received: op={op}. "
            "Fix: use Compression.none for Product and Adasum."
        )


def _suffixed(name: str | None, suffix: str) -> str | None:
    return None if name is None else f"{name}.{suffix}"
