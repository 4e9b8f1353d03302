"""Exact means over uneven batches: every sample weighs the same, whatever rank computed it.

A rank's loss is the mean over its own batch. The plain average of such gradients over ranks gives
the samples of a small batch too much weight: local batches of 30 and 10 with gradients 1 and 5
average to 3.0, where one process with all 40 samples computes 2.0. The weights here cost nothing
as long as all batches have the same size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch

from hvdkit.errors import SynchronizationError


class SampleCounter:
    """Counts the samples of each backward pass of one window on this rank.

    A window is the backward passes between two optimizer steps. With micro-batches of ``n_m``
    samples its gradient is accumulated as ``sum(g_m * n_m / n_0)``, which needs no scaling while
    the sizes are equal.
    """

    def __init__(self) -> None:
        self.reference: int | None = None
        """Samples of a usual micro-batch, the same number on all ranks, once they agreed."""
        self.total = 0
        self.first = 0
        """Samples of the window's first micro-batch."""
        self._current = 0
        self._pending: int | None = None
        self._task: int | None = None
        """Id of the backward pass that last entered a forward pass."""
        self._weighed: int | None = None
        """What that pass weighs, once its first gradient has arrived; None where it was stated."""
        self._arrived = False
        self._stated: int | None = None
        self._opened = False
        self._noted = False

    def differentiate(self, samples: int, task: int) -> None:
        """A backward pass entered a forward pass that had seen `samples` samples.

        The forward passes of one backward pass are summed, as the parts of one batch. One that is
        entered when the first gradients have already arrived has parameters of its own, as the
        second head of a model: its samples are the same ones again.

        Args:
            samples: Length of the forward pass's batch.
            task: Id of the backward pass.

        Raises:
            SynchronizationError: Such forward passes had batches of different sizes.
        """
        if task != self._task:
            self._task, self._arrived, self._pending = task, False, None
        if not self._arrived:
            self._pending = (self._pending or 0) + samples
        elif self._weighed not in (None, samples):
            raise SynchronizationError(
                "One backward pass went through forward passes with different parameters and "
                f"different batch sizes. Received: {self._weighed} and {samples} samples. Fix: "
                "call optimizer.set_samples(n) before backward(), or distribute(..., "
                "weighting='ranks')."
            )

    def state(self, samples: int) -> None:
        """The user says what the next backward pass weighs, for example in tokens."""
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
            raise ValueError(
                f"Expected a whole number of samples or tokens, at least 0. Received: {samples!r}."
            )
        self._stated = samples

    def open_micro_batch(self) -> None:
        """A parameter's gradient arrived; the first one of a backward pass opens a micro-batch.

        Raises:
            SynchronizationError: Nothing says how many samples the gradient stands for.
        """
        samples = self._pending if self._stated is None else self._stated
        if samples is None:
            if self._opened:
                return
            raise SynchronizationError(
                "Cannot tell how many samples this gradient stands for: the loss did not come "
                "from calling the model that hvd.distribute() was given, with a tensor among its "
                "inputs. Fix: call that model, or call optimizer.set_samples(n) before each "
                "backward()."
            )
        self._opened = self._noted = self._arrived = True
        self._weighed = samples if self._stated is None else None
        self._current = samples
        self._pending = self._stated = None

    def accumulate(self) -> None:
        """A gradient was added to ``.grad``, which ``torch.autograd.grad`` does not do."""
        if self._noted:
            self._noted = False
            self.total += self._current
            self.first = self.first or self._current

    @property
    def micro_factor(self) -> float:
        """What the gradient of the current micro-batch is multiplied by before it is added.

        0 for a batch without samples, whose mean loss is not a number.
        """
        return self._current / (self.first or self._current) if self._current else 0.0

    @property
    def rank_factor(self) -> float:
        """What the window's gradient is multiplied by before it is reduced."""
        assert self.reference
        return self.first / self.reference

    def reset(self) -> None:
        """Starts a new window."""
        self.total = self.first = self._current = 0
        self._pending = self._stated = None
        self._opened = self._noted = False


def batch_size_of(inputs: Any, batch_dim: int) -> int | None:
    """Length along `batch_dim` of the first tensor found in nested inputs, None without one."""
    if isinstance(inputs, torch.Tensor):
        return inputs.shape[batch_dim] if inputs.dim() > batch_dim else None
    if isinstance(inputs, Mapping):
        inputs = inputs.values()
    elif not isinstance(inputs, (list, tuple)):
        return None
    for item in inputs:
        size = batch_size_of(item, batch_dim)
        if size is not None:
            return size
    return None


def watch_forward(
    model: torch.nn.Module,
    counter: SampleCounter,
    batch_dim: int | None,
    before: Callable[[], None],
) -> None:
    """Counts the samples of each forward pass of `model` once a backward pass goes through it.

    Forward passes that are never differentiated, such as an evaluation that forgot
    ``torch.no_grad()``, count nothing.

    Args:
        model: The module that the training loop calls.
        counter: Receives the batch sizes.
        batch_dim: Dimension of the inputs that counts samples; None counts each batch as one.
        before: Called before each forward pass with gradients enabled.
    """

    watch = _Watch(model, counter, batch_dim, before)
    model.register_forward_pre_hook(watch.before_forward)
    model.register_forward_hook(watch.after_forward, with_kwargs=True)


class _Watch:
    """The hooks of one model. A copied or unpickled model's watch watches nothing."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        counter: SampleCounter | None = None,
        batch_dim: int | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._model = weakref.ref(model) if model is not None else lambda: None
        self._counter = counter
        self._batch_dim = batch_dim
        self._before = before

    def __reduce__(self) -> Any:
        return _Watch, ()

    @torch.compiler.disable
    def before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and self._before is not None and module is self._model():
            self._before()

    @torch.compiler.disable
    def after_forward(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        counter = self._counter
        if counter is None or module is not self._model():
            return
        samples = 1 if self._batch_dim is None else batch_size_of((*args, kwargs), self._batch_dim)
        # A parameter that the model returns as it is would keep the hook for ever.
        outputs = [t for t in _tensors_in(output) if t.requires_grad and not t.is_leaf]
        if samples is None or not outputs:
            return
        uncounted = [samples]

        def on_gradient(gradient: torch.Tensor) -> None:
            if uncounted:
                counter.differentiate(uncounted.pop(), torch._C._current_graph_task_id())

        for tensor in outputs:
            tensor.register_hook(on_gradient)


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
        return
    if isinstance(output, Mapping):
        output = output.values()
    elif is_dataclass(output) and not isinstance(output, type):
        output = vars(output).values()
    elif not isinstance(output, (list, tuple)):
        return
    for item in output:
        yield from _tensors_in(item)
