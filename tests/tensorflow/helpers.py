"""What the checks of this folder share."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

INTEGERS = (tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.uint32, tf.int64)
FLOATS = (tf.bfloat16, tf.float16, tf.float32, tf.float64)


def everywhere(hvd, function):
    """`function(rank)` of all ranks."""
    return [function(rank) for rank in range(hvd.size())]


def both_ways(function, *arguments):
    """The results of a function that runs eagerly and one within tf.function."""
    return function(*arguments), tf.function(function)(*arguments)


def same(tensor, expected, dtype=None, rtol=None):
    """Equal values, up to the rounding of the dtype."""
    found = tf.as_dtype(tensor.dtype)
    assert dtype is None or found == dtype
    tolerance = rtol or {tf.float16: 1e-3, tf.bfloat16: 8e-3, tf.float32: 1e-6}.get(found, 1e-12)
    if found == tf.bfloat16:
        tensor = tf.cast(tensor, tf.float32)
    np.testing.assert_allclose(np.asarray(tensor), expected, rtol=tolerance)
