"""What a tensor becomes on the wire: Horovod adds up five dtypes and moves eight.

Nothing here communicates. :func:`encode` says what to send for a reduction and how to read the
answer; :func:`to_bytes` shows any tensor as bytes, for operations that only move data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hvdkit.torch.backend import mpi_ops

Tensor = torch.Tensor

REDUCED_DTYPES = "bool (Min, Max, Product), uint8, int8 to int64, 8- to 64-bit floats, complex"
_MOVED = frozenset(
    (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
    )
)
_NARROW_INTEGERS = (torch.uint8, torch.int8, torch.int16)
_INTEGERS = (*_NARROW_INTEGERS, torch.int32, torch.int64)
_WIDE_FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Wire:
    """A tensor made ready for a reduction."""

    payload: Tensor
    """Contiguous, of a dtype that Horovod reduces."""
    owned: bool
    """Whether nobody else sees the payload, so that it may be reduced in place."""
    op: int
    prescale: float
    postscale: float
    decode: Callable[[Tensor, Any], Tensor]
    """``decode(reduced, active)``: the result in the dtype of the input, where `active` ranks
    contributed: a number, or on a GPU a tensor of one element."""


def encode(
    tensor: Tensor, op: int, prescale_factor: float, postscale_factor: float, ranks: int
) -> Wire:
    """Chooses an exact way to reduce `tensor` with operations that Horovod has.

    16- and 8-bit floats travel as float32, so that a mean that fits never overflows on the way.
    Integers are averaged exactly: see :func:`_encode_integer_average`.

    Args:
        tensor: Any shape, contiguous or not.
        op: Horovod's number of the operation.
        prescale_factor: Applied before the reduction.
        postscale_factor: Applied after it.
        ranks: How many ranks the process set has.

    Raises:
        ValueError: The dtype has no such reduction.
    """
    dtype = tensor.dtype
    if dtype.is_complex and op in (mpi_ops.Sum, mpi_ops.Average):
        pairs = torch.view_as_real(tensor.detach().resolve_conj())
        wire = encode(pairs, op, prescale_factor, postscale_factor, ranks)
        decode = wire.decode
        return replace(wire, decode=lambda x, active: torch.view_as_complex(decode(x, active)))
    if dtype == torch.bool and op in (mpi_ops.Min, mpi_ops.Max, mpi_ops.Product):
        return _encode_integer(tensor, op, 1.0, 1.0)
    if dtype in _INTEGERS and op != mpi_ops.Adasum:
        if op == mpi_ops.Average:
            return _encode_integer_average(tensor, prescale_factor * postscale_factor, ranks)
        return _encode_integer(tensor, op, prescale_factor, postscale_factor)
    if dtype.is_floating_point:
        exact_in_half = dtype == torch.float16 and op in (mpi_ops.Min, mpi_ops.Max)
        carrier = dtype if dtype in _WIDE_FLOATS or exact_in_half else torch.float32
        payload = tensor.detach().to(carrier).contiguous()

        def decode_float(reduced: Tensor, active: Any) -> Tensor:
            if op == mpi_ops.Average and (isinstance(active, Tensor) or active != ranks):
                reduced = reduced.mul_(ranks / active)
            return reduced.to(dtype)

        owned = payload.data_ptr() != tensor.data_ptr()
        return Wire(payload, owned, op, prescale_factor, postscale_factor, decode_float)
    raise ValueError(
        f"Cannot reduce this dtype with {op_name(op)}. Expected one of: {REDUCED_DTYPES}. "
        f"Received: dtype={dtype}. Fix: convert the tensor first, for example tensor.to(int64)."
    )


def _encode_integer(
    tensor: Tensor, op: int, prescale_factor: float, postscale_factor: float
) -> Wire:
    """Sum, Min, Max, Product: narrow integers as int32; a sum is scaled once, at the end."""
    dtype = tensor.dtype
    if op == mpi_ops.Sum:
        prescale_factor, postscale_factor = 1.0, prescale_factor * postscale_factor
    scaled = _scale_integers(tensor.detach(), prescale_factor)
    payload = scaled.to(dtype if dtype in (torch.int32, torch.int64) else torch.int32).contiguous()
    return Wire(
        payload,
        payload.data_ptr() != tensor.data_ptr(),
        op,
        1.0,
        1.0,
        lambda reduced, active: _scale_integers(reduced, postscale_factor).to(dtype),
    )


def _encode_integer_average(tensor: Tensor, factor: float, ranks: int) -> Wire:
    """Sends quotient and remainder by the number of ranks, so that no sum can overflow.

    ``x = ranks * q + r`` and ``0 <= r < ranks``: the sums of q and r stay small for any int64.
    """
    dtype = tensor.dtype
    wide = tensor.detach().to(torch.int64)
    quotient = torch.div(wide, ranks, rounding_mode="floor")
    payload = torch.stack((quotient, wide - quotient * ranks), dim=-1)

    def decode(reduced: Tensor, active: Any) -> Tensor:
        quotients, remainders = reduced.unbind(-1)
        mean, rest = _divide(quotients, remainders, ranks, int(active))
        if factor != 1.0:
            exact = mean.double() + rest.double() / int(active)
            return _scale_integers(exact, factor).round_().to(dtype)
        if rest.numel() and bool(rest.any()):
            warn_once(
                "The average of an integer tensor is not a whole number; it was rounded to the "
                "nearest one, half to even. Fix: average tensor.float() to keep the fraction."
            )
        twice, count = 2 * rest, int(active)
        round_up = (twice > count) | ((twice == count) & (mean % 2 != 0))
        return (mean + round_up).to(dtype)

    return Wire(payload, True, mpi_ops.Sum, 1.0, 1.0, decode)


def _divide(
    quotients: Tensor, remainders: Tensor, ranks: int, active: int
) -> tuple[Tensor, Tensor]:
    """``(ranks * quotients + remainders) / active`` as whole part and rest, without overflow."""
    whole = torch.div(quotients, active, rounding_mode="floor")
    left = (quotients - whole * active) * ranks + remainders
    more = torch.div(left, active, rounding_mode="floor")
    return whole * ranks + more, left - more * active


def _scale_integers(tensor: Tensor, factor: float) -> Tensor:
    if factor == 1.0:
        return tensor
    scaled = tensor.double() * factor
    return scaled if tensor.is_floating_point() else scaled.round_().to(tensor.dtype)


def to_bytes(tensor: Tensor) -> Tensor:
    """`tensor`, contiguous; as bytes in one more dimension where Horovod cannot move its dtype."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in _MOVED:
        return tensor
    return tensor.unsqueeze(-1).view(torch.uint8)


def from_bytes(moved: Tensor, dtype: torch.dtype) -> Tensor:
    """What :func:`to_bytes` has made, after it was moved, as a tensor of `dtype`."""
    return moved if moved.dtype == dtype else moved.view(dtype).squeeze(-1)


def check_op(op: int) -> None:
    """Raises ValueError for an operation that this job's transport does not have."""
    if op == mpi_ops.Adasum and mpi_ops.size() > 1 and not mpi_ops.mpi_enabled():
        raise ValueError(
            "op=Adasum needs ranks that communicate over MPI. Received: a job over Gloo. Fix: "
            "start it with horovodrun --mpi or mpirun, or pass op=Average."
        )


def op_name(op: int) -> str:
    """The name of an operation for a message."""
    names = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
    return next((name for name in names if getattr(mpi_ops, name) == op), f"op={op}")


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warns the first time that this process meets the case."""
    if message not in _warned:
        _warned.add(message)
        import warnings

        warnings.warn(message, UserWarning, stacklevel=2)
