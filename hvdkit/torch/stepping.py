"""When a distributed optimizer reduces, holds, clips and steps."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hvdkit.torch.backend import mpi_ops
from hvdkit.torch.reducer import GradientReducer

logger = logging.getLogger(__name__)

Closure = Callable[[], Any]

_controllers: weakref.WeakSet[StepController] = weakref.WeakSet()
"""The living ones; asked at the end of the program for gradients that would be lost."""


class StepController:
    """Decides when a distributed optimizer reduces, holds, clips and steps.

    Args:
        reducer: Reduces the gradients.
        holds_steps: Whether ``step`` may be called after every backward pass and takes effect
            once a window of ``backward_passes_per_step`` is full.
    """

    def __init__(self, reducer: GradientReducer, holds_steps: bool = False) -> None:
        self.reducer = reducer
        self.holds_steps = holds_steps
        self.held_steps = 0
        self.steps = 0
        """Steps that were really taken."""
        self.skip_synchronize = False
        self.max_grad_norm: float | None = None
        self.scaled = False
        """Whether a loss scaler has stepped within the held window."""
        reducer.holds = lambda: self.will_hold
        _controllers.add(self)

    def unused_passes(self) -> str:
        """Says that a window has begun and no step has used it."""
        passes = self.reducer.options.backward_passes_per_step
        return (
            f"{self.held_steps} of {passes} accumulated backward passes are in no step yet. "
            "Fix: call optimizer.flush() after the last batch."
        )

    def drop_window(self) -> None:
        """Forgets what was accumulated."""
        self.held_steps = 0
        self.scaled = False
        self.reducer.forget()

    @property
    def will_hold(self) -> bool:
        """Whether the next call of ``step`` only accumulates."""
        passes = self.reducer.options.backward_passes_per_step
        return self.holds_steps and self.held_steps + 1 < passes

    def before_zero_grad(self) -> bool:
        """Whether gradients may be cleared now; False within a held window."""
        if self.held_steps:
            return False
        if self.reducer.pending:
            self.reducer.discard()
        self.reducer.begin_window()
        return True

    def step(self, step: Closure, closure: Closure | None, flush: bool = False) -> Any:
        """Runs one call of the optimizer's ``step``."""
        if self.will_hold and not flush:
            self.held_steps += 1
            return closure() if closure is not None else None
        self.held_steps = 0
        self.scaled = False
        if closure is not None:
            result = self._step_with_closure(step, closure)
        else:
            if not (self.reducer.synchronized or self.skip_synchronize):
                self.reducer.synchronize()
            self._clip()
            result = self._adasum_step(step) if self._adds_steps() else step()
        self.steps += 1
        self.reducer.begin_window()
        return result

    def after_scaler(self) -> None:
        """A loss scaler has taken or skipped the step: either way the window is over."""
        self.held_steps = 0
        self.reducer.begin_window()

    def _step_with_closure(self, step: Callable[[Closure], Any], closure: Closure) -> Any:
        if self._adds_steps():
            raise ValueError("op=Adasum adds steps and cannot evaluate a closure. Use op=Average.")

        def distributed_closure() -> Any:
            loss = closure()
            samples = self.reducer.counter.total if self.reducer.counter is not None else 1
            self.reducer.synchronize()
            self._clip()
            return self._mean_loss(loss, samples)

        return step(distributed_closure)

    def _mean_loss(self, loss: Any, samples: int) -> Any:
        if not self.reducer.communicates or loss is None:
            return loss
        value = float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss)
        # A batch without samples has no mean loss: it is not a number, even times 0.
        pair = torch.tensor([value * samples if samples else 0.0, samples], dtype=torch.float64)
        handle = mpi_ops.allreduce_async_(
            pair,
            name="hvdkit.closure.loss",
            op=mpi_ops.Sum,
            process_set=self.reducer.process_set,
        )
        weighted, total = mpi_ops.synchronize(handle).tolist()
        mean = weighted / total if total else 0.0
        return torch.full_like(loss, mean) if isinstance(loss, torch.Tensor) else mean

    def _clip(self) -> None:
        if self.max_grad_norm is not None:
            parameters = [parameter for _, parameter in self.reducer.names()]
            torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)

    def _adds_steps(self) -> bool:
        return self.reducer.options.op == mpi_ops.Adasum and self.reducer.communicates

    def _adasum_step(self, step: Closure) -> Any:
        """Steps on this rank's gradients; then the steps of all ranks are combined.

        Source: Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation",
        https://arxiv.org/abs/2006.02924.
        """
        named = [(n, p) for n, p in self.reducer.names() if p.requires_grad]
        before = [parameter.detach().clone() for _, parameter in named]
        result = step()
        compression = self.reducer.options.compression
        handles = []
        for (name, parameter), start in zip(named, before, strict=True):
            delta, context = compression.compress(parameter.detach() - start)
            handle = mpi_ops.allreduce_async_(
                delta.contiguous(), name=f"{name}.adasum", op=mpi_ops.Adasum
            )
            handles.append((handle, context))
        for (_, parameter), start, (handle, context) in zip(named, before, handles, strict=True):
            delta = compression.decompress(mpi_ops.synchronize(handle), context)
            with torch.no_grad():
                parameter.copy_(start + delta)
        return result


def _report_unused_passes() -> None:
    for controller in _controllers:
        if controller.held_steps:
            logger.warning("%s", controller.unused_passes())


atexit.register(_report_unused_passes)
