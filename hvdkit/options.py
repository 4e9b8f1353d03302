"""The options that the adapters share: their checks, and ``distribute``'s scaling and summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from hvdkit.scaling import RULES, ScalingRecord, check_warmup, warmup_start

WEIGHTINGS = ("samples", "ranks")
WARMUP_STARTS = ("base", "zero")


def check_options(
    *,
    scale_lr: str,
    warmup_steps: int,
    warmup_start: str,
    accumulate: int,
    weighting: str,
    max_grad_norm: float | None,
) -> None:
    """Raises ValueError, with the legal values, where an option of ``distribute`` is wrong."""
    check_choice("scale_lr", scale_lr, RULES)
    check_choice("warmup_start", warmup_start, WARMUP_STARTS)
    check_choice("weighting", weighting, WEIGHTINGS)
    check_whole("accumulate", accumulate, 1)
    check_warmup(warmup_steps, 0.0)
    _check_norm(max_grad_norm)


def _check_norm(max_grad_norm: Any) -> None:
    if max_grad_norm is None:
        return
    is_number = isinstance(max_grad_norm, Real) and math.isfinite(max_grad_norm)
    if not (is_number and max_grad_norm > 0):
        raise ValueError(
            f"Expected max_grad_norm to be finite and > 0, or None. Received: {max_grad_norm=}."
        )


def check_choice(name: str, value: Any, legal: Iterable[str]) -> None:
    """Raises ValueError where an option is not one of those listed."""
    if value not in legal:
        raise ValueError(
            f"Expected {name} to be one of {', '.join(map(repr, legal))}. Received: "
            f"{name}={value!r}."
        )


def check_whole(name: str, value: Any, minimum: int) -> None:
    """Raises ValueError where an option is no whole number, or too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(
            f"Expected {name} to be a whole number >= {minimum}. Received: {name}={value!r}."
        )


def check_predivide(factor: Any, op: int, average: int) -> None:
    """Raises ValueError where ``gradient_predivide_factor`` cannot be divided by, or not with `op`.

    Args:
        factor: The factor.
        op: The operation that it goes with.
        average: The adapter's ``Average``.
    """
    if not (isinstance(factor, (int, float)) and math.isfinite(factor) and factor > 0):
        raise ValueError(
            "Expected gradient_predivide_factor to be finite and > 0. Received: "
            f"gradient_predivide_factor={factor!r}."
        )
    if factor != 1.0 and op != average:
        raise ValueError(
            "gradient_predivide_factor needs op=Average. Received: "
            f"gradient_predivide_factor={factor}, op={op}."
        )


def chosen_compression(compression: Any, by_name: Mapping[str, Any]) -> Any:
    """The compression of that name, or the class that was given.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(compression, str):
        check_choice("compression", compression, by_name)
        return by_name[compression]
    if hasattr(compression, "compress") and hasattr(compression, "decompress"):
        return compression
    raise ValueError(
        f"Expected compression to be one of {', '.join(map(repr, by_name))}, or a class with "
        f"compress and decompress. Received: compression={compression!r}."
    )


def scaling_record(
    rule: str, base_global_batch: int | None, batch_size: int | None, accumulate: int, size: int
) -> ScalingRecord:
    """What the learning rate is scaled by, in a job of `size` ranks.

    Raises:
        ValueError: Only one of the two batch sizes was given, or one is wrong.

    Example:
        >>> scaling_record("linear", None, None, accumulate=2, size=4).factor
        8.0
    """
    if (base_global_batch is None) != (batch_size is None):
        raise ValueError(
            "Expected base_global_batch and batch_size together, or neither. Received: "
            f"{base_global_batch=}, {batch_size=}."
        )
    local = 1 if batch_size is None else batch_size
    check_whole("batch_size", local, 1)
    base = 1 if base_global_batch is None else base_global_batch
    return ScalingRecord(rule, base, local * accumulate * size)


def start_multiplier(record: ScalingRecord, start: str) -> float:
    """The multiplier of the scaled rate that a warmup of that name begins at."""
    return warmup_start(record.factor) if start == "base" else 0.0


def summary_of(
    rates: Iterable[float],
    record: ScalingRecord,
    warmup_steps: int,
    compression: Any,
    accumulate: int,
    weighting: str,
    size: int,
) -> str:
    """What ``distribute`` did, in three lines."""
    steps = ", ".join(f"{rate:g} -> {rate * record.factor:g}" for rate in sorted(set(rates)))
    if record.base_global_batch == 1:
        batch = f"{record.global_batch} x one rank's batch"
    else:
        batch = f"{record.global_batch} samples (rate chosen for {record.base_global_batch})"
    warmup = f"{warmup_steps} steps" if warmup_steps else "none"
    return (
        f"hvdkit: {size} ranks, global batch {batch}, accumulation {accumulate}\n"
        f"hvdkit: learning rate {steps} ({record.rule}), warmup {warmup}\n"
        f"hvdkit: compression {compression.__name__}, gradients weighted by {weighting}"
    )
