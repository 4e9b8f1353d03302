"""Gives every rank the root's model, optimizer state and objects, without touching the root's.

Horovod initialises missing optimizer state by a dummy step, which decays weights, counts a step
and waits for ever where ranks hold different parameters. Here the root first says what it has;
the others make room for it and receive it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdkit.errors import SynchronizationError
from hvdkit.torch.backend import mpi_ops
from hvdkit.torch.objects import CHUNK_BYTES, allgather_object, broadcast_object

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

PACK_BYTES = 64 * 2**20
"""Small tensors travel together in buffers of at most this size."""

_SHOWN_DIFFERENCES = 5
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class _TensorSpec:
    """Stands for a tensor in a structure that is sent as an object."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    with_parameter: bool
    """Whether it lies on its parameter's device; else on the CPU."""


@dataclass(frozen=True)
class _Parameter:
    """Stands for a parameter as a key of an optimizer's state."""

    index: int


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Gives all ranks the root's values, in place.

    Args:
        params: A module (its parameters, all of its buffers, also those that are not persistent,
            and its extra state), a ``state_dict()``, or tensors or ``(name, tensor)`` pairs.
        root_rank: The rank whose values count. Nothing changes there.

    Raises:
        ValueError: `params` is of another type, or holds lazy parameters without a shape yet.
        SynchronizationError: Names, shapes or dtypes differ between ranks; on all ranks.

    Example:
        >>> import hvdkit.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast_parameters(torch.nn.Linear(2, 1), root_rank=0)
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    objects: dict[str, Any] = {}
    for name, value in _named_entries(params):
        # Extra state may be a tensor that is made anew by each get_extra_state().
        if isinstance(value, torch.Tensor) and not name.endswith(_EXTRA_STATE):
            tensors.append((name, value))
        else:
            objects[name] = value
    structure = [f"{name}: {_described(tensor)}" for name, tensor in tensors]
    if mpi_ops.size() > 1:
        _check_same(structure + [f"{name}: object" for name in objects], root_rank)
    _check_materialised(tensors)
    if mpi_ops.size() == 1:
        return
    _broadcast_tensors([tensor for _, tensor in tensors], root_rank)
    received = broadcast_object(objects, root_rank) if objects else {}
    if mpi_ops.rank() != root_rank:
        _store_objects(params, received)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Gives all ranks the root's optimizer state and options, without a step.

    Whatever state a rank had is replaced by the root's: empty, partial or nested, as that of
    LBFGS. Each entry keeps its dtype, and lies on its parameter's device or on the CPU as at the
    root. Tensors that other objects hold, such as a learning rate, are filled in place.

    Args:
        optimizer: Any torch optimizer, distributed or not.
        root_rank: The rank whose state counts. Nothing changes there.
        model: Not needed; Horovod's argument.

    Raises:
        SynchronizationError: The parameter groups differ between ranks; on all ranks.

    Example:
        >>> import hvdkit.torch as hvd
        >>> hvd.init()
        >>> optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    if mpi_ops.size() == 1:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    structure = [
        f"group {index}, parameter {position}: {_described(parameter)}"
        for index, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    ]
    _check_same(structure, root_rank)
    is_root = mpi_ops.rank() == root_rank
    tensors = _Tensors()
    tree: Any = _optimizer_tree(optimizer, parameters, tensors) if is_root else None
    tree = broadcast_object(tree, root_rank, name="optimizer")
    if not is_root:
        _apply_tree(tree, optimizer, parameters, tensors)
    _broadcast_tensors(tensors.each, root_rank)


# --- structures ---------------------------------------------------------------------------


def _named_entries(params: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(params, torch.nn.Module):
        yield from ((_plain(name), value) for name, value in params.named_parameters())
        yield from ((_plain(name), value) for name, value in params.named_buffers())
        for name, module in _modules_with_extra_state(params):
            yield f"{_plain(name)}.{_EXTRA_STATE}", module.get_extra_state()
    elif isinstance(params, Mapping):
        named = [(_plain(name), value) for name, value in params.items()]
        yield from sorted(named, key=lambda entry: entry[0])
    elif isinstance(params, Iterable) and not isinstance(params, (torch.Tensor, str, bytes)):
        for index, entry in enumerate(params):
            name, value = entry if isinstance(entry, tuple) else (index, entry)
            yield _plain(str(name)), value
    else:
        raise ValueError(
            "Expected a module, a state_dict(), or an iterable of tensors or (name, tensor) "
            f"pairs. Received: params={type(params).__name__}."
        )


def _modules_with_extra_state(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield name, module


def _store_objects(params: Any, received: Mapping[str, Any]) -> None:
    if isinstance(params, torch.nn.Module):
        for name, module in _modules_with_extra_state(params):
            key = f"{_plain(name)}.{_EXTRA_STATE}"
            if key in received:
                module.set_extra_state(received[key])
    elif isinstance(params, MutableMapping):
        names = {_plain(name): name for name in params}
        for key, value in received.items():
            params[names[key]] = value


def _plain(name: str) -> str:
    """The name without what ``torch.compile`` adds, which need not be used on every rank."""
    return name.replace("_orig_mod.", "")


def _described(tensor: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(tensor):
        return "lazy, without a shape yet"
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _check_materialised(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"Expected parameters that have a shape. Received: {name!r}, which is lazy. Fix: "
                "run the model once on a batch before it is broadcast."
            )


def _check_same(structure: list[str], root_rank: int) -> None:
    """Raises on all ranks where one has another structure than the root."""
    expected = broadcast_object(structure, root_rank, name="structure")
    differing = torch.tensor([int(structure != expected)], dtype=torch.int32)
    handle = mpi_ops.allreduce_async_(differing, name="hvdkit.structure", op=mpi_ops.Sum)
    count = int(_wait(handle).item())
    if not count:
        return
    rank = mpi_ops.rank()
    lines = [f"only on rank {root_rank}: {entry}" for entry in expected if entry not in structure]
    lines += [f"only on rank {rank}: {entry}" for entry in structure if entry not in expected]
    if structure != expected and not lines:
        lines = [f"the same entries in another order on rank {rank}"]
    everywhere = allgather_object(lines, name="differences")
    shown = [line for differences in everywhere for line in differences][:_SHOWN_DIFFERENCES]
    raise SynchronizationError(
        f"Expected the same names, shapes and dtypes on all ranks. Received: {count} ranks that "
        f"differ from rank {root_rank}: {'; '.join(shown)}. Fix: build the same model and "
        "optimizer on every rank."
    )


class _Tensors:
    """The tensors of a structure, each of them once."""

    def __init__(self) -> None:
        self.each: list[torch.Tensor] = []
        self._indices: dict[int, int] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._indices

    def index_of(self, tensor: torch.Tensor) -> int:
        """The tensor's index, a new one where it was not seen before."""
        if tensor not in self:
            self._indices[id(tensor)] = len(self.each)
            self.each.append(tensor)
        return self._indices[id(tensor)]


def _optimizer_tree(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], tensors: _Tensors
) -> tuple[list[dict[str, Any]], list[tuple[Any, Any]]]:
    """Options and state, with specs in place of tensors and indices in place of parameters."""
    groups = [
        {
            key: _encode(option, _anchor(group), tensors)
            for key, option in group.items()
            if key not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]
    indices = {id(parameter): index for index, parameter in enumerate(parameters)}
    state: list[tuple[Any, Any]] = []
    for key, entry in optimizer.state.items():
        if not isinstance(key, torch.Tensor):  # what an optimizer keeps for all parameters
            state.append((key, _encode(entry, _no_parameter(), tensors)))
        elif id(key) in indices:
            state.append((_Parameter(indices[id(key)]), _encode(entry, key, tensors)))
    return groups, state


def _apply_tree(
    tree: tuple[list[dict[str, Any]], list[tuple[Any, Any]]],
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    tensors: _Tensors,
) -> None:
    """Replaces options and state by the root's; the values of tensors come later."""
    groups, received = tree
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for key, option in options.items():
            group[key] = _decode(option, group.get(key), _anchor(group), tensors)
    state = {}
    for sent, entry in received:
        of_parameter = isinstance(sent, _Parameter)
        key = parameters[sent.index] if of_parameter else sent
        anchor = key if of_parameter else _no_parameter()
        state[key] = _decode(entry, optimizer.state.get(key), anchor, tensors)
    optimizer.state.clear()
    optimizer.state.update(state)


def _anchor(group: Mapping[str, Any]) -> torch.Tensor:
    anchor: torch.Tensor = group["params"][0] if group["params"] else _no_parameter()
    return anchor


def _no_parameter() -> torch.Tensor:
    return torch.empty(0)


def _encode(value: Any, anchor: torch.Tensor, tensors: _Tensors) -> Any:
    if isinstance(value, torch.Tensor):
        with_parameter = value.device == anchor.device and value.device.type != "cpu"
        index = tensors.index_of(value)
        return _TensorSpec(index, tuple(value.shape), value.dtype, with_parameter)
    if isinstance(value, dict):
        return {key: _encode(entry, anchor, tensors) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return _like(value, [_encode(entry, anchor, tensors) for entry in value])
    return value


def _decode(value: Any, own: Any, anchor: torch.Tensor, tensors: _Tensors) -> Any:
    """Makes room for a received structure, in this rank's own tensors where they fit."""
    if isinstance(value, _TensorSpec):
        return _room_for(value, own, anchor, tensors)
    if isinstance(value, dict):
        held = own if isinstance(own, dict) else {}
        return {k: _decode(entry, held.get(k), anchor, tensors) for k, entry in value.items()}
    if isinstance(value, (list, tuple)):
        alike = isinstance(own, (list, tuple)) and len(own) == len(value)
        pairs = zip(value, own if alike else [None] * len(value), strict=True)
        return _like(value, [_decode(entry, mine, anchor, tensors) for entry, mine in pairs])
    return value


def _room_for(spec: _TensorSpec, own: Any, anchor: torch.Tensor, tensors: _Tensors) -> torch.Tensor:
    if spec.index < len(tensors.each):  # the root has one tensor in two places
        return tensors.each[spec.index]
    device = anchor.device if spec.with_parameter else torch.device("cpu")
    fits = (
        isinstance(own, torch.Tensor)
        and own not in tensors  # one tensor here where the root has two
        and tuple(own.shape) == spec.shape
        and own.dtype == spec.dtype
        and own.device == device
    )
    room = own if fits else torch.empty(spec.shape, dtype=spec.dtype, device=device)
    assert tensors.index_of(room) == spec.index
    return room


def _like(value: Any, entries: list[Any]) -> Any:
    """A list, tuple or named tuple of the type of `value`."""
    if hasattr(value, "_fields"):  # a named tuple takes its fields one by one
        return type(value)(*entries)
    return entries if type(value) is list else type(value)(entries)


# --- bytes --------------------------------------------------------------------------------


@torch.no_grad()
def _broadcast_tensors(tensors: Sequence[torch.Tensor], root_rank: int) -> None:
    """Broadcasts tensors of any dtype as bytes, small ones of one device together."""
    is_root = mpi_ops.rank() == root_rank
    handles: list[int] = []
    buffers: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for number, pack in enumerate(_packs(tensors)):
        parts = [_bytes_of(tensor) for tensor in pack]
        buffer = torch.cat(parts) if len(parts) > 1 else parts[0]
        buffers.append((buffer, pack))
        for index, chunk in enumerate(buffer.split(CHUNK_BYTES)):
            name = f"hvdkit.tensors.{number}.{index}"
            handles.append(mpi_ops.broadcast_async_(chunk, root_rank, name))
    for handle in handles:
        _wait(handle)
    if is_root:
        return
    for buffer, pack in buffers:
        if buffer.data_ptr() == pack[0].data_ptr():
            continue  # a single tensor, which was received in place
        parts = buffer.split([tensor.numel() * tensor.element_size() for tensor in pack])
        for tensor, part in zip(pack, parts, strict=True):
            if tensor.numel():
                # A copy, so that the bytes are aligned for the dtype.
                tensor.detach().copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _packs(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    pack: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if pack and (size + nbytes > PACK_BYTES or tensor.device != pack[0].device):
            yield pack
            pack, size = [], 0
        pack.append(tensor)
        size += nbytes
    if pack:
        yield pack


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _wait(handle: int) -> Any:
    return mpi_ops.synchronize(handle)
