"""One plateau decision for all ranks, against an injected mean."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from hvdkit.torch.schedule import synchronized_plateau


def make_plateau(**options: object) -> ReduceLROnPlateau:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return ReduceLROnPlateau(optimizer, patience=0, factor=0.5, **options)  # type: ignore[arg-type]


def test_ranks_with_different_metrics_decide_alike() -> None:
    metrics = [[3.0, 1.0], [2.0, 2.0], [1.0, 4.0], [0.5, 4.0], [0.5, 0.5]]
    weights = [100.0, 10.0]
    means = [sum(m * w for m, w in zip(row, weights, strict=True)) / 110 for row in metrics]
    reference = make_plateau()
    curve = []
    for mean in means:
        reference.step(mean)
        curve.append(reference.get_last_lr())

    for rank in range(2):
        asked: list[tuple[float, float]] = []
        remaining = iter(means)

        def average(metric: float, weight: float) -> float:
            asked.append((metric, weight))  # noqa: B023 - called within this turn only
            return next(remaining)  # noqa: B023

        plateau = synchronized_plateau(make_plateau(), average)
        mine = []
        for row in metrics:
            plateau.step(torch.tensor(row[rank]), weight=weights[rank])
            mine.append(plateau.get_last_lr())
        assert mine == curve
        assert asked == [(row[rank], weights[rank]) for row in metrics]


def test_it_stays_the_same_object_class_and_state() -> None:
    plain = make_plateau()
    keys = set(plain.state_dict())
    assert synchronized_plateau(plain, lambda metric, weight: metric) is plain
    assert isinstance(plain, ReduceLROnPlateau)
    assert type(plain).__name__ == "ReduceLROnPlateau"
    plain.step(2.0)
    assert set(plain.state_dict()) == keys | {"_last_lr"}
    twin = make_plateau()
    twin.load_state_dict(plain.state_dict())
    assert twin.best == 2.0


def test_two_times_or_on_another_scheduler_is_refused() -> None:
    plateau = synchronized_plateau(make_plateau(), lambda metric, weight: metric)
    with pytest.raises(ValueError, match="synchronized already"):
        synchronized_plateau(plateau, lambda metric, weight: metric)
    other = StepLR(plateau.optimizer, 1)
    with pytest.raises(ValueError, match="scheduler=StepLR"):
        synchronized_plateau(other, lambda metric, weight: metric)  # type: ignore[arg-type]
