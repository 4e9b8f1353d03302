"""allreduce and reducescatter: exact for every dtype, and right beside joined ranks.

Ranks that have called ``join`` take part in Horovod's reductions with zeros. A *census* tells how
many ranks are active: one more number in the same message where tensors are small or fused
anyway, an operation of its own beside a large tensor, which would have to be copied otherwise.
Average is then rescaled; Min, Max and Product are repeated in a form in which zeros do no harm.
Only ``join`` itself needs this, so process sets other than the global one go without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdkit.torch import ops_handles
from hvdkit.torch.backend import mpi_ops
from hvdkit.torch.ops_handles import Steps
from hvdkit.torch.ops_wire import Tensor, Wire, check_op, encode, op_name

_EMBED_LIMIT_BYTES = 64 * 1024
"""Up to here copying a tensor costs less than a second operation."""

_REPEATED = (mpi_ops.Min, mpi_ops.Max, mpi_ops.Product)


def repeats(op: int, process_set: Any) -> bool:
    """Whether a reduction may communicate a second time, where ranks have joined."""
    return op in _REPEATED and takes_census(op, process_set)


def ranks_of(process_set: Any) -> int:
    """How many ranks take part.

    Raises:
        ValueError: The process set is not in use.
    """
    ranks = process_set.size()
    if ranks is None:
        raise ValueError(
            f"The process set is not in use. Received: {process_set}. Fix: call "
            "hvd.add_process_set(process_set) on every rank, or hand it to hvd.init()."
        )
    return int(ranks)


def takes_census(op: int, process_set: Any) -> bool:
    """Whether the result depends on how many ranks have joined."""
    return (
        (op == mpi_ops.Average or op in _REPEATED)
        and process_set.process_set_id == 0
        and process_set.size() > 1
    )


def reduction(
    tensors: Sequence[Tensor],
    targets: Sequence[Tensor] | None,
    name: str,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    grouped: bool,
) -> Steps:
    """One allreduce of one or more tensors.

    Args:
        tensors: What this rank contributes.
        targets: Where the results are written, None for new tensors.
        name: The operation's name on all ranks.
        op: Average, Sum, Adasum, Min, Max or Product.
        prescale_factor: Applied to the contributions.
        postscale_factor: Applied to the results.
        process_set: The ranks that take part.
        grouped: Whether to use Horovod's grouped operation.

    Returns:
        Steps whose result is the list of results.
    """
    check_op(op)
    ranks = ranks_of(process_set)
    wires = [encode(t, op, prescale_factor, postscale_factor, ranks) for t in tensors]
    census = _Census(op, wires, process_set) if takes_census(op, process_set) else None
    in_place = targets is not None and op not in _REPEATED
    reduced: list[Tensor] = [wire.payload for wire in wires]
    handles = []
    for number, members in enumerate(_parts(wires)):
        part_name = name if number == 0 else f"{name}.part{number}"
        send = _send_group if grouped else _send_one
        part = [wires[index] for index in members]
        part_census = census if number == 0 else None
        handles.append((members, send(part, part_name, process_set, part_census, in_place)))
    if census is not None and census.value is None:
        census.handle = mpi_ops.allreduce_async_(
            census.number, name=f"{name}.active", op=mpi_ops.Sum, process_set=process_set
        )
    error: Exception | None = None
    for members, (handle, unpack) in handles:
        try:
            outputs = unpack((yield handle))
        except mpi_ops.HorovodInternalError as failure:
            error = error or failure
            continue
        for index, output in zip(members, outputs, strict=True):
            reduced[index] = output
    if census is not None and census.handle is not None:
        census.value = yield census.handle
    if error is not None:
        raise error
    active: Any = ranks
    if census is not None:
        if op == mpi_ops.Average:
            active = census.active()
        elif not census.complete():
            for index, wire in enumerate(wires):
                reduced[index] = yield from _repeat(wire, f"{name}.active{index}", process_set)
    results = [w.decode(r, active) for w, r in zip(wires, reduced, strict=True)]
    return results if targets is None else _write(results, targets)


def scattering(
    tensors: Sequence[Tensor],
    name: str,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    grouped: bool,
) -> Steps:
    """One reducescatter of one or more tensors; see :func:`reduction`."""
    ranks = process_set.size()
    for tensor in tensors:
        if op not in (mpi_ops.Average, mpi_ops.Sum):
            raise ValueError(
                f"reducescatter expects op=Average or op=Sum. Received: op={op_name(op)}. "
                "Fix: use allreduce and keep this rank's part."
            )
        if tensor.dim() == 0:
            raise ValueError(
                "reducescatter splits the first dimension of a tensor among ranks. Received: a "
                "tensor without dimensions. Fix: use allreduce."
            )
    wires = [encode(t, op, prescale_factor, postscale_factor, ranks) for t in tensors]
    results: list[Any] = [None] * len(wires)
    handles = []
    for number, members in enumerate(_parts(wires)):
        first = wires[members[0]]
        keywords = {
            "name": name if number == 0 else f"{name}.part{number}",
            "op": first.op,
            "process_set": process_set,
            "prescale_factor": first.prescale,
            "postscale_factor": first.postscale,
        }
        payloads = [wires[index].payload for index in members]
        if grouped:
            handles.append((members, mpi_ops.grouped_reducescatter_async(payloads, **keywords)))
        else:
            handles.append((members, mpi_ops.reducescatter_async(payloads[0], **keywords)))
    for members, handle in handles:
        outputs = yield handle
        for index, output in zip(members, outputs if grouped else (outputs,), strict=True):
            results[index] = wires[index].decode(output, ranks)
    return results


class _Census:
    """Learns whether all ranks of a reduction were active."""

    def __init__(self, op: int, wires: Sequence[Wire], process_set: Any) -> None:
        self.value: Tensor | None = None
        """The reduced number, once it is known, or the place where it will be."""
        self.handle: int | None = None
        self._op = op
        self._ranks: int = process_set.size()
        self._wire = wires[0]
        self._factor = 1.0
        self.number = torch.ones(1, dtype=torch.int32, device=wires[0].payload.device)

    @property
    def fits(self) -> bool:
        """Whether the number can travel with the first wire, whose factors apply to it too."""
        factors = (self._wire.prescale, self._wire.prescale * self._wire.postscale)
        return all(1e-9 < abs(factor) < 1e9 for factor in factors)

    def marker(self) -> float:
        """What each active rank adds to the message."""
        op, prescale = self._wire.op, self._wire.prescale
        if op == mpi_ops.Average:
            self._factor = prescale * self._wire.postscale
            return self._ranks
        # A joined rank's zero becomes the result if it takes part.
        return math.copysign(1, prescale) * (-1 if op == mpi_ops.Max else 1)

    def active(self) -> Any:
        """How many ranks were active; on a GPU as a tensor, without waiting for the GPU."""
        assert self.value is not None
        if self.value.is_cuda:
            return (self.value.double() / self._factor).round()
        return max(1, round(float(self.value) / self._factor))

    def complete(self) -> bool:
        """Whether no rank had joined."""
        assert self.value is not None
        if self.handle is not None:
            return int(self.value) == self._ranks
        return bool(self.value != 0)


Unpack = Callable[[Any], Sequence[Tensor]]


def _send_one(
    part: Sequence[Wire], name: str, process_set: Any, census: _Census | None, in_place: bool
) -> tuple[int, Unpack]:
    (wire,) = part
    payload = wire.payload
    small = payload.numel() * payload.element_size() <= _EMBED_LIMIT_BYTES
    keywords = _keywords(wire, name, process_set)
    if census is not None and small and census.fits:
        message = payload.new_empty(payload.numel() + 1)
        message[:-1] = payload.view(-1)
        message[-1] = census.marker()
        census.value = message[-1]
        handle = mpi_ops.allreduce_async_(message, **keywords)
        return handle, lambda output: (output[:-1].view(payload.shape),)
    if in_place or (wire.owned and wire.op not in _REPEATED):
        handle = mpi_ops.allreduce_async_(payload, **keywords)
    else:
        handle = mpi_ops.allreduce_async(payload, **keywords)
    return handle, lambda output: (output,)


def _send_group(
    part: Sequence[Wire], name: str, process_set: Any, census: _Census | None, in_place: bool
) -> tuple[int, Unpack]:
    payloads = [wire.payload for wire in part]
    keywords = _keywords(part[0], name, process_set)
    in_place = in_place or (part[0].op not in _REPEATED and all(wire.owned for wire in part))
    send = mpi_ops.grouped_allreduce_async_ if in_place else mpi_ops.grouped_allreduce_async
    # A group of one is sent as it is; a second tensor would force a copy of it.
    if census is not None and len(part) > 1 and census.fits:
        payloads.append(payloads[0].new_full((1,), census.marker()))
        handle = send(payloads, **keywords)

        def unpack(outputs: Any) -> Sequence[Tensor]:
            census.value = outputs[-1]
            return tuple(outputs[:-1])

        census.value = payloads[-1]
        return handle, unpack
    return send(payloads, **keywords), tuple


def _keywords(wire: Wire, name: str, process_set: Any) -> dict[str, Any]:
    return {
        "name": name,
        "op": wire.op,
        "prescale_factor": wire.prescale,
        "postscale_factor": wire.postscale,
        "process_set": process_set,
    }


def _parts(wires: Sequence[Wire]) -> list[list[int]]:
    """Splits a group into wires that one operation can reduce: integers are averaged by a sum."""
    parts: dict[tuple[int, float, float], list[int]] = {}
    for index, wire in enumerate(wires):
        parts.setdefault((wire.op, wire.prescale, wire.postscale), []).append(index)
    return list(parts.values())


def _repeat(wire: Wire, name: str, process_set: Any) -> Steps:
    """Min, Max or Product over active ranks: each sends its tensor in a row of its own."""
    payload = wire.payload
    rows = payload.new_zeros((process_set.size(), payload.numel() + 1))
    row = rows[process_set.rank()]
    row[:-1] = payload.reshape(-1) * wire.prescale if wire.prescale != 1.0 else payload.view(-1)
    row[-1] = 1
    rows = yield mpi_ops.allreduce_async_(rows, name=name, op=mpi_ops.Sum, process_set=process_set)
    contributions = rows[rows[:, -1] != 0][:, :-1]
    if wire.op == mpi_ops.Product:
        result = contributions.prod(0, dtype=payload.dtype)
    elif wire.op == mpi_ops.Min:
        result = contributions.amin(0)
    else:
        result = contributions.amax(0)
    if wire.postscale != 1.0:
        result = result * wire.postscale
    return result.view(payload.shape)


def _write(results: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        for result, target in zip(results, targets, strict=True):
            if result.data_ptr() != target.data_ptr() or result.dtype != target.dtype:
                target.copy_(result)
    return list(targets)


def compressed_reduction(
    tensors: Sequence[Tensor],
    compression: Any,
    name: str,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
) -> Steps:
    """A reduction by the compression's own ``reduce``, rescaled where ranks have joined."""
    steps = compression.reduce(
        list(tensors), name, op, prescale_factor, postscale_factor, process_set
    )
    handle = next(steps)
    number = torch.ones(1, dtype=torch.int32, device=tensors[0].device)
    census = takes_census(op, process_set)
    census_handle = (
        mpi_ops.allreduce_async_(
            number, name=f"{name}.active", op=mpi_ops.Sum, process_set=process_set
        )
        if census
        else None
    )
    error: Exception | None = None
    results: list[Tensor] = []
    while error is None:
        try:
            handle = steps.send((yield handle))
        except StopIteration as end:
            results = end.value
            break
        except mpi_ops.HorovodInternalError as failure:
            error = failure
    if census_handle is not None:
        yield census_handle
    if error is not None:
        raise error
    if census and (number.is_cuda or int(number) != process_set.size()):
        for result in results:
            result.mul_(process_set.size() / number)
    return results


def run_reduction(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: Any,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    grouped: bool,
) -> list[Tensor]:
    """Reduces and waits; `compression` is one that has a ``reduce``, or None."""
    factors = (prescale_factor, postscale_factor)
    kind = "grouped_allreduce" if grouped else "allreduce"
    with ops_handles.blocking_name(kind, name) as chosen:
        if compression is not None:
            steps = compressed_reduction(tensors, compression, chosen, op, *factors, process_set)
            return list(ops_handles.run(steps))
        steps = reduction(tensors, None, chosen, op, *factors, process_set, grouped)
        return list(ops_handles.run(steps, repeats(op, process_set)))
