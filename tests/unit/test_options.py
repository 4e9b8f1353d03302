"""The options that the adapters share."""

from __future__ import annotations

from typing import Any

import pytest

from hvdkit.options import (
    check_options,
    check_predivide,
    chosen_compression,
    scaling_record,
    start_multiplier,
    summary_of,
)

RIGHT: dict[str, Any] = {
    "scale_lr": "linear",
    "warmup_steps": 10,
    "warmup_start": "base",
    "accumulate": 1,
    "weighting": "samples",
    "max_grad_norm": None,
}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("scale_lr", "cubic", "'linear', 'sqrt', 'none'"),
        ("warmup_start", "half", "'base', 'zero'"),
        ("weighting", "bytes", "'samples', 'ranks'"),
        ("accumulate", 0, "whole number >= 1"),
        ("accumulate", True, "whole number >= 1"),
        ("warmup_steps", -1, "whole number of steps >= 0"),
        ("max_grad_norm", 0.0, "finite and > 0, or None"),
        ("max_grad_norm", "1", "finite and > 0, or None"),
    ],
)
def test_a_wrong_option_is_said(name: str, value: Any, expected: str) -> None:
    check_options(**RIGHT)
    with pytest.raises(ValueError, match="Expected .*" + expected) as error:
        check_options(**{**RIGHT, name: value})
    assert f"{name}={value!r}" in str(error.value)


@pytest.mark.parametrize("factor", [0, 0.0, -1.0, float("nan"), float("inf"), "2", None])
def test_a_factor_that_cannot_be_divided_by_is_said(factor: Any) -> None:
    check_predivide(2, op=0, average=0)
    with pytest.raises(ValueError, match="gradient_predivide_factor to be finite and > 0"):
        check_predivide(factor, op=0, average=0)


def test_a_factor_goes_with_averages_only() -> None:
    check_predivide(1.0, op=1, average=0)
    with pytest.raises(ValueError, match=r"needs op=Average\. Received: .*=2\.0, op=1"):
        check_predivide(2.0, op=1, average=0)


def test_compression_by_name_or_class() -> None:
    class Own:
        compress = decompress = None

    assert chosen_compression("fp16", {"none": 1, "fp16": 2}) == 2
    assert chosen_compression(Own, {}) is Own
    with pytest.raises(ValueError, match=r"one of 'none', 'fp16'\. Received: compression='int8'"):
        chosen_compression("int8", {"none": 1, "fp16": 2})
    with pytest.raises(ValueError, match="or a class with compress and decompress"):
        chosen_compression(3, {"none": 1})


def test_the_scaling_is_the_ratio_of_global_batches() -> None:
    assert scaling_record("linear", None, None, accumulate=2, size=4).factor == 8
    assert scaling_record("linear", 256, 64, accumulate=1, size=8).factor == 2
    with pytest.raises(ValueError, match="base_global_batch and batch_size together"):
        scaling_record("linear", 256, None, accumulate=1, size=8)


def test_the_warmup_begins_at_the_base_rate_or_at_zero() -> None:
    record = scaling_record("linear", None, None, accumulate=1, size=4)
    assert start_multiplier(record, "base") == 0.25
    assert start_multiplier(record, "zero") == 0.0


def test_the_summary() -> None:
    record = scaling_record("linear", 256, 64, accumulate=1, size=8)
    assert summary_of([0.1, 0.1], record, 5, dict, 1, "samples", 8) == (
        "hvdkit: 8 ranks, global batch 512 samples (rate chosen for 256), accumulation 1\n"
        "hvdkit: learning rate 0.1 -> 0.2 (linear), warmup 5 steps\n"
        "hvdkit: compression dict, gradients weighted by samples"
    )
