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
from hvdkit.optional import require
from hvdkit.torch.backend import mpi_ops

PACK_BYTES = 64 * 2**20
"""Small tensors travel together in buffers of at most this size."""

CHUNK_BYTES = 2**30
"""The largest single broadcast: MPI counts in 32-bit integers."""

_SHOWN_DIFFERENCES = 5


@dataclass(frozen=True)
class _TensorSpec:
    """Stands for a tensor in a structure that is sent as an object."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    with_parameter: bool
    """Whether it lies on its parameter's device; else on the CPU."""


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
    entries = list(_named_entries(params))
    tensors = [(name, value) for name, value in entries if isinstance(value, torch.Tensor)]
    objects = {name: value for name, value in entries if not isinstance(value, torch.Tensor)}
    _check_materialised(tensors)
    if mpi_ops.size() == 1:
        return
    structure = [f"{name}: {_described(tensor)}" for name, tensor in tensors]
    _check_same(structure + [f"{name}: object" for name in objects], root_rank)
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
    tensors: list[torch.Tensor] = []
    tree: Any = _optimizer_tree(optimizer, parameters, tensors) if is_root else None
    groups, state = broadcast_object(tree, root_rank, name="optimizer")
    if not is_root:
        own_state = [optimizer.state.get(parameter, {}) for parameter in parameters]
        tensors = []
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            anchor = group["params"][0] if group["params"] else torch.empty(0)
            for key, option in options.items():
                group[key] = _decode(option, group.get(key), anchor, tensors)
        decoded = {
            index: _decode(entry, own_state[index], parameters[index], tensors)
            for index, entry in state.items()
        }
        optimizer.state.clear()
        optimizer.state.update({parameters[index]: entry for index, entry in decoded.items()})
    _broadcast_tensors(tensors, root_rank)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: Any = mpi_ops.global_process_set,
) -> Any:
    """Returns the root's object on every rank; on the root the very object.

    Args:
        obj: Anything that cloudpickle can send; ignored on the other ranks.
        root_rank: The rank whose object counts, numbered among all ranks.
        name: Name of the operation in timelines.
        process_set: The ranks that take part.

    Example:
        >>> import hvdkit.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object({"epoch": 3}, root_rank=0)
        {'epoch': 3}
    """
    if process_set.size() == 1:
        return obj
    # Horovod's default name is the object's class, and waits for ever where classes differ.
    label = f"hvdkit.object.{name or 'unnamed'}"
    is_root = mpi_ops.rank() == root_rank
    data = _to_bytes(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()], dtype=torch.int64)
    _wait(mpi_ops.broadcast_async_(size, root_rank, f"{label}.size", process_set))
    if not is_root:
        data = torch.empty(int(size.item()), dtype=torch.uint8)
    for index, chunk in enumerate(data.split(CHUNK_BYTES)):
        _wait(mpi_ops.broadcast_async_(chunk, root_rank, f"{label}.{index}", process_set))
    return obj if is_root else _from_bytes(data)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns every rank's object, in the order of ranks.

    Args:
        obj: Anything that cloudpickle can send.
        name: Name of the operation in timelines.

    Example:
        >>> import hvdkit.torch as hvd
        >>> hvd.init()
        >>> hvd.allgather_object("mine")
        ['mine']
    """
    if mpi_ops.size() == 1:
        return [obj]
    label = f"hvdkit.objects.{name or 'unnamed'}"
    data = _to_bytes(obj)
    size = torch.tensor([data.numel()], dtype=torch.int64)
    sizes = _wait(mpi_ops.allgather_async(size, f"{label}.sizes")).tolist()
    gathered = _wait(mpi_ops.allgather_async(data, f"{label}.data"))
    return [_from_bytes(part) for part in gathered.split(sizes)]


# --- structures ---------------------------------------------------------------------------


def _named_entries(params: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(params, torch.nn.Module):
        yield from ((_plain(name), value) for name, value in params.named_parameters())
        yield from ((_plain(name), value) for name, value in params.named_buffers())
        for name, module in _modules_with_extra_state(params):
            yield f"{_plain(name)}._extra_state", module.get_extra_state()
    elif isinstance(params, Mapping):
        yield from sorted((_plain(name), value) for name, value in params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (torch.Tensor, str, bytes)):
        for index, entry in enumerate(params):
            yield entry if isinstance(entry, tuple) else (str(index), entry)
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
            key = f"{_plain(name)}._extra_state"
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


def _optimizer_tree(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    tensors: list[torch.Tensor],
) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """Options and state with specs in place of tensors, which are appended to `tensors`."""
    groups = []
    for group in optimizer.param_groups:
        anchor = group["params"][0] if group["params"] else torch.empty(0)
        groups.append(
            {
                key: _encode(option, anchor, tensors)
                for key, option in group.items()
                if key not in ("params", "param_names")
            }
        )
    state = {
        index: _encode(optimizer.state[parameter], parameter, tensors)
        for index, parameter in enumerate(parameters)
        if parameter in optimizer.state
    }
    return groups, state


def _encode(value: Any, anchor: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        with_parameter = value.device == anchor.device and value.device.type != "cpu"
        return _TensorSpec(len(tensors) - 1, tuple(value.shape), value.dtype, with_parameter)
    if isinstance(value, dict):
        return {key: _encode(entry, anchor, tensors) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [_encode(entry, anchor, tensors) for entry in value]
        if hasattr(value, "_fields"):  # a named tuple takes its fields one by one
            return type(value)(*entries)
        return entries if type(value) is list else type(value)(entries)
    return value


def _decode(value: Any, own: Any, anchor: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
    """Makes room for a received structure, in this rank's own tensors where they fit."""
    if isinstance(value, _TensorSpec):
        device = anchor.device if value.with_parameter else torch.device("cpu")
        fits = (
            isinstance(own, torch.Tensor)
            and tuple(own.shape) == value.shape
            and own.dtype == value.dtype
            and own.device == device
        )
        tensors.append(own if fits else torch.empty(value.shape, dtype=value.dtype, device=device))
        assert len(tensors) == value.index + 1
        return tensors[-1]
    if isinstance(value, dict):
        held = own if isinstance(own, dict) else {}
        return {k: _decode(entry, held.get(k), anchor, tensors) for k, entry in value.items()}
    if isinstance(value, (list, tuple)):
        held = (
            own
            if isinstance(own, (list, tuple)) and len(own) == len(value)
            else [None] * len(value)
        )
        entries = [
            _decode(entry, mine, anchor, tensors) for entry, mine in zip(value, held, strict=True)
        ]
        if hasattr(value, "_fields"):
            return type(value)(*entries)
        return entries if type(value) is list else type(value)(entries)
    return value


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
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def _to_bytes(obj: Any) -> torch.Tensor:
    data = _cloudpickle().dumps(obj)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor) -> Any:
    return _cloudpickle().loads(data.numpy().tobytes())


def _cloudpickle() -> Any:
    return require("cloudpickle", feature="sending objects between ranks", extra="build")


def _wait(handle: int) -> Any:
    return mpi_ops.synchronize(handle)
