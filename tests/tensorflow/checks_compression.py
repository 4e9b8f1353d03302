"""Checks of compressed reductions on real ranks; see tests.ranks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops as horovod

from tests.tensorflow.helpers import both_ways, everywhere, same


def check_compressed_allreduce_is_differentiable(hvd):
    mean_weight = (hvd.size() + 1) / 2
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        value = tf.ones([3])
        with tf.GradientTape() as tape:
            tape.watch(value)
            y = tf.reduce_sum(hvd.allreduce(value, compression=compression) * (hvd.rank() + 1.0))
        np.testing.assert_allclose(tape.gradient(y, value), [mean_weight] * 3, rtol=1e-2)


def check_compression_neither_overflows_nor_vanishes(hvd):
    rank, size = hvd.rank(), hvd.size()
    raw = horovod._allreduce(tf.constant([4e4], tf.float16), name="raw", op=horovod.Average)
    assert np.isinf(raw.numpy()).all()
    for magnitude in (4e4, 2e-8, 1e30, 1e-30, 1.0):
        values = np.array([1.0, -0.5, rank / size], np.float32) * np.float32(magnitude)
        every = everywhere(
            hvd, lambda r, m=magnitude: np.array([1.0, -0.5, r / size], np.float32) * np.float32(m)
        )
        mean = np.mean(np.array(every, np.float64), 0)
        scale = np.mean(np.abs(np.array(every, np.float64)), 0)
        for compression, error in (("fp16", size * 2**-11), ("bf16", 2**-7)):
            for op, expected in ((hvd.Average, mean), (hvd.Sum, mean * size)):

                def reduce(x, compression=compression, op=op):
                    chosen = getattr(hvd.Compression, compression)
                    return hvd.allreduce(x, op=op, compression=chosen, name="c")

                allowed = (error * scale + magnitude * size * 2**-37) * (
                    size if op == hvd.Sum else 1
                )
                for result in both_ways(reduce, tf.constant(values)):
                    assert result.dtype == tf.float32
                    assert (np.abs(result.numpy() - expected) <= allowed).all(), (magnitude, op)


def check_compression_keeps_what_is_not_finite(hvd):
    value = tf.constant([float("inf") if hvd.rank() == 0 else 1.0, 2.0])
    bad = tf.constant([float("nan") if hvd.rank() == 0 else 1.0])
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        result = hvd.allreduce(value, compression=compression).numpy()
        assert np.isposinf(result[0])
        assert result[1] == 2.0
        assert np.isnan(hvd.allreduce(bad, compression=compression).numpy()).all()


def check_compression_takes_groups_and_other_dtypes(hvd):
    rank, mean = hvd.rank(), (hvd.size() - 1) / 2
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        group = [tf.fill([2, 3], float(rank)), tf.zeros([0, 2]), tf.cast([rank], tf.float64)]
        first, second, third = hvd.grouped_allreduce(group, compression=compression)
        same(first, np.full([2, 3], mean), tf.float32)
        assert second.shape == [0, 2]
        same(third, [mean], tf.float64)
        assert hvd.allreduce(tf.constant([rank]), compression=compression).dtype == tf.int32
        largest = hvd.allreduce(tf.constant([float(rank)]), op=hvd.Max, compression=compression)
        same(largest, [hvd.size() - 1])


def check_a_compression_of_ones_own_is_used(hvd):
    class Halve:
        @staticmethod
        def compress(tensor):
            return tensor / 2, tensor.dtype

        @staticmethod
        def decompress(tensor, ctx):
            assert ctx == tf.float32
            return tensor * 2

    same(hvd.allreduce(tf.constant([float(hvd.rank())]), compression=Halve), [(hvd.size() - 1) / 2])
