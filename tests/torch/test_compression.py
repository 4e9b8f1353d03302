"""The fp16 scale, for any magnitude and number of ranks, against exact arithmetic."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.torch.compression import fp16_scales


def fp16_mean(gradients: torch.Tensor) -> torch.Tensor:
    """What the ranks compute, each addition rounded to fp16; one row for each rank."""
    ranks = gradients.shape[0]
    largest = gradients.abs().max().reshape(1)
    scale = fp16_scales(largest, ranks)
    total = torch.zeros(gradients.shape[1], dtype=torch.float16)
    for row in gradients:
        total = total + (row * scale).to(torch.float16)
    return total.float() / (scale * ranks)


@given(
    exponent=st.floats(-8, 6),
    ranks=st.sampled_from([1, 2, 3, 8, 100, 1024]),
    seed=st.integers(0, 1000),
)
def test_mean_is_within_the_documented_bound(exponent: float, ranks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(ranks, 16, generator=generator) * 10.0**exponent
    mean = fp16_mean(gradients)
    assert torch.isfinite(mean).all()
    exact = gradients.double().mean(0)
    largest = float(gradients.abs().max())
    bound = ranks * 2**-11 * gradients.double().abs().mean(0) + largest * ranks * 2**-38
    assert ((mean.double() - exact).abs() <= bound).all()


@given(magnitude=st.floats(1e-38, 1e38), ranks=st.integers(1, 1024))
def test_sum_cannot_overflow(magnitude: float, ranks: int) -> None:
    scale = float(fp16_scales(torch.tensor([magnitude]), ranks))
    assert magnitude * ranks * scale < 65504
    assert math.frexp(scale)[0] == 0.5


def test_gradients_of_a_thousand_ranks_do_not_vanish() -> None:
    for value in (1e-8, 6e-8, 1e-4, 1.0, 1e6):
        mean = fp16_mean(torch.full((1024, 1), value))
        assert math.isclose(float(mean), value, rel_tol=0.1)  # 1023 roundings in a row


def test_values_that_are_not_finite_keep_a_scale_of_one() -> None:
    scales = fp16_scales(torch.tensor([math.inf, 0.0, 1.0]), 2)
    assert scales.tolist() == [1.0, 2.0**15, 2.0**13]
