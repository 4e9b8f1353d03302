"""16-bit gradient compression that neither overflows nor loses small gradients.

Horovod's own fp16 compression casts and then sums, so gradients of 4e4 on two ranks become inf,
although their mean fits, and gradients of 2e-8 become 0. Here each tensor is brought into the
middle of the 16-bit range first, by a power of two that all ranks agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.compressor import (
    FP16_HEADROOM_EXPONENT,
    SCALE_EXPONENTS,
    Compressor,
    NoneCompressor,
)
from hvdkit.tensorflow.backend import mpi_ops
from hvdkit.tensorflow.values import live, ranks_of, settled
from hvdkit.tensorflow.wire import op_name


def _cast(tensor: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.DType]:
    return (tf.cast(tensor, dtype) if tensor.dtype.is_floating else tensor), tensor.dtype


class FP16Compressor(Compressor):
    """Halves the traffic of float32 gradients; ranks agree on a power of two per tensor first.

    With `B` the sum over ranks of each rank's largest magnitude, rounded up to a power of two,
    the scale `s` is the largest power of two with ``B * s < 2**15``: no partial sum can overflow,
    whatever the order of the sum. The mean of finite gradients is therefore finite for any number
    of ranks. Its error is at most ``R * 2**-11 * mean(|g|)`` from rounding each addend and partial
    sum on `R` ranks, plus ``B * 2**-38`` for elements so small beside the largest that fp16 holds
    them as subnormals. Infinities and NaN stay what they are, so that loss scaling sees them.

    ``compress`` and ``decompress`` alone only cast, as in ``horovod.tensorflow``; the scale needs
    the other ranks and is part of :meth:`reduce`.

    Example:
        >>> import tensorflow as tf
        >>> from hvdkit.tensorflow.compression import FP16Compressor
        >>> FP16Compressor.compress(tf.ones(1))[0].dtype.name
        'float16'
    """

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return _cast(tensor, tf.float16)

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return _cast(tensor, ctx)[0]

    @staticmethod
    def reduce(
        tensors: Sequence[tf.Tensor],
        name: str,
        op: int,
        prescale_factor: float,
        postscale_factor: float,
        process_set: Any,
        ignore_name_scope: bool = False,
    ) -> list[tf.Tensor]:
        """Sums or averages floating-point tensors of any shapes."""
        _check_op("fp16", op)
        keywords = {
            "op": mpi_ops.Sum,
            "process_set": process_set,
            "ignore_name_scope": ignore_name_scope,
        }
        # One more number counts the ranks that have not joined.
        bounds = tf.stack([*map(_power_above, tensors), tf.ones((), tf.float64)])
        agreed = mpi_ops._allreduce(live(bounds), name=f"{name}_bound", **keywords)
        scales = fp16_scales(settled(agreed)[:-1])
        wires = [
            live(tf.cast(wide * tf.cast(scales[index], wide.dtype), tf.float16))
            for index, wide in enumerate(map(_wide, tensors))
        ]
        if len(wires) == 1:
            reduced = [mpi_ops._allreduce(wires[0], name=f"{name}_fp16", **keywords)]
        else:
            reduced = mpi_ops._grouped_allreduce(wires, name=f"{name}_fp16", **keywords)
        addends = agreed[-1] if op == mpi_ops.Average else tf.ones((), tf.float64)
        factor = prescale_factor * postscale_factor / addends
        results = []
        for index, (wire, tensor) in enumerate(zip(settled(reduced), tensors, strict=True)):
            wide = tf.cast(wire, _wide(tensor).dtype)
            result = wide * tf.cast(factor / scales[index], wide.dtype)
            results.append(tf.cast(result, tensor.dtype))
        return results


class BF16Compressor(Compressor):
    """Halves the traffic of float32 gradients; keeps float32's range and 8 bits of precision.

    Horovod cannot add bfloat16, so each rank receives its share of every rank's gradient
    (alltoall), adds it in float32, and sends the rounded result to all (allgather): the traffic
    of a 16-bit allreduce. The error of the mean is at most ``2**-9 * mean(|g|)`` plus
    ``2**-9 * |mean(g)|``, whatever the number of ranks. Horovod's ``join`` knows neither
    operation, so jobs that use ``join`` need ``Compression.none`` or ``Compression.fp16``.

    Example:
        >>> import tensorflow as tf
        >>> from hvdkit.tensorflow.compression import BF16Compressor
        >>> BF16Compressor.compress(tf.ones(1))[0].dtype.name
        'bfloat16'
    """

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return _cast(tensor, tf.bfloat16)

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return _cast(tensor, ctx)[0]

    @staticmethod
    def reduce(
        tensors: Sequence[tf.Tensor],
        name: str,
        op: int,
        prescale_factor: float,
        postscale_factor: float,
        process_set: Any,
        ignore_name_scope: bool = False,
    ) -> list[tf.Tensor]:
        """Sums or averages floating-point tensors of any shapes."""
        _check_op("bf16", op)
        keywords = {"process_set": process_set, "ignore_name_scope": ignore_name_scope}
        ranks = tf.cast(ranks_of(process_set), tf.int32)
        flat = tf.concat([tf.reshape(tf.cast(t, tf.bfloat16), [-1]) for t in tensors], 0)
        count = tf.size(flat)
        share = (count + ranks - 1) // ranks
        padded = tf.pad(flat, [[0, share * ranks - count]])
        # Horovod moves 16-bit integers; the bits are those of the bfloat16 numbers. It does not see
        # the tensors' shapes, so each share has a header that tells them.
        header = tf.bitcast(_shapes_digest(tensors), tf.int16)
        shares = tf.reshape(tf.bitcast(padded, tf.int16), [ranks, share])
        sent = tf.concat([tf.tile(header[tf.newaxis], [ranks, 1]), shares], 1)
        received = settled(
            mpi_ops.alltoall(live(tf.reshape(sent, [-1])), name=f"{name}_bf16_scatter", **keywords)
        )
        with tf.control_dependencies([_assert_same_size(received, sent)]):
            rows = tf.reshape(received, tf.shape(sent))
        with tf.control_dependencies([_assert_same_shapes(rows[:, :_HEADER], header)]):
            addends = tf.bitcast(rows[:, _HEADER:], tf.bfloat16)
        total = tf.reduce_sum(tf.cast(addends, tf.float32), 0)
        if op == mpi_ops.Average:
            total /= tf.cast(ranks, tf.float32)
        total *= prescale_factor * postscale_factor
        gathered = mpi_ops.allgather(
            live(tf.bitcast(tf.cast(total, tf.bfloat16), tf.int16)),
            name=f"{name}_bf16_gather",
            **keywords,
        )
        whole = tf.bitcast(settled(gathered), tf.bfloat16)[:count]
        parts = tf.split(whole, [tf.size(tensor) for tensor in tensors])
        return [
            tf.cast(tf.reshape(part, tf.shape(tensor)), tensor.dtype)
            for part, tensor in zip(parts, tensors, strict=True)
        ]


class Compression:
    """The compressions to choose from: ``Compression.none``, ``.fp16``, ``.bf16``.

    Example:
        >>> from hvdkit.tensorflow.compression import Compression
        >>> Compression.fp16.__name__
        'FP16Compressor'
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def fp16_scales(bounds: tf.Tensor) -> tf.Tensor:
    """The power of two by which each tensor is multiplied before it becomes fp16.

    Args:
        bounds: A bound of every partial sum of each tensor, float64, shape ``(tensors,)``.

    Returns:
        Scales, float64, shape ``(tensors,)``; 1 where the bound is not finite.

    Example:
        >>> import tensorflow as tf
        >>> from hvdkit.tensorflow.compression import fp16_scales
        >>> fp16_scales(tf.constant([8e4], tf.float64)).numpy().tolist()
        [0.25]
    """
    exponents = FP16_HEADROOM_EXPONENT - _exponent(bounds)
    scales = _power_of_two(tf.clip_by_value(exponents, *SCALE_EXPONENTS))
    return tf.where(tf.math.is_finite(bounds), scales, tf.ones_like(scales))


def _exponent(numbers: tf.Tensor) -> tf.Tensor:
    """The `e` of ``number = m * 2**e`` with ``0.5 <= m < 1``, read from the bits; exact."""
    bits = tf.bitcast(tf.abs(numbers), tf.int64)
    return tf.bitwise.right_shift(bits, tf.constant(52, tf.int64)) - 1022


def _power_of_two(exponents: tf.Tensor) -> tf.Tensor:
    bits = tf.bitwise.left_shift(exponents + 1023, tf.constant(52, tf.int64))
    return tf.bitcast(bits, tf.float64)


def _power_above(tensor: tf.Tensor) -> tf.Tensor:
    """The power of two above the largest magnitude: ranks add such numbers without rounding.

    Rounded sums could differ by the order of their addends, and then the ranks' scales would.
    """
    largest = tf.cast(tf.reduce_max(tf.abs(tf.reshape(_wide(tensor), [-1]))), tf.float64)
    largest = tf.where(tf.size(tensor) > 0, largest, tf.zeros((), tf.float64))
    power = _power_of_two(tf.clip_by_value(_exponent(largest), -1022, 1023))
    # What is not finite says so to the scale; MPI need not hand on NaN.
    unknown = tf.constant(float("inf"), tf.float64)
    return tf.where(tf.math.is_finite(largest), power, unknown)


def _wide(tensor: tf.Tensor) -> tf.Tensor:
    return tensor if tensor.dtype in (tf.float32, tf.float64) else tf.cast(tensor, tf.float32)


_HEADER = 4
"""Elements of int16 that hold a digest of 64 bits."""

_SHAPES = "Expected tensors of the same shapes on all ranks, in the same order."


def _shapes_digest(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """A 64-bit number of the tensors' shapes, which are known only as the step runs."""
    sizes = [tf.concat([[tf.rank(tensor)], tf.shape(tensor)], 0) for tensor in tensors]
    text = tf.strings.reduce_join(tf.strings.as_string(tf.concat(sizes, 0)), separator=",")
    return tf.strings.to_hash_bucket_fast(text, 2**62)


def _assert_same_size(received: tf.Tensor, sent: tf.Tensor) -> Any:
    return tf.debugging.assert_equal(tf.size(received), tf.size(sent), _SHAPES)


def _assert_same_shapes(headers: tf.Tensor, header: tf.Tensor) -> Any:
    return tf.debugging.Assert(tf.reduce_all(tf.equal(headers, header)), [_SHAPES])


def _check_op(name: str, op: int) -> None:
    if op not in (mpi_ops.Average, mpi_ops.Sum):
        raise ValueError(
            f"Compression.{name} supports op=Average and op=Sum. Received: op={op_name(op)}. "
            "Fix: use Compression.none."
        )
