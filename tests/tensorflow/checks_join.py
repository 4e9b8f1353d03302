"""Checks of ranks that run out of data before others; see tests.ranks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf


def check_joined_ranks_weigh_nothing(hvd):
    """Rank r makes r + 1 steps; each mean is that of the ranks which still run."""
    rank, size = hvd.rank(), hvd.size()
    compressions = (hvd.Compression.none, hvd.Compression.fp16)
    for step in range(rank + 1):
        active = list(range(step, size))
        for compression in compressions:
            mean = hvd.allreduce(tf.constant([float(rank)]), compression=compression)
            np.testing.assert_allclose(mean, [np.mean(active)], rtol=1e-3)
        total = hvd.allreduce(tf.constant([rank]), op=hvd.Sum)
        assert total.numpy().tolist() == [sum(active)]
        rounded = hvd.allreduce(tf.constant([4 * rank]))
        assert rounded.numpy().tolist() == [round(4 * float(np.mean(active)))]
        half = hvd.allreduce(tf.constant([6e4], tf.float16))
        assert half.numpy().tolist() == tf.constant([6e4], tf.float16).numpy().tolist()
    assert int(hvd.join()) == size - 1


def check_a_tape_leaves_joined_ranks_out(hvd):
    rank, size = hvd.rank(), hvd.size()
    weight = tf.Variable([2.0], dtype=tf.float64)

    def slope(factor):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * factor)
        return hvd.DistributedGradientTape(tape).gradient(loss, [weight])[0]

    compiled = tf.function(slope)
    for step in range(rank + 1):
        mean = np.mean(range(step, size))
        for function in (slope, compiled):
            gradient = function(tf.constant([float(rank)], tf.float64))
            np.testing.assert_allclose(gradient, [mean], rtol=1e-12)
    hvd.join()


def check_what_zeros_would_spoil_is_an_error(hvd):
    if hvd.rank() != 0:
        for op in (hvd.Min, hvd.Max, hvd.Product):
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"called hvd\.join"):
                hvd.allreduce(tf.constant([5.0]), op=op)
        with pytest.raises(tf.errors.OpError):
            hvd.allgather(tf.constant([5.0]))
    hvd.join()
    assert hvd.allreduce(tf.constant([5.0]), op=hvd.Min).numpy().tolist() == [5.0]
