"""DistributedOptimizer on real ranks, each fault of Horovod 0.28.1 beside the right value."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from typing import Any

import horovod.torch as horovod
import pytest
import torch
from torch import nn

from hvdkit.errors import SynchronizationError


def raises(error: type[BaseException], text: str, function: Any, *args: Any) -> None:
    """Fails unless the call raises `error` with `text` in its message."""
    with pytest.raises(error, match=re.escape(text)):
        function(*args)


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def pull(weight: torch.Tensor, gradient: float) -> None:
    """A backward pass whose gradient is `gradient` for each element."""
    (weight * gradient).sum().backward()


def equal_on_all_ranks(hvd: Any, tensor: torch.Tensor) -> bool:
    gathered = hvd.allgather(tensor.detach().reshape(1, -1).contiguous(), name="check.equal")
    return bool((gathered == gathered[0]).all())


def mean_rank(hvd: Any) -> float:
    return (hvd.size() - 1) / 2


def check_same_object_class_and_names(hvd: Any) -> None:
    weight = parameter(1.0)
    raw = torch.optim.SGD([weight], lr=0.5)
    optimizer = hvd.DistributedOptimizer(raw)
    assert optimizer is raw
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert type(optimizer).__module__ == torch.optim.SGD.__module__
    raises(ValueError, "distributed already", hvd.DistributedOptimizer, optimizer)


def check_mean_of_gradients(hvd: Any) -> None:
    weight = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    pull(weight, float(hvd.rank()))
    optimizer.step()
    assert weight.item() == -mean_rank(hvd)


def check_state_is_kept(hvd: Any) -> None:
    weight = parameter(1.0)
    raw = torch.optim.Adam([weight], lr=0.1)
    pull(weight, 1.0)
    raw.step()
    optimizer = hvd.DistributedOptimizer(raw)
    assert len(optimizer.state) == 1
    assert optimizer.state[weight]["step"].item() == 1

    other = parameter(1.0)
    raw = torch.optim.Adam([other], lr=0.1)
    pull(other, 1.0)
    raw.step()
    assert len(horovod.DistributedOptimizer(raw).state) == 0


def check_new_group_has_defaults_and_is_reduced(hvd: Any) -> None:
    first, late = parameter(0.0), parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first], lr=0.5))
    optimizer.add_param_group({"params": [late]})
    assert optimizer.param_groups[1]["lr"] == 0.5
    for _ in range(2):
        optimizer.zero_grad()
        pull(first, 1.0)
        pull(late, float(hvd.rank()))
        optimizer.step()
    assert late.item() == -0.5 * 2 * mean_rank(hvd)

    other = horovod.DistributedOptimizer(torch.optim.SGD([parameter(0.0)], lr=0.5))
    other.add_param_group({"params": [parameter(0.0)]})
    assert other.param_groups[1]["lr"] == 0.001


def check_unfrozen_parameter_is_reduced(hvd: Any) -> None:
    weight, frozen = parameter(0.0), parameter(0.0)
    frozen.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, frozen], lr=1.0))
    pull(weight, 1.0)
    optimizer.step()
    assert frozen.grad is None
    frozen.requires_grad_(True)
    for step in (1, 2):
        optimizer.zero_grad()
        pull(weight, 1.0)
        pull(frozen, float(hvd.rank()))
        optimizer.step()
        assert frozen.item() == -step * mean_rank(hvd)


def check_unfrozen_within_a_window(hvd: Any) -> None:
    """Unfrozen after zero_grad: the hook comes too late for this step, the reduction does not."""
    weight, frozen = parameter(0.0), parameter(0.0)
    frozen.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, frozen], lr=1.0))
    optimizer.zero_grad()
    frozen.requires_grad_(True)
    pull(weight, 1.0)
    pull(frozen, float(hvd.rank()))
    optimizer.step()
    assert frozen.item() == -mean_rank(hvd)


def check_frozen_on_one_rank_only(hvd: Any) -> None:
    weight, other = parameter(0.0), parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, other], lr=1.0))
    if hvd.rank() == 0:
        other.requires_grad_(False)
    for _ in range(2):
        optimizer.zero_grad()
        pull(weight, 1.0)
        if hvd.rank() != 0:
            pull(other, 1.0)
        optimizer.step()
    assert equal_on_all_ranks(hvd, other)
    assert torch.isclose(other, torch.tensor(-2.0 * (hvd.size() - 1) / hvd.size())).all()


def check_scheduler_built_before_wrapping(hvd: Any) -> None:
    weight = parameter(0.0)
    raw = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(raw, step_size=1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(raw)
    optimizer.load_state_dict(optimizer.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for expected in (0.5, 0.25):
            optimizer.zero_grad()
            pull(weight, float(hvd.rank()))
            optimizer.step()
            scheduler.step()
            assert optimizer.param_groups[0]["lr"] == expected
    assert weight.item() == -1.5 * mean_rank(hvd)


def check_scheduler_built_after_wrapping(hvd: Any) -> None:
    weight = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pull(weight, float(hvd.rank()))
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert weight.item() == -mean_rank(hvd)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.optim.lr_scheduler.StepLR(
            hvd.DistributedOptimizer(torch.optim.SGD([parameter(0.0)], lr=1.0)), 1
        ).step()
    assert "before `optimizer.step()`" in str(caught[-1].message)


def check_zero_grad_forms(hvd: Any) -> None:
    weight = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for keywords in ({}, {"set_to_none": True}, {"set_to_none": False}):
        optimizer.zero_grad(**keywords)
        assert weight.grad is None or keywords == {"set_to_none": False}
        pull(weight, float(hvd.rank()))
        optimizer.step()
    assert weight.item() == -3 * mean_rank(hvd)


def check_gradients_that_no_step_uses(hvd: Any) -> None:
    """A generator's loss leaves gradients in the discriminator, which clears them."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        for model in (generator, discriminator)
    ]
    for _ in range(3):
        fake = generator(torch.randn(4, 2) + hvd.rank())
        optimizers[1].zero_grad()
        discriminator(fake.detach()).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-discriminator(fake).mean()).backward()
        optimizers[0].step()
    assert equal_on_all_ranks(hvd, generator.weight)
    assert equal_on_all_ranks(hvd, discriminator.weight)


def check_gradients_cleared_on_one_rank_only(hvd: Any) -> None:
    weight = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    pull(weight, 1.0)
    skip = optimizer.zero_grad if hvd.rank() == 0 else optimizer.step
    raises(SynchronizationError, f"1 of {hvd.size()} ranks cleared", skip)


def check_step_hooks_fire_once(hvd: Any) -> None:
    weight = parameter(0.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("before wrapping"))
    optimizer = hvd.DistributedOptimizer(optimizer)
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    for _ in range(2):
        pull(weight, 1.0)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert fired == ["before wrapping", "pre", "post"] * 2


def check_pre_hook_sees_reduced_gradients(hvd: Any) -> None:
    weight = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(weight.grad.item()))
    pull(weight, float(hvd.rank()))
    optimizer.step()
    assert seen == [mean_rank(hvd)]


def check_unused_on_some_ranks(hvd: Any) -> None:
    shared, only_last = parameter(0.0), parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([shared, only_last], lr=1.0))
    for step in (1, 2, 3):
        optimizer.zero_grad()
        pull(shared, 1.0)
        if hvd.rank() == hvd.size() - 1:
            pull(only_last, float(hvd.size()))
        optimizer.step()
        assert only_last.item() == -step, only_last


def check_different_parameters_on_each_rank(hvd: Any) -> None:
    weights = [parameter(0.0) for _ in range(hvd.size())]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0))
    for step in (1, 2):
        optimizer.zero_grad()
        pull(weights[hvd.rank()], float(hvd.size()))
        optimizer.step()
        assert [weight.item() for weight in weights] == [-step] * hvd.size()


def check_unused_everywhere_stays_none(hvd: Any) -> None:
    """One process skips it: no weight decay, no state. Zeros instead of None would decay it."""
    used, unused = parameter(1.0), parameter(1.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW([used, unused], lr=0.1))
    pull(used, 1.0)
    optimizer.step()
    assert unused.grad is None
    assert unused.item() == 1.0
    assert unused not in optimizer.state


def check_gradients_set_by_hand(hvd: Any) -> None:
    weight = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.tensor([float(hvd.rank())])
    optimizer.step()
    assert weight.item() == -mean_rank(hvd)


def check_backward_passes_are_summed(hvd: Any) -> None:
    weight = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=2
    )
    pull(weight, float(hvd.rank()))
    pull(weight, float(hvd.rank()))
    optimizer.step()
    assert weight.item() == -2 * mean_rank(hvd)


def check_short_last_window_is_stepped(hvd: Any) -> None:
    weight = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=3
    )
    pull(weight, float(hvd.rank()))
    optimizer.step()
    assert weight.item() == -mean_rank(hvd)
    optimizer.zero_grad()
    for _ in range(2 if hvd.rank() == 0 else 3):
        pull(weight, 1.0)
    optimizer.step()
    expected = -mean_rank(hvd) - (3 * hvd.size() - 1) / hvd.size()
    assert abs(weight.item() - expected) < 1e-6


def check_too_many_backward_passes(hvd: Any) -> None:
    weight = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    pull(weight, 1.0)
    raises(SynchronizationError, "backward_passes_per_step=1", pull, weight, 1.0)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.set_backward_passes_per_step(2)
    optimizer.zero_grad()
    pull(weight, 1.0)
    pull(weight, 1.0)
    optimizer.step()
    assert weight.item() == -2.0


def check_synchronize_recipes(hvd: Any) -> None:
    weight = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    total = sum(range(hvd.size()))
    pull(weight, float(hvd.rank()))
    optimizer.synchronize()
    optimizer.synchronize()
    assert weight.grad.item() == total
    with optimizer.skip_synchronize():
        optimizer.step()
    assert weight.item() == -total
    optimizer.zero_grad()
    pull(weight, float(hvd.rank()))
    optimizer.synchronize()
    optimizer.step()  # Horovod would add the sums once more
    assert weight.item() == -2 * total

    def step_without_reduction() -> None:
        with optimizer.skip_synchronize():
            optimizer.step()

    optimizer.zero_grad()
    pull(weight, 1.0)
    raises(SynchronizationError, "without synchronize()", step_without_reduction)
    optimizer.step()


def check_clipping_between_backward_and_step(hvd: Any) -> None:
    """torch's own clipping would clip one rank's gradient, and race with the reduction."""
    weight = parameter(0.0, 0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    pull(weight, 30.0)
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    raises(SynchronizationError, "hvd.clip_grad_norm_", optimizer.step)


def check_learning_from_all_optimizer_variants(hvd: Any) -> None:
    for keywords in ({"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": False}):
        weight = parameter(1.0, 2.0)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam([weight], lr=0.1, **keywords))
        reference = parameter(1.0, 2.0)
        alone = torch.optim.Adam([reference], lr=0.1, **keywords)
        for _ in range(3):
            optimizer.zero_grad()
            alone.zero_grad()
            pull(weight, float(hvd.rank()))
            pull(reference, mean_rank(hvd))
            optimizer.step()
            alone.step()
        assert torch.equal(weight, reference), keywords


def check_lbfgs_closure(hvd: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(8 * hvd.size(), 3, generator=generator, dtype=torch.float64)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)

    def train(optimizer: Any, layer: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(layer(x), y)
            loss.backward()
            return loss

        return float([optimizer.step(closure).detach() for _ in range(3)][-1])

    layer = nn.Linear(3, 1).double()
    alone = copy.deepcopy(layer)
    share = slice(8 * hvd.rank(), 8 * hvd.rank() + 8)
    make = torch.optim.LBFGS
    wrapped = hvd.DistributedOptimizer(make(layer.parameters(), line_search_fn="strong_wolfe"))
    loss = train(wrapped, layer, inputs[share], targets[share])
    expected = train(
        make(alone.parameters(), line_search_fn="strong_wolfe"), alone, inputs, targets
    )
    assert abs(loss - expected) < 1e-9
    assert torch.allclose(layer.weight, alone.weight, atol=1e-7)
    assert equal_on_all_ranks(hvd, layer.weight)


def check_sgd_closure(hvd: Any) -> None:
    weight = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * float(hvd.rank()) + float(hvd.rank())).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == mean_rank(hvd)
    assert weight.item() == -mean_rank(hvd)


def check_groups_and_predivide(hvd: Any) -> None:
    """Horovod ignores the factor where groups are set, and overflows."""
    for groups in (None, 2, "lists"):
        weights = [parameter(0.0) for _ in range(5)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(weights, lr=1.0),
            gradient_predivide_factor=float(hvd.size()),
            groups=[weights[:2], weights[3:]] if groups == "lists" else groups,
        )
        for _ in range(2):
            optimizer.zero_grad()
            # The sum of these overflows float32; divided before the sum, their mean fits.
            sum(weight.sum() * 2.0e38 for weight in weights).backward()
            optimizer.synchronize()
            for weight in weights:
                assert abs(weight.grad.item() / 2.0e38 - 1) < 1e-6, (groups, weight.grad)
            optimizer.zero_grad()


def check_groups_with_unused_parameters(hvd: Any) -> None:
    weights = [parameter(0.0) for _ in range(4)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), groups=2)
    for step in (1, 2):
        optimizer.zero_grad()
        used = weights if hvd.rank() == 0 else weights[:3]
        sum(weight.sum() * hvd.size() for weight in used).backward()
        optimizer.step()
        expected = [-step * hvd.size()] * 3 + [-step]
        assert [weight.item() for weight in weights] == expected


def check_sparse_gradients(hvd: Any) -> None:
    for as_dense in (False, True):
        table = nn.Embedding(6, 2, sparse=True)
        nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(table.parameters(), lr=0.1)
            if not as_dense
            else torch.optim.SGD(table.parameters(), lr=1.0),
            sparse_as_dense=as_dense,
        )
        table(torch.tensor([hvd.rank(), 5])).sum().backward()
        optimizer.synchronize()
        assert table.weight.grad.is_sparse
        expected = torch.zeros(6, 2)
        expected[: hvd.size()] = 1.0 / hvd.size()
        expected[5] = 1.0
        assert torch.allclose(table.weight.grad.to_dense(), expected)
        optimizer.step()
        assert equal_on_all_ranks(hvd, table.weight)


def check_sparse_gradient_missing_on_one_rank(hvd: Any) -> None:
    for as_dense in (False, True):
        table = nn.Embedding(4, 2, sparse=True)
        bias = parameter(0.0)
        nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([table.weight, bias], lr=1.0), sparse_as_dense=as_dense
        )
        loss = bias.sum()
        if hvd.rank() == 0:
            loss = loss + table(torch.tensor([2])).sum() * hvd.size()
        loss.backward()
        optimizer.step()
        expected = torch.zeros(4, 2)
        expected[2] = -1.0
        assert torch.equal(table.weight.detach(), expected), table.weight
        assert bias.item() == -1.0


def check_sparse_on_one_rank_dense_on_another(hvd: Any) -> None:
    table = nn.Embedding(4, 2, sparse=hvd.rank() == 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    table(torch.tensor([1])).sum().backward()
    raises(SynchronizationError, "sparse_as_dense=True", optimizer.step)


def check_half_precision_parameters(hvd: Any) -> None:
    """The sum overflows fp16 and Horovod cannot add bfloat16; the mean fits both."""
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        weight = nn.Parameter(torch.zeros(3, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        if dtype.is_complex:
            (weight * (3.0 - 1.0j * hvd.rank())).real.sum().backward()
            optimizer.synchronize()
            assert torch.equal(weight.grad, torch.full_like(weight, 3 + 1j * mean_rank(hvd)))
        else:
            (weight * torch.tensor(40000.0, dtype=dtype)).sum().backward()
            optimizer.synchronize()
            assert torch.allclose(weight.grad.float(), torch.tensor(40000.0), rtol=1e-2)
            assert weight.grad.dtype == weight.dtype
        optimizer.step()


def check_channels_last(hvd: Any) -> None:
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(convolution.parameters(), lr=1.0))
    inputs = torch.full((2, 3, 8, 8), float(hvd.rank() + 1))
    convolution(inputs.to(memory_format=torch.channels_last)).sum().backward()
    optimizer.synchronize()
    mean = (hvd.size() + 1) / 2
    assert torch.allclose(convolution.weight.grad, torch.tensor(2 * 36 * mean))


def check_compiled_model_names(hvd: Any) -> None:
    model = torch.compile(nn.Linear(2, 1), backend="eager")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    names = [name for name, _ in optimizer._hvdkit.reducer.names()]
    assert names == ["weight", "bias"]
    model(torch.full((1, 2), float(hvd.rank()))).sum().backward()
    optimizer.step()
    assert equal_on_all_ranks(hvd, model.weight)


def check_copies(hvd: Any) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5),
        named_parameters=model.named_parameters(),
    )
    pull(model.weight, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    buffer = io.BytesIO()
    torch.save((model, optimizer), buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),
        torch.load(buffer, weights_only=False),
    ]
    for other_model, other in copies:
        assert type(other).__name__ == "SGD"
        assert isinstance(other, torch.optim.SGD)
        assert other.param_groups[0]["params"][0] is other_model.weight
        assert other.state[other_model.weight]["momentum_buffer"].item() == 1.0
        pull(other_model.weight, float(hvd.rank()))
        other.step()
        assert other_model.weight.item() == -1.0 - (0.5 + mean_rank(hvd))
    assert model.weight.item() == -1.0


def check_copy_on_one_rank_only(hvd: Any) -> None:
    """A copy on rank 0 must not shift the names of optimizers that are made later."""
    weight = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    if hvd.rank() == 0:
        copy.deepcopy(optimizer)
    later = parameter(0.0)
    second = hvd.DistributedOptimizer(torch.optim.SGD([later], lr=1.0))
    for chosen, target in ((optimizer, weight), (second, later)):
        pull(target, float(hvd.rank()))
        chosen.step()
        assert target.item() == -mean_rank(hvd)


def check_two_optimizers_with_equal_names(hvd: Any) -> None:
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = []
    for model in models:
        nn.init.zeros_(model.weight)
        optimizers.append(
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
            )
        )
    inputs = torch.tensor([[float(hvd.rank())]])
    sum(model(inputs) for model in models).sum().backward()
    for optimizer, model in zip(optimizers, models, strict=True):
        optimizer.step()
        assert model.weight.item() == -mean_rank(hvd)


def check_newest_optimizer_owns_the_parameters(hvd: Any) -> None:
    weight = parameter(0.0)
    first = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    second = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    pull(weight, float(hvd.rank()))
    second.step()
    assert weight.item() == -mean_rank(hvd)
    raises(SynchronizationError, "another DistributedOptimizer", first.step)


def check_arguments(hvd: Any) -> None:
    weight = parameter(0.0)

    def wrap(**keywords: Any) -> None:
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), **keywords)

    def check(text: str, **keywords: Any) -> None:
        raises(ValueError, text, lambda: wrap(**keywords))

    check("at least 1", backward_passes_per_step=0)
    check("op=Average", gradient_predivide_factor=2.0, op=hvd.Sum)
    check("twice", named_parameters=[("w", weight), ("w", weight)])
    check("every parameter", named_parameters=[("v", parameter(1.0))])
    check("(name, parameter)", named_parameters=[weight])
    check("positive number", groups=-1)
    check("one of the groups", groups=[[weight], [weight]])
    check("torch.Tensor", groups=[["weight"]])
    raises(ValueError, "torch.optim.Optimizer", hvd.DistributedOptimizer, nn.Linear(1, 1))


def check_named_parameters_as_groups(hvd: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.named_parameters(), lr=1.0))
    model(torch.full((1, 2), float(hvd.rank()))).sum().backward()
    optimizer.step()
    assert equal_on_all_ranks(hvd, model.weight)


def check_adasum(hvd: Any) -> None:
    weight = parameter(1.0, 2.0)
    if not hvd.mpi_enabled():
        sgd = torch.optim.SGD([weight], lr=0.5)
        raises(ValueError, "over MPI", lambda: hvd.DistributedOptimizer(sgd, op=hvd.Adasum))
        return
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), op=hvd.Adasum)
    pull(weight, 1.0)  # the same gradient everywhere: its adaptive sum is itself
    optimizer.step()
    assert torch.allclose(weight, torch.tensor([0.5, 1.5]))
    optimizer.zero_grad(set_to_none=True)
    pull(weight, float(hvd.rank()))
    optimizer.step()
    assert equal_on_all_ranks(hvd, weight)


def check_process_set(hvd: Any) -> None:
    weight = parameter(0.0)
    evens = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=evens)
    pull(weight, float(hvd.rank()))
    optimizer.step()
    ranks = list(range(0, hvd.size(), 2))
    expected = sum(ranks) / len(ranks) if evens.included() else hvd.rank()
    assert weight.item() == -expected
    hvd.remove_process_set(evens)


def check_optimizer_join(hvd: Any) -> None:
    """Joined ranks weigh nothing: the last steps are the mean of the ranks that still train."""
    weight = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for _ in range(1 + hvd.rank()):
        optimizer.zero_grad()
        pull(weight, 6.0)
        optimizer.step()
        if hvd.rank() == hvd.size() - 1:
            assert weight.grad.item() == 6.0
    hvd.join()
    assert weight.item() == -6.0 * (1 + hvd.rank())


def check_options_that_differ_between_ranks_are_an_error_everywhere(hvd):
    """Their reductions would wait for each other for ever, or take turns on a few ranks only."""
    if hvd.size() == 1:
        return
    odd = hvd.rank() > 0
    for options in (
        {"compression": (hvd.Compression.none, hvd.Compression.fp16)[odd]},
        {"groups": 1 if odd else None},
        {"backward_passes_per_step": 2 if odd else 1},
    ):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
        )
        for _ in range(options.get("backward_passes_per_step", 1)):
            model(torch.ones(2, 3)).mean().backward()
        with pytest.raises(SynchronizationError, match="same options on all ranks"):
            optimizer.step()
