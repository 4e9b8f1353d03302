"""What the step-time benchmarks share: their options, and the interval of a median of ratios."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median, by resampling (Efron 1979)."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


def parser_of(description: str | None, models: Iterable[str]) -> argparse.ArgumentParser:
    """The options of a benchmark whose variants take turns in one job."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(models), default=list(models))
    parser.add_argument("--rounds", type=_positive, default=40, help="turns of each variant")
    parser.add_argument("--steps", type=_positive, default=8, help="steps of a turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {number}.")
    return number
