"""The scale of fp16 compression, by formula."""

from __future__ import annotations

import math

import pytest
import tensorflow as tf

from hvdkit.tensorflow.compression import Compressor, fp16_scales


@pytest.mark.parametrize("magnitude", [4e4, 2e-8, 1.0, 65504.0, 3.0e38, 1e-45, 2.0**15, 2.0**-14])
@pytest.mark.parametrize("ranks", [1, 2, 3, 1024, 4096])
def test_sums_fill_the_range_and_stay_below_its_end(magnitude: float, ranks: int) -> None:
    bound = magnitude * ranks
    (scale,) = fp16_scales(tf.constant([bound], tf.float64)).numpy().tolist()
    assert math.frexp(scale)[0] == 0.5
    assert bound * scale < 2**15
    assert bound * scale >= 2**14 or scale == 2.0**100


@pytest.mark.parametrize("bound", [float("inf"), float("nan")])
def test_nothing_is_scaled_beside_what_is_not_finite(bound: float) -> None:
    assert fp16_scales(tf.constant([bound], tf.float64)).numpy().tolist() == [1.0]


def test_zero_has_a_finite_scale() -> None:
    assert fp16_scales(tf.constant([0.0], tf.float64)).numpy().tolist() == [2.0**100]


def test_the_interface_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match="compress"):
        Compressor.compress(tf.ones(1))
    with pytest.raises(NotImplementedError, match="decompress"):
        Compressor.decompress(tf.ones(1), None)
