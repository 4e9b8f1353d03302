"""Every scheduler under scaling and warmup, step by step, and what resumes."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from hvdkit.scaling import ScalingRecord, warmup_multiplier
from hvdkit.torch.schedule import (
    LrControl,
    control_lr,
    effective_lrs,
    lr_control_of,
    reattach,
)

RECORD = ScalingRecord("linear", 32, 128)
WARMUP, STEPS = 6, 24

Scheduler = Any
BUILDERS: dict[str, Callable[[torch.optim.Optimizer], Scheduler]] = {
    "none": lambda o: None,
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.95),
    "StepLR": lambda o: schedulers.StepLR(o, 5, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [3, 8, 15], 0.3),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 7),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, 1.0, 9),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 20, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10, eta_min=0.01),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(
        o, 5, 2, eta_min=0.01
    ),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.2, step_size_up=4),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.3, total_steps=STEPS + 1),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.LinearLR(o, 0.5, total_iters=4), schedulers.CosineAnnealingLR(o, 10)],
        [4],
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 4), schedulers.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1, min_lr=0.01),
}


def make_optimizer(kind: str = "float") -> torch.optim.SGD:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    rate: Any = torch.tensor(0.1) if kind == "tensor" else 0.1
    groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:]}]
    if kind != "tensor":
        groups[1]["lr"] = 0.02
    return torch.optim.SGD(groups, lr=rate, momentum=0.5, foreach=False)


def step(optimizer: torch.optim.Optimizer, seen: list[list[float]]) -> None:
    """One optimizer step that notes the rates which the step itself saw."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.ones_like(weight)
    handle = optimizer.register_step_pre_hook(
        lambda o, a, k: seen.append([float(group["lr"]) for group in o.param_groups])
    )
    optimizer.step()
    handle.remove()


def advance(scheduler: Scheduler, number: int) -> None:
    if isinstance(scheduler, schedulers.ReduceLROnPlateau):
        scheduler.step(1.0 + number)  # ever worse
    elif scheduler is not None:
        scheduler.step()


def run(
    optimizer: torch.optim.Optimizer, scheduler: Scheduler, first: int, last: int, every: int = 1
) -> list[list[float]]:
    seen: list[list[float]] = []
    for number in range(first, last):
        step(optimizer, seen)
        if (number + 1) % every == 0:
            advance(scheduler, number)
    return seen


def expected(curve: list[list[float]], factor: float = 4.0, start: float = 0.25) -> Any:
    return [
        pytest.approx([rate * factor * warmup_multiplier(number, WARMUP, start) for rate in rates])
        for number, rates in enumerate(curve)
    ]


def test_every_scheduler_of_torch_is_tested() -> None:
    known = {
        name
        for name, found in vars(schedulers).items()
        if isinstance(found, type)
        and issubclass(found, schedulers.LRScheduler)
        and name not in ("LRScheduler", "_LRScheduler")
    }
    assert known == set(BUILDERS) - {"none"}


@pytest.mark.parametrize("kind", ["float", "tensor"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("name", BUILDERS)
def test_curve_is_the_scheduler_s_own_times_the_factor(
    name: str, built: str, every: int, kind: str
) -> None:
    reference = make_optimizer(kind)
    curve = run(reference, BUILDERS[name](reference), 0, STEPS, every)
    optimizer = make_optimizer(kind)
    scheduler = BUILDERS[name](optimizer) if built == "before" else None
    control_lr(optimizer, RECORD, WARMUP)
    if built == "after":
        scheduler = BUILDERS[name](optimizer)
    assert run(optimizer, scheduler, 0, STEPS, every) == expected(curve)
    # Outside the step everything reads as in the script without hvdkit, momentum too.
    for mine, theirs in zip(optimizer.param_groups, reference.param_groups, strict=True):
        assert float(mine["lr"]) == float(theirs["lr"])
        assert mine["momentum"] == theirs["momentum"]
    if scheduler is not None:
        assert [float(rate) for rate in scheduler.get_last_lr()] == [
            float(group["lr"]) for group in reference.param_groups
        ]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("load_first", [False, True])
def test_a_resume_in_the_middle_gives_the_same_curve(name: str, load_first: bool) -> None:
    def start() -> tuple[torch.optim.Optimizer, Scheduler]:
        optimizer = make_optimizer()
        return optimizer, BUILDERS[name](optimizer)

    whole, scheduler = start()
    control_lr(whole, RECORD, WARMUP)
    curve = run(whole, scheduler, 0, STEPS)

    first, scheduler = start()
    control_lr(first, RECORD, WARMUP)
    begun = run(first, scheduler, 0, 3)
    file = io.BytesIO()
    state = {"optimizer": first.state_dict(), "scheduler": scheduler and scheduler.state_dict()}
    torch.save(state, file)
    run(first, scheduler, 3, 5)  # must not reach what was saved
    file.seek(0)
    loaded = torch.load(file, weights_only=name != "LambdaLR")

    second, scheduler = start()
    if not load_first:
        control_lr(second, RECORD, WARMUP)
    if scheduler is not None:
        scheduler.load_state_dict(loaded["scheduler"])
    second.load_state_dict(loaded["optimizer"])
    if load_first:
        control_lr(second, RECORD, WARMUP)
    assert begun + run(second, scheduler, 3, STEPS) == [pytest.approx(rates) for rates in curve]


def test_a_state_dict_in_memory_does_not_go_on_counting() -> None:
    optimizer = make_optimizer()
    control = control_lr(optimizer, RECORD, WARMUP)
    state = optimizer.state_dict()
    run(optimizer, None, 0, 2)
    assert state["param_groups"][0]["hvdkit_lr"]["steps_done"] == 0
    assert control.state_dict()["steps_done"] == 2


def test_a_job_of_another_size_resumes_with_its_own_factor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = make_optimizer()
    control_lr(first, RECORD, WARMUP)
    run(first, None, 0, STEPS)
    second = make_optimizer()
    control = control_lr(second, ScalingRecord("linear", 32, 64), WARMUP)
    with caplog.at_level(logging.WARNING):
        second.load_state_dict(first.state_dict())
    assert "other learning rate settings" in caplog.text
    assert control.steps_done == STEPS
    assert run(second, None, 0, 1) == [pytest.approx([0.2, 0.04])]


def test_checkpoints_go_to_and_from_plain_torch() -> None:
    scaled, plain = make_optimizer(), make_optimizer()
    control = control_lr(scaled, RECORD, WARMUP)
    run(scaled, None, 0, 3)
    plain.load_state_dict(copy.deepcopy(scaled.state_dict()))
    assert run(plain, None, 0, 1) == [[0.1, 0.02]]
    fresh = make_optimizer()
    run(fresh, None, 0, 3)
    scaled.load_state_dict(fresh.state_dict())
    assert control.steps_done == 0
    assert run(scaled, None, 0, 1) == expected([[0.1, 0.02]])


def test_a_second_application_is_refused() -> None:
    optimizer = make_optimizer()
    control_lr(optimizer, RECORD)
    with pytest.raises(ValueError, match="scaled by 4"):
        control_lr(optimizer, RECORD)
    optimizer = make_optimizer()
    control_lr(optimizer, warmup_steps=2)
    with pytest.raises(ValueError, match="without warmup"):
        control_lr(optimizer, RECORD)


def test_groups_added_late_are_scaled_too() -> None:
    optimizer = make_optimizer()
    control_lr(optimizer, RECORD, WARMUP)
    run(optimizer, None, 0, 2)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.5})
    factor = 4 * warmup_multiplier(2, WARMUP, 0.25)
    rates = [0.1 * factor, 0.02 * factor, 0.5 * factor]
    assert effective_lrs(optimizer) == pytest.approx(rates)
    assert run(optimizer, None, 0, 1) == [pytest.approx(rates)]


def test_groups_that_share_a_tensor_are_multiplied_once() -> None:
    rate = torch.tensor(0.1)
    optimizer = make_optimizer()
    for group in optimizer.param_groups:
        group["lr"] = rate
    control_lr(optimizer, RECORD)
    assert run(optimizer, None, 0, 2) == [pytest.approx([0.4, 0.4])] * 2
    assert optimizer.param_groups[1]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_a_step_that_fails_leaves_no_factor_behind(kind: str) -> None:
    optimizer = make_optimizer(kind)
    control = control_lr(optimizer, RECORD, WARMUP)
    own = [float(group["lr"]) for group in optimizer.param_groups]

    def closure() -> float:
        raise RuntimeError("the batch is broken")

    for _ in range(2):  # the second one must not multiply what the first one left
        with pytest.raises(RuntimeError, match="batch is broken"):
            optimizer.step(closure)
    assert control.steps_done == 0
    assert effective_lrs(optimizer) == pytest.approx([rate * control.factor for rate in own])
    assert [float(group["lr"]) for group in optimizer.param_groups] == own
    with pytest.raises(RuntimeError, match="batch is broken"):
        optimizer.step(closure)
    saved = optimizer.state_dict()["param_groups"]
    assert [float(group["lr"]) for group in saved] == own
    assert run(optimizer, None, 0, 1) == [
        pytest.approx([rate * control.scale * 0.375 for rate in own])
    ]


def test_lbfgs_counts_steps_and_not_evaluations() -> None:
    weight = torch.nn.Parameter(torch.tensor([4.0, -3.0]))
    optimizer = torch.optim.LBFGS([weight], lr=0.1, max_iter=5)
    control = control_lr(optimizer, RECORD, WARMUP)
    rates = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**4).sum()
        loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        return loss

    optimizer.step(closure)
    assert len(rates) > 1
    assert rates == [pytest.approx(0.1 * 4 * 0.375)] * len(rates)
    assert control.steps_done == 1


def test_copies_are_reattached_and_removal_ends_it() -> None:
    optimizer = make_optimizer()
    control = control_lr(optimizer, RECORD, WARMUP)
    run(optimizer, None, 0, 2)
    twin = copy.deepcopy(optimizer)
    assert lr_control_of(twin) is None
    assert isinstance(reattach(twin), LrControl)
    assert effective_lrs(twin) == effective_lrs(optimizer)
    assert reattach(make_optimizer()) is None
    control.remove()
    assert run(optimizer, None, 0, 1) == [[0.1, 0.02]]
    assert "hvdkit_lr" not in optimizer.param_groups[0]


def test_separate_state_is_taken_up() -> None:
    first, second = make_optimizer(), make_optimizer()
    control = control_lr(first, RECORD, WARMUP)
    run(first, None, 0, 3)
    resumed = control_lr(second, RECORD, WARMUP)
    resumed.load_state_dict(control.state_dict())
    assert resumed.state_dict() == control.state_dict()
    with pytest.raises(ValueError, match="steps_done"):
        resumed.load_state_dict({})


def test_scaler_that_skips_a_step_does_not_advance_the_warmup() -> None:
    optimizer = make_optimizer()
    control = control_lr(optimizer, RECORD, WARMUP)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for value, done in ((1.0, 1), (float("inf"), 1), (1.0, 2)):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = torch.full_like(weight, value)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert control.steps_done == done


def _has_proportional_steps(make: Callable[[list[Any]], torch.optim.Optimizer]) -> bool:
    """Whether a changed rate multiplies the very next step, as no buffer holds the old one."""
    torch.manual_seed(0)
    deltas = []
    for factor in (1.0, 4.0):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3))
        optimizer = make([weight])
        for number in range(5):
            # What only a change of rate may alter: the same weights and gradients both times.
            before = weight.detach().clone()
            weight.grad = torch.cos(torch.arange(6.0, dtype=torch.float64) + number).reshape(2, 3)
            if number == 4:
                optimizer.param_groups[0]["lr"] *= factor
            optimizer.step()
        deltas.append(weight.detach() - before)
    return torch.allclose(deltas[0] * 4, deltas[1], rtol=1e-6, atol=1e-12)


OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3, lr_decay=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "Muon": lambda p: torch.optim.Muon(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-3),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


def test_every_optimizer_of_torch_is_classified() -> None:
    # LBFGS keeps no momentum; SparseAdam is Adam over the rows that have gradients.
    known = {
        name
        for name, found in vars(torch.optim).items()
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    }
    assert known - {"Optimizer", "LBFGS", "SparseAdam"} == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_s_buffers_do_not_hold_the_rate(name: str) -> None:
    assert _has_proportional_steps(OPTIMIZERS[name]) == (name not in ("ASGD", "Rprop"))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_warmup_warns_where_the_rate_is_in_the_state(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(2, 2))])
    with caplog.at_level(logging.WARNING):
        control_lr(optimizer, RECORD, WARMUP)
    assert ("step size of its own" in caplog.text) == (name in ("ASGD", "Rprop"))


@pytest.mark.parametrize(
    ("options", "named"),
    [({"warmup_steps": -1}, "warmup_steps"), ({"start_multiplier": 2}, "start")],
)
def test_wrong_options_are_named(options: dict[str, Any], named: str) -> None:
    optimizer = make_optimizer()
    with pytest.raises(ValueError, match=named):
        control_lr(optimizer, RECORD, **options)
    assert lr_control_of(optimizer) is None


def test_no_scheduler_warns_of_a_wrong_order() -> None:
    optimizer = make_optimizer()
    control_lr(optimizer, RECORD, WARMUP)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(optimizer, schedulers.StepLR(optimizer, 2), 0, 3)
