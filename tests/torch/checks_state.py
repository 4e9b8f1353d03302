"""Broadcast of models, optimizer state and objects on real ranks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import horovod.torch as horovod
import torch
from torch import nn

from hvdkit.errors import SynchronizationError
from hvdkit.torch import objects
from tests.torch.checks_optimizer import equal_on_all_ranks, parameter, pull, raises


def flattened(value: Any) -> list[Any]:
    """Every leaf of nested state, tensors as lists with their dtype."""
    if isinstance(value, torch.Tensor):
        return [value.detach().tolist(), str(value.dtype), str(value.device), list(value.shape)]
    if isinstance(value, dict):
        return [item for key in value for item in (key, *flattened(value[key]))]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *[leaf for item in value for leaf in flattened(item)]]
    return [value]


def agree(hvd: Any, value: Any) -> bool:
    """Whether all ranks hold the same state."""
    gathered = hvd.allgather_object(repr(flattened(value)), name="check.state")
    return len(set(gathered)) == 1


def state_of(model: nn.Module, optimizer: Any) -> Any:
    gradients = [parameter.grad for parameter in model.parameters()]
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), gradients))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def step_of(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


OPTIMIZERS: list[tuple[str, Callable[[Any], torch.optim.Optimizer]]] = [
    ("SGD", lambda p: torch.optim.SGD(p, lr=0.1)),
    ("SGD momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ("tensor lr", lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), capturable=False)),
    ("amsgrad", lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True)),
    ("centered", lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5)),
]
OPTIMIZERS += [
    (name, lambda p, cls=cls: cls(p))
    for name, cls in sorted(vars(torch.optim).items())
    if inspect.isclass(cls)
    and issubclass(cls, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam", "LBFGS", "Muon")
]
if hasattr(torch.optim, "Muon"):  # takes matrices alone
    OPTIMIZERS.append(("Muon", lambda p: torch.optim.Muon([q for q in p if q.ndim == 2])))


def check_every_optimizer_with_loaded_state_on_the_root(hvd: Any) -> None:
    for name, make in OPTIMIZERS:
        torch.manual_seed(hvd.rank())
        model = network()
        optimizer = make(model.parameters())
        if hvd.rank() == 0:
            step_of(model, optimizer)
            step_of(model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * (1 + hvd.rank())
        before = state_of(model, optimizer)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        if hvd.rank() == 0:
            assert flattened(state_of(model, optimizer)) == flattened(before), name
        assert agree(hvd, (model.state_dict(), optimizer.state_dict())), name
        torch.manual_seed(7)
        step_of(model, optimizer)
        assert agree(hvd, (model.state_dict(), optimizer.state_dict())), name


def check_fresh_optimizers_stay_fresh(hvd: Any) -> None:
    """Horovod's dummy step moves AdamW's weights, counts a step, and leaves zeros as gradients."""
    for name, make in OPTIMIZERS:
        torch.manual_seed(0)
        model = network()
        optimizer = make(model.parameters())
        before = state_of(model, optimizer)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert flattened(state_of(model, optimizer)) == flattened(before), name

    weight = parameter(1.0)
    faulty = torch.optim.AdamW([weight], lr=0.1)
    horovod.broadcast_optimizer_state(faulty, root_rank=0)
    assert weight.item() != 1.0
    assert weight.grad is not None


def check_state_on_other_ranks_is_replaced(hvd: Any) -> None:
    torch.manual_seed(hvd.rank())
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    if hvd.rank() != 0:
        step_of(model, optimizer)
    hvd.broadcast_parameters(model, root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert len(optimizer.state) == 0
    assert agree(hvd, model.state_dict())


def check_another_root(hvd: Any) -> None:
    root = hvd.size() - 1
    weight = parameter(float(hvd.rank()))
    optimizer = torch.optim.SGD([weight], lr=0.1 * (hvd.rank() + 1), momentum=0.9)
    if hvd.rank() == root:
        pull(weight, 1.0)
        optimizer.step()
    hvd.broadcast_parameters([weight], root_rank=root)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert agree(hvd, (weight, optimizer.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 0.1 * (root + 1)


def check_lbfgs_and_sparse_adam(hvd: Any) -> None:
    torch.manual_seed(hvd.rank())
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(layer.parameters(), history_size=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (layer(torch.tensor([[1.0, 2.0]])) - 3.0).square().sum()
        loss.backward()
        return loss

    if hvd.rank() == 0:
        optimizer.step(closure)
    hvd.broadcast_parameters(layer, root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert agree(hvd, (layer.state_dict(), optimizer.state_dict()))
    optimizer.step(closure)
    assert agree(hvd, (layer.state_dict(), optimizer.state_dict()))

    table = nn.Embedding(4, 2, sparse=True)
    sparse = torch.optim.SparseAdam(table.parameters())
    if hvd.rank() == 0:
        table(torch.tensor([1])).sum().backward()
        sparse.step()
    hvd.broadcast_optimizer_state(sparse, root_rank=0)
    assert agree(hvd, sparse.state_dict())


def check_partial_frozen_and_none_valued_state(hvd: Any) -> None:
    first, frozen, unused = parameter(1.0), parameter(2.0), parameter(3.0)
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD([first, frozen, unused], lr=0.1, momentum=0.9)
    if hvd.rank() == 0:  # an unused layer on one rank only: Horovod waits for ever
        pull(first, 1.0)
        optimizer.step()
        optimizer.state[unused] = {"momentum_buffer": None, "name": "mine", "pair": (1, None)}
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert set(optimizer.state) == {first, unused}
    assert optimizer.state[unused] == {"momentum_buffer": None, "name": "mine", "pair": (1, None)}
    assert optimizer.state[first]["momentum_buffer"].item() == 1.0


def check_state_for_all_parameters(hvd: Any) -> None:
    weight = parameter(1.0)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state["shared"] = {"steps": torch.tensor(3.0 + hvd.rank()), "rank": hvd.rank()}
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.state["shared"]["steps"].item() == 3.0
    assert optimizer.state["shared"]["rank"] == 0
    assert list(optimizer.state) == ["shared"]


def check_one_tensor_in_two_places(hvd: Any) -> None:
    """A rate that fresh groups share is two tensors at a root that has loaded a state."""
    shared = torch.tensor(0.5)
    groups = [{"params": [parameter(1.0)]}, {"params": [parameter(2.0)]}]
    optimizer = torch.optim.Adam(groups, lr=shared)
    if hvd.rank() == 0:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.25, 0.5]

    for group in optimizer.param_groups:
        group["lr"] = shared if hvd.rank() == 0 else torch.tensor(0.1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    first, second = optimizer.param_groups
    assert first["lr"] is second["lr"]
    assert first["lr"].item() == 0.5


def check_tensor_options_stay_the_same_object(hvd: Any) -> None:
    rate = torch.tensor(0.1 * (1 + hvd.rank()))
    optimizer = torch.optim.Adam([parameter(1.0)], lr=rate)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] is rate
    assert torch.isclose(rate, torch.tensor(0.1))
    assert scheduler.optimizer is optimizer


def check_buffers_of_a_module(hvd: Any) -> None:
    model = network()
    model.register_buffer("kept", torch.full((2,), float(hvd.rank())))
    model.register_buffer("passing", torch.full((2,), float(hvd.rank())), persistent=False)
    hvd.broadcast_parameters(model, root_rank=0)
    assert equal_on_all_ranks(hvd, model.kept)
    assert equal_on_all_ranks(hvd, model.passing)
    model.passing.fill_(float(hvd.rank()))
    horovod.broadcast_parameters(model.state_dict(), root_rank=0)
    assert not equal_on_all_ranks(hvd, model.passing)


class Counting(nn.Module):
    """A module whose state is not a tensor."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Remembering(Counting):
    """A module whose extra state is a tensor, made anew each time it is asked for."""

    def get_extra_state(self) -> Any:
        return torch.full((self.count + 1,), self.count)

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state[0])


def check_extra_state(hvd: Any) -> None:
    model = nn.Sequential(nn.Linear(1, 1), Counting(hvd.rank()))
    hvd.broadcast_parameters(model, root_rank=0)
    assert model[1].count == 0
    state = nn.Sequential(nn.Linear(1, 1), Counting(hvd.rank())).state_dict()
    hvd.broadcast_parameters(state, root_rank=0)
    assert state["1._extra_state"] == {"count": 0}
    remembering = Remembering(hvd.rank())
    hvd.broadcast_parameters(remembering, root_rank=0)
    assert remembering.count == 0


def check_every_dtype_and_layout(hvd: Any) -> None:
    torch.manual_seed(hvd.rank())
    dtypes = [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.bool]
    dtypes += [torch.int8, torch.uint8, torch.int16, torch.int64, torch.float8_e4m3fn]
    tensors = {str(dtype): (torch.randn(3, 5) * 10).to(dtype) for dtype in dtypes}
    tensors["transposed"] = torch.randn(4, 6).t()
    tensors["channels last"] = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    tensors["scalar"] = torch.randn(())
    tensors["empty"] = torch.randn(0, 3)
    tensors["conjugate"] = torch.randn(3, dtype=torch.complex64).conj().imag
    tensors["odd bytes"] = torch.tensor([True, False, hvd.rank() == 0])
    tensors["large"] = torch.randn(20_000_000) if hvd.rank() == 0 else torch.zeros(20_000_000)
    hvd.broadcast_parameters([torch.empty(0)], root_rank=0)
    held = dict(tensors)
    hvd.broadcast_parameters(tensors, root_rank=0)
    torch.manual_seed(0)
    for dtype in dtypes:
        expected = (torch.randn(3, 5) * 10).to(dtype)
        same = tensors[str(dtype)].view(torch.uint8) == expected.view(torch.uint8)
        assert same.all(), dtype
    for name, tensor in tensors.items():
        assert tensor is held[name]
        if name.isalpha() or " " in name:
            assert equal_on_all_ranks(hvd, tensor.double().flatten()[:1000]), name


def check_forms_of_parameters(hvd: Any) -> None:
    for form in (
        lambda layer: layer.state_dict(),
        lambda layer: list(layer.parameters()),
        lambda layer: layer.named_parameters(),
        lambda layer: layer,
        lambda layer: torch.compile(layer, backend="eager") if hvd.rank() else layer,
        lambda layer: (
            torch.compile(layer, backend="eager") if hvd.rank() else layer
        ).named_parameters(),
    ):
        layer = nn.Linear(2, 2)
        nn.init.constant_(layer.weight, float(hvd.rank() + 1))
        hvd.broadcast_parameters(form(layer), root_rank=0)
        assert (layer.weight == 1.0).all()
    raises(ValueError, "Received: params=int", hvd.broadcast_parameters, 3, 0)
    lazy = nn.LazyLinear(2)
    raises(ValueError, "lazy", hvd.broadcast_parameters, lazy, 0)


def check_structures_that_differ(hvd: Any) -> None:
    """All ranks say what differs; none waits for the others."""
    layer = nn.Linear(2, 3 if hvd.rank() == 1 else 2)
    raises(SynchronizationError, "only on rank 1", hvd.broadcast_parameters, layer, 0)
    groups = [{"params": [parameter(1.0)]} for _ in range(2 if hvd.rank() == 0 else 1)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    seen = nn.LazyLinear(2)
    if hvd.rank() == 0:  # only here has the model seen a batch
        seen(torch.ones(1, 3))
    raises(SynchronizationError, "lazy", hvd.broadcast_parameters, seen, 0)
    raises(SynchronizationError, "group 1", hvd.broadcast_optimizer_state, optimizer, 0)


def check_objects(hvd: Any) -> None:
    # Horovod names the operation after the object's class, and waits for ever where they differ.
    mine = {"epoch": 3, "names": ["a", "b"]} if hvd.rank() == 0 else None
    received = hvd.broadcast_object(mine, root_rank=0)
    assert received == {"epoch": 3, "names": ["a", "b"]}
    if hvd.rank() == 0:
        assert received is mine
    assert hvd.broadcast_object(hvd.rank(), root_rank=1, name="rank") == 1
    everything = hvd.allgather_object("x" * hvd.rank() if hvd.rank() else None)
    assert everything == [None, *["x" * rank for rank in range(1, hvd.size())]]
    assert hvd.broadcast_object(None, root_rank=0) is None


class Unsendable:
    """What no rank can send to another."""

    def __reduce__(self) -> Any:
        raise ZeroDivisionError("cannot be pickled")


def check_objects_that_cannot_be_sent(hvd: Any) -> None:
    """No rank waits for one that has nothing to send."""
    mine = Unsendable() if hvd.rank() == 0 else None
    error = ZeroDivisionError if hvd.rank() == 0 else SynchronizationError
    raises(error, "cannot", hvd.broadcast_object, mine, 0)
    raises(error, "cannot", hvd.allgather_object, mine)
    assert hvd.allgather_object(1) == [1] * hvd.size()


def check_objects_larger_than_one_collective(hvd: Any) -> None:
    usual = objects.CHUNK_BYTES
    objects.CHUNK_BYTES = 1000
    try:
        mine = bytes([hvd.rank()]) * (700 * hvd.rank() + 1)
        everything = hvd.allgather_object(mine)
        assert everything == [bytes([rank]) * (700 * rank + 1) for rank in range(hvd.size())]
        assert hvd.broadcast_object(mine, root_rank=1) == everything[1]
        assert hvd.broadcast_object(b"x" * 1000 * hvd.size(), root_rank=0) == b"x" * (
            1000 * hvd.size()
        )
    finally:
        objects.CHUNK_BYTES = usual


def check_object_in_a_process_set(hvd: Any) -> None:
    some = hvd.add_process_set([0] if hvd.size() == 2 else [0, 3])
    root = some.ranks[-1]
    if some.included():
        assert hvd.broadcast_object(hvd.rank(), root_rank=root, process_set=some) == root
    hvd.remove_process_set(some)


def check_distributed_optimizer(hvd: Any) -> None:
    torch.manual_seed(hvd.rank())
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters()), model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    step_of(model, optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    trained = [value for name, value in model.state_dict().items() if "running" not in name]
    assert agree(hvd, (trained, optimizer.state_dict()))
