"""What a tensor becomes on the wire: Horovod adds up a few dtypes and moves a few more.

Nothing here communicates. :func:`encode` says what to send for a reduction and how to read the
answer; :func:`movable` does so for operations that only move rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.tensorflow.backend import mpi_ops

REDUCED_DTYPES = "bool (Min, Max, Product), uint8 to uint32, int8 to int64, floats, complex"
_NARROW_INTEGERS = (tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32)
_WIDE_INTEGERS = (tf.uint32, tf.int64)
_WIDE_FLOATS = (tf.float32, tf.float64)
_MOVED = (
    *(tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64),
    *(tf.float16, tf.float32, tf.float64, tf.bool),
)


@dataclass(frozen=True)
class Wire:
    """A tensor made ready for a reduction."""

    payload: tf.Tensor
    """Of a dtype that Horovod reduces."""
    op: int
    prescale: float
    """What Horovod multiplies every rank's payload by."""
    decode: Callable[[tf.Tensor, Any], tf.Tensor]
    """``decode(reduced, active)``: the result in the dtype of the input, where `active` ranks
    contributed: a number or a scalar int64 tensor."""


def encode(
    tensor: tf.Tensor,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    ranks: Any,
    averaging: bool = False,
) -> Wire:
    """Chooses an exact way to reduce `tensor` with operations that Horovod has.

    Floats of 16 bits and less travel as float32, so that a mean that fits never overflows on the
    way. Integers are averaged exactly: see :func:`_encode_integer_average`.

    Args:
        tensor: Any shape.
        op: Horovod's number of the operation.
        prescale_factor: Applied before the reduction.
        postscale_factor: Applied after it.
        ranks: How many ranks the process set has.
        averaging: Whether Horovod's operation can divide by them, which saves a pass over memory.

    Raises:
        ValueError: The dtype has no such reduction.
    """
    dtype = tensor.dtype
    if dtype.is_complex and op in (mpi_ops.Sum, mpi_ops.Average):
        pairs = tf.stack((tf.math.real(tensor), tf.math.imag(tensor)), axis=-1)
        wire = encode(pairs, op, prescale_factor, postscale_factor, ranks, averaging)
        decode = wire.decode

        def decode_complex(reduced: tf.Tensor, active: Any) -> tf.Tensor:
            real, imaginary = tf.unstack(decode(reduced, active), axis=-1, num=2)
            return tf.complex(real, imaginary)

        return replace(wire, decode=decode_complex)
    if dtype == tf.bool and op in (mpi_ops.Min, mpi_ops.Max, mpi_ops.Product):
        return _encode_integer(tensor, op, 1.0, 1.0)
    if dtype in (*_NARROW_INTEGERS, *_WIDE_INTEGERS) and op != mpi_ops.Adasum:
        if op == mpi_ops.Average:
            return _encode_integer_average(tensor, prescale_factor * postscale_factor, ranks)
        return _encode_integer(tensor, op, prescale_factor, postscale_factor)
    if dtype.is_floating:
        return _encode_float(tensor, op, prescale_factor, postscale_factor, ranks, averaging)
    raise ValueError(
        f"Cannot reduce this dtype with {op_name(op)}. Expected one of: {REDUCED_DTYPES}. "
        f"Received: dtype={dtype.name}. Fix: convert the tensor first, for example "
        "tf.cast(tensor, tf.int64)."
    )


def _encode_float(
    tensor: tf.Tensor,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    ranks: Any,
    averaging: bool,
) -> Wire:
    dtype = tensor.dtype
    payload = tf.cast(tensor, dtype if dtype in _WIDE_FLOATS else tf.float32)
    # Horovod's operation holds factors as float32, and scales the marker of the census too, which
    # must neither vanish nor change its sign.
    exact = float(np.float32(prescale_factor)) == prescale_factor and 1e-6 < prescale_factor < 1e6
    in_horovod = exact and op in (mpi_ops.Sum, mpi_ops.Average)
    if not in_horovod:
        payload, prescale_factor = _multiply(payload, prescale_factor), 1.0

    def decode(reduced: tf.Tensor, active: Any) -> tf.Tensor:
        if op == mpi_ops.Average and averaging:
            reduced = _average_of_active(reduced, ranks, active)
        elif op == mpi_ops.Average:
            reduced = reduced / tf.cast(active, reduced.dtype)
        return tf.cast(_multiply(reduced, postscale_factor), dtype)

    wire_op = mpi_ops.Sum if op == mpi_ops.Average and not averaging else op
    return Wire(payload, wire_op, prescale_factor, decode)


def _average_of_active(average: tf.Tensor, ranks: Any, active: Any) -> tf.Tensor:
    """The average over `active` ranks, from one that counts joined ranks as zeros."""
    if active is ranks:
        return average
    count = tf.cast(active, tf.int64)
    return tf.cond(
        tf.equal(count, tf.cast(ranks, tf.int64)),
        lambda: average,
        lambda: average * (tf.cast(ranks, average.dtype) / tf.cast(count, average.dtype)),
    )


def _encode_integer(
    tensor: tf.Tensor, op: int, prescale_factor: float, postscale_factor: float
) -> Wire:
    """Sum, Min, Max, Product: narrow integers as int32; a sum is scaled once, at the end."""
    dtype = tensor.dtype
    if op == mpi_ops.Sum:
        prescale_factor, postscale_factor = 1.0, prescale_factor * postscale_factor
    carrier = tf.int64 if dtype in _WIDE_INTEGERS else tf.int32
    payload = _multiply(tf.cast(tensor, carrier), prescale_factor)
    return Wire(
        payload,
        op,
        1.0,
        lambda reduced, active: tf.cast(_multiply(reduced, postscale_factor), dtype),
    )


def _encode_integer_average(tensor: tf.Tensor, factor: float, ranks: Any) -> Wire:
    """Sends quotient and remainder by the number of ranks, so that no sum can overflow.

    ``x = ranks * q + r`` and ``0 <= r < ranks``: the sums of q and r stay small for any int64.
    The mean is rounded to the nearest whole number, half to even.
    """
    dtype = tensor.dtype
    wide = tf.cast(tensor, tf.int64)
    ranks = tf.cast(ranks, tf.int64)
    quotient = tf.math.floordiv(wide, ranks)
    payload = tf.stack((quotient, wide - quotient * ranks), axis=-1)

    def decode(reduced: tf.Tensor, active: Any) -> tf.Tensor:
        count = tf.cast(active, tf.int64)
        quotients, remainders = tf.unstack(reduced, axis=-1, num=2)
        whole = tf.math.floordiv(quotients, count)
        left = (quotients - whole * count) * ranks + remainders
        more = tf.math.floordiv(left, count)
        mean, rest = whole * ranks + more, left - more * count
        if factor != 1.0:
            fraction = tf.cast(rest, tf.float64) / tf.cast(count, tf.float64)
            return tf.cast(tf.round((tf.cast(mean, tf.float64) + fraction) * factor), dtype)
        odd = tf.not_equal(tf.math.floormod(mean, 2), 0)
        round_up = (2 * rest > count) | (tf.equal(2 * rest, count) & odd)
        return tf.cast(mean + tf.cast(round_up, tf.int64), dtype)

    return Wire(payload, mpi_ops.Sum, 1.0, decode)


def _multiply(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """The tensor times a number, integers rounded to nearest."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating:
        return tensor * tf.constant(factor, tensor.dtype)
    return tf.cast(tf.round(tf.cast(tensor, tf.float64) * factor), tensor.dtype)


def movable(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """`tensor` in a dtype that Horovod moves, without loss, and what restores the dtype.

    Floats stay differentiable.

    Raises:
        ValueError: The tensor holds strings or other things without a fixed size.
    """
    dtype = tensor.dtype
    if dtype in _MOVED:
        return tensor, lambda moved: moved
    if dtype.is_floating:
        return tf.cast(tensor, tf.float32), lambda moved: tf.cast(moved, dtype)
    if dtype.is_complex:
        pairs = tf.stack((tf.math.real(tensor), tf.math.imag(tensor)), axis=-1)
        return pairs, lambda moved: tf.complex(*tf.unstack(moved, axis=-1, num=2))
    if dtype in (tf.uint32, tf.uint64):
        signed = tf.int32 if dtype == tf.uint32 else tf.int64
        return tf.bitcast(tensor, signed), lambda moved: tf.bitcast(moved, dtype)
    raise ValueError(
        "Expected numbers, which have a fixed size. Received: "
        f"dtype={dtype.name}. Fix: send it with hvd.broadcast_object or hvd.allgather_object."
    )


def op_name(op: int) -> str:
    """The name of an operation for a message."""
    names = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
    return next((name for name in names if getattr(mpi_ops, name) == op), f"op={op}")
