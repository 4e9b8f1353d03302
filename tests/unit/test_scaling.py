"""Scaling rules, the whole warmup curve, and momentum correction."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit import scaling

BATCHES = st.integers(1, 10**6)


@given(BATCHES, BATCHES)
def test_rules_follow_the_ratio_of_global_batches(base: int, batch: int) -> None:
    ratio = batch / base
    assert scaling.scale_factor(base, batch) == ratio
    assert scaling.scale_factor(base, batch, "sqrt") ** 2 == pytest.approx(ratio)
    assert scaling.scale_factor(base, batch, "none") == 1.0
    assert scaling.scale_lr(0.1, base, batch) == 0.1 * ratio


def test_wrong_rule_lists_the_legal_ones() -> None:
    with pytest.raises(ValueError, match=r"linear, sqrt, none\. Received: rule='cubic'"):
        scaling.scale_factor(1, 2, "cubic")


@pytest.mark.parametrize("batch", [0, -1, 1.5, True, "8"])
def test_a_batch_is_a_positive_whole_number(batch: object) -> None:
    with pytest.raises(ValueError, match="global_batch"):
        scaling.scale_factor(8, batch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="base_global_batch"):
        scaling.scale_factor(batch, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf")])
def test_a_base_lr_is_finite(lr: float) -> None:
    with pytest.raises(ValueError, match="base_lr"):
        scaling.scale_lr(lr, 1, 2)


@given(st.sampled_from(scaling.RULES), BATCHES, BATCHES)
def test_a_record_survives_json(rule: str, base: int, batch: int) -> None:
    record = scaling.ScalingRecord(rule, base, batch)
    assert scaling.ScalingRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_a_record_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="global_batch"):
        scaling.ScalingRecord.from_dict({"rule": "linear"})
    with pytest.raises(ValueError, match="linear, sqrt, none"):
        scaling.ScalingRecord("cubic", 1, 1)


def test_a_second_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scaled by 4 .*32 -> 128.*Fix"):
        scaling.check_unscaled(scaling.ScalingRecord("linear", 32, 128))


@pytest.mark.parametrize("size", [1, 2, 4, 1024])
@pytest.mark.parametrize(("steps_per_epoch", "warmup_epochs"), [(10, 5), (7, 1), (1, 3), (13, 2)])
def test_the_whole_curve_is_the_published_one(
    size: int, steps_per_epoch: int, warmup_epochs: int
) -> None:
    warmup_steps = steps_per_epoch * warmup_epochs
    start = scaling.warmup_start(size)
    for step in range(warmup_steps + 5):
        epochs = min((step + 1) / steps_per_epoch, warmup_epochs)  # at the end of the batch
        published = 1 / size * (1 + epochs * (size - 1) / warmup_epochs)
        assert scaling.warmup_multiplier(step, warmup_steps, start) == pytest.approx(
            published, abs=1e-12
        )


@given(st.integers(0, 500), st.floats(0, 1))
def test_warmup_rises_evenly_and_ends_exactly(warmup_steps: int, start: float) -> None:
    curve = [scaling.warmup_multiplier(step, warmup_steps, start) for step in range(510)]
    assert all(before <= after for before, after in itertools.pairwise(curve))
    assert all(value == 1.0 for value in curve[max(warmup_steps - 1, 0) :])
    if warmup_steps > 1:
        assert curve[0] == pytest.approx(start + (1 - start) / warmup_steps)
        assert curve[0] > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((-1, 4), "step"), ((0, -1), "warmup_steps"), ((0, 2.5), "warmup_steps"),
     ((0, 4, 1.1), "start"), ((0, 4, -0.1), "start"), ((0, 4, float("nan")), "start")],
)  # fmt: skip
def test_wrong_warmups_are_named(arguments: tuple[float, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        scaling.warmup_multiplier(*arguments)  # type: ignore[arg-type]


def test_a_smaller_batch_needs_no_warmup() -> None:
    assert scaling.warmup_start(0.25) == 1.0
    with pytest.raises(ValueError, match="factor"):
        scaling.warmup_start(0)


@given(st.lists(st.floats(1e-3, 10), min_size=2, max_size=8), st.floats(0, 0.99))
def test_corrected_velocity_equals_the_form_without_lr_in_it(
    rates: list[float], momentum: float
) -> None:
    gradients = [1.0, -0.5, 2.0, 0.25, -1.0, 0.75, 3.0, -2.0]
    buffer = velocity = plain = corrected = 0.0
    previous = rates[0]
    for lr, gradient in zip(rates, gradients, strict=False):
        buffer = momentum * buffer + gradient
        plain -= lr * buffer
        velocity = scaling.momentum_correction(previous, lr, momentum) * velocity - lr * gradient
        corrected += velocity
        previous = lr
    assert corrected == pytest.approx(plain, rel=1e-9, abs=1e-9)


def test_only_velocities_are_corrected() -> None:
    assert scaling.needs_momentum_correction("keras", "SGD")
    assert scaling.needs_momentum_correction("keras", "RMSprop")
    assert not scaling.needs_momentum_correction("keras", "Adam")
    assert not scaling.needs_momentum_correction("torch", "SGD")
    assert scaling.buffer_kind("torch", "Rprop") == scaling.STEP_SIZE
    with pytest.raises(ValueError, match="torch, keras"):
        scaling.needs_momentum_correction("jax", "SGD")


def test_correction_after_a_rate_of_zero_keeps_the_momentum() -> None:
    assert scaling.momentum_correction(0.0, 0.1, 0.9) == 0.9
    with pytest.raises(ValueError, match="previous_lr"):
        scaling.momentum_correction(-1, 0.1, 0.9)
