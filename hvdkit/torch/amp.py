"""Gradient clipping and loss scaling in the one order that is right on many ranks.

Reduce, unscale, clip, agree on one found_inf, step. Clipping or unscaling before the reduction has
ended changes gradients that are on their way; deciding on infinities rank by rank leaves ranks
with different weights and loss scales.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from hvdkit.errors import SynchronizationError
from hvdkit.torch.backend import mpi_ops
from hvdkit.torch.optimizer import DistributedMethods
from hvdkit.torch.reducer import reducers_of


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` of the gradients reduced over all ranks.

    Waits for the reductions of the parameters' optimizer; the ``step`` after it does not reduce
    again. With loss scaling, call ``scaler.unscale_(optimizer)`` of :class:`GradScaler` first.

    Args:
        parameters: Parameters of one or more distributed optimizers.
        max_norm: Largest norm to leave.
        norm_type: Which norm; ``inf`` for the largest magnitude.
        error_if_nonfinite: Raises where the norm is not finite.
        foreach: As in torch.

    Returns:
        The norm before clipping, a 0-dimensional tensor, the same on all ranks.

    Example:
        >>> import hvdkit.torch as hvd
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> hvd.clip_grad_norm_([weight], max_norm=1.0)
        tensor(5.)
    """
    chosen = _synchronized(parameters)
    if any(reducer.holds() for reducer in reducers_of(chosen)):
        max_norm = float("inf")  # within a held window only the norm so far is known
    return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite, foreach)


def clip_grad_value_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    """``torch.nn.utils.clip_grad_value_`` of the gradients reduced over all ranks.

    Example:
        >>> import hvdkit.torch as hvd
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, -4.0])
        >>> hvd.clip_grad_value_([weight], 1.0)
        >>> weight.grad
        tensor([ 1., -1.])
    """
    chosen = _synchronized(parameters)
    if not any(reducer.holds() for reducer in reducers_of(chosen)):
        torch.nn.utils.clip_grad_value_(chosen, clip_value, foreach)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose every decision is the same on all ranks.

    Takes the arguments of torch's. ``unscale_`` and ``step`` wait for the reduced gradients; a
    gradient that is infinite on one rank makes all ranks skip the step and lower the scale.
    Ranks whose scales differ, as after a checkpoint that only one of them loaded, are an error.

    Example:
        >>> import hvdkit.torch as hvd
        >>> scaler = hvd.GradScaler("cpu", init_scale=8.0)
        >>> scaler.scale(torch.tensor(1.0))
        tensor(8.)
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Waits for the reduced gradients, divides them by the scale, agrees on found_inf."""
        distributed = isinstance(optimizer, DistributedMethods)
        if not self._enabled or (distributed and optimizer._hvdkit.will_hold):
            return
        if distributed:
            optimizer.synchronize()
        super().unscale_(optimizer)
        self._agree_on_found_inf(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps, unless a gradient is not finite on some rank; within a held window only holds."""
        holds = isinstance(optimizer, DistributedMethods) and optimizer._hvdkit.will_hold
        if holds and self._enabled:
            optimizer._hvdkit.scaled = True
        if not self._enabled or holds:
            return optimizer.step(*args, **kwargs)
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            # Fused optimizers would unscale by themselves, before found_inf is agreed on.
            self.unscale_(optimizer)
        result = super().step(optimizer, *args, **kwargs)
        if isinstance(optimizer, DistributedMethods):
            optimizer._hvdkit.after_scaler()
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapts the scale; does nothing within a held window, where no gradient was checked."""
        if not self._enabled:
            return
        checked = any(
            state["found_inf_per_device"] for state in self._per_optimizer_states.values()
        )
        if checked or new_scale is not None:
            super().update(new_scale)

    def _agree_on_found_inf(self, optimizer: torch.optim.Optimizer) -> None:
        if not mpi_ops.is_initialized():
            return
        process_set = mpi_ops.global_process_set
        if isinstance(optimizer, DistributedMethods):
            process_set = optimizer._hvdkit.reducer.process_set
        if not process_set.included() or process_set.size() == 1:
            return
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        scale = self.get_scale()
        local = float(any(flag.item() for flag in found.values()))
        values = torch.tensor([local, scale, 1.0 / scale], dtype=torch.float64)
        handle = mpi_ops.allreduce_async_(
            values, name="hvdkit.scaler.found_inf", op=mpi_ops.Max, process_set=process_set
        )
        anywhere, largest, inverse_smallest = mpi_ops.synchronize(handle).tolist()
        if abs(largest * inverse_smallest - 1.0) > 1e-9:
            raise SynchronizationError(
                "Ranks use different loss scales. Expected one scale on all ranks. Received: "
                f"{scale} here, up to {largest}. Fix: load the scaler's state on every rank, or "
                "hand the scaler to hvd.distribute(), which broadcasts it."
            )
        for flag in found.values():
            flag.fill_(anywhere)


def _synchronized(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters, once the gradients of their optimizers are the reduced ones."""
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for reducer in reducers_of(chosen):
        if not reducer.holds():
            reducer.synchronize()
    return chosen
