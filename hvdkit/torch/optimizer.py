"""``DistributedOptimizer``: any torch optimizer, with its gradients reduced over all ranks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hvdkit.errors import SynchronizationError
from hvdkit.torch import schedule
from hvdkit.torch.backend import mpi_ops
from hvdkit.torch.compression import Compression
from hvdkit.torch.ops_wire import check_op
from hvdkit.torch.reducer import GradientReducer
from hvdkit.torch.reduction import ReductionOptions
from hvdkit.torch.stepping import Closure, StepController
from hvdkit.torch.subclass import named_like
from hvdkit.torch.weighting import SampleCounter


class DistributedMethods:
    """What a distributed optimizer does besides what its own class does.

    Mixed into a subclass of the user's optimizer class. All state is in ``_hvdkit``.
    """

    _hvdkit: StepController

    def step(self, closure: Closure | None = None) -> Any:
        """Waits for the reduced gradients, then steps as the optimizer's own class does.

        Args:
            closure: Recomputes the loss, as for LBFGS. Its gradients are reduced after each
                evaluation and its loss is averaged, so that every rank takes the same decisions.

        Returns:
            What the optimizer's own ``step`` returns.

        Raises:
            SynchronizationError: See :meth:`GradientReducer.synchronize`.
        """
        self._opt_called = True  # what schedulers look at to warn of a wrong order
        return self._hvdkit.step(super().step, closure)  # type: ignore[misc]

    # Schedulers wrap `step` of an optimizer that lacks this mark; torch adds step hooks to a class
    # that lacks the other one. Both happen in the wrapped class already.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Waits until every gradient is the reduced one; ``step`` does not reduce again.

        Does nothing within a held window, as ``step`` itself.
        """
        if not self._hvdkit.will_hold:
            self._hvdkit.reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """As in Horovod: around a ``step`` that follows ``synchronize``."""
        reducer = self._hvdkit.reducer
        if reducer.pending and reducer.communicates:
            raise SynchronizationError(
                "skip_synchronize() without synchronize() would apply this rank's own gradients. "
                "Fix: call optimizer.synchronize() before it."
            )
        self._hvdkit.skip_synchronize = True
        try:
            yield
        finally:
            self._hvdkit.skip_synchronize = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, also those that no step has used yet.

        Raises:
            SynchronizationError: Other ranks step with gradients that this one clears.
        """
        if not self._hvdkit.before_zero_grad():
            return
        if set_to_none:  # the default, which a user's own class need not know
            super().zero_grad()  # type: ignore[misc]
        else:
            super().zero_grad(set_to_none=False)  # type: ignore[misc]

    def flush(self, scaler: Any = None) -> Any:
        """Steps with the gradients accumulated so far, fewer than a whole window.

        Does nothing if there are none. All ranks must call it.

        Args:
            scaler: The loss scaler, where one is used; call its ``update()`` afterwards.

        Raises:
            ValueError: The gradients are scaled and no scaler was given.
        """
        controller = self._hvdkit
        if controller.held_steps and scaler is not None:
            controller.held_steps = self.backward_passes_per_step - 1
            return scaler.step(self)
        if controller.held_steps:
            if controller.scaled:
                raise ValueError(
                    "The accumulated gradients are multiplied by a loss scale. Expected "
                    "flush(scaler). Received: scaler=None."
                )
            self._opt_called = True
            return self._hvdkit.step(super().step, None, flush=True)  # type: ignore[misc]
        return None

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes come before each step."""
        self._hvdkit.reducer.set_passes(passes)

    def set_samples(self, samples: int) -> None:
        """States what the next backward pass weighs, instead of the model's batch size.

        Only for optimizers of ``hvd.distribute``; for example the number of tokens of a batch
        whose loss is a mean over tokens.
        """
        if self._hvdkit.reducer.counter is None:
            raise ValueError(
                "set_samples() needs gradients that are weighted by samples. Expected an optimizer "
                "of hvd.distribute(..., weighting='samples')."
            )
        self._hvdkit.reducer.counter.state(samples)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's GradScaler asks before it unscales: the last moment to stop it.

        Its unscaling leaves no trace in the gradients' version numbers.
        """
        if self._hvdkit.reducer.pending and self._hvdkit.reducer.communicates:
            raise SynchronizationError(
                "torch.amp.GradScaler would unscale gradients that are still being reduced, and "
                "the step would be too large by the scale. Fix: use hvd.GradScaler, which takes "
                "the same arguments, or call optimizer.synchronize() before scaler.step()."
            )
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes before each step."""
        return self._hvdkit.reducer.options.backward_passes_per_step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, with this optimizer's defaults; they are reduced like the others."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._hvdkit.reducer.rescan()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the optimizer's state; a window that had begun is dropped."""
        self._hvdkit.drop_window()
        super().load_state_dict(state_dict)  # type: ignore[misc]
        # Loading replaces the list of groups.
        self._hvdkit.reducer.follow(self.param_groups)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's own; warns where accumulated gradients would not be in it."""
        if self._hvdkit.held_steps:
            warnings.warn(self._hvdkit.unused_passes(), stacklevel=2)
        return super().state_dict()  # type: ignore[misc,no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        base = type(self).__mro__[2]
        controller = self._hvdkit
        settings = (
            controller.reducer.options,
            controller.reducer.counter is not None,
            controller.holds_steps,
            controller.max_grad_norm,
        )
        return _rebuild, (base, self.__getstate__(), controller.reducer.names(), settings)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = mpi_ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = mpi_ops.global_process_set,
) -> Any:
    """Makes an optimizer reduce its gradients over all ranks before each step.

    Unlike Horovod's, it is the *same object* that comes back, its class replaced by a subclass of
    the same name: state, defaults, hooks, and schedulers that hold it all stay valid.

    Args:
        optimizer: Any ``torch.optim.Optimizer``, new or already used.
        named_parameters: ``model.named_parameters()``; names the reductions in timelines.
        compression: ``Compression.none``, ``.fp16``, ``.bf16``, or a class with ``compress`` and
            ``decompress``.
        backward_passes_per_step: Backward passes between two steps. Their gradients are summed,
            as in Horovod; ``hvd.distribute(accumulate=...)`` takes the mean.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Adasum``.
        gradient_predivide_factor: Divides before the sum, and multiplies after it.
        num_groups: Horovod's former spelling of `groups`.
        groups: Reduces parameters together: a number of groups, or lists of parameters.
        sparse_as_dense: Reduces sparse gradients as dense ones.
        process_set: The ranks that reduce; others step on their own gradients.

    Returns:
        `optimizer` itself.

    Raises:
        ValueError: An option or a name is wrong, or the optimizer is distributed already.

    Example:
        >>> import hvdkit.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> type(optimizer).__name__
        'SGD'
    """
    mpi_ops.size()  # says so where hvd.init() was forgotten
    if num_groups:
        warnings.warn(
            "num_groups has become groups; pass groups=...", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    everyone = process_set is mpi_ops.global_process_set
    if op == mpi_ops.Adasum and not everyone:
        raise ValueError("op=Adasum works over all ranks only. Received: a process set.")
    check_op(op)
    options = ReductionOptions(
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=None if everyone else process_set,
    )
    names = None if named_parameters is None else list(named_parameters)
    return make_distributed(optimizer, names, options)


def make_distributed(
    optimizer: torch.optim.Optimizer,
    names: list[tuple[str, torch.Tensor]] | None,
    options: ReductionOptions,
    counter: SampleCounter | None = None,
    holds_steps: bool = False,
) -> Any:
    """Gives `optimizer` the methods of :class:`DistributedMethods`, in place."""
    if isinstance(optimizer, DistributedMethods):
        raise ValueError("This optimizer is distributed already. Fix: wrap it once.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"Expected a torch.optim.Optimizer. Received: optimizer={type(optimizer).__name__}."
        )
    own_step = optimizer.__dict__.get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):
        raise ValueError(
            "optimizer.step was replaced on this instance, which would hide the reduction. "
            "Fix: distribute the optimizer first, and replace its step after that."
        )
    reducer = GradientReducer(optimizer.param_groups, names, options, counter)
    optimizer._hvdkit = StepController(reducer, holds_steps)  # type: ignore[attr-defined]
    if "step" in optimizer.__dict__:
        # Put there by a scheduler that was built earlier; it would hide the distributed one.
        del optimizer.__dict__["step"]
    optimizer.__class__ = _distributed_class(type(optimizer))
    return optimizer


@functools.cache
def _distributed_class(base: type) -> type:
    subclass: type = named_like(base, DistributedMethods)
    return subclass


def _rebuild(
    base: type,
    state: Mapping[str, Any],
    names: list[tuple[str, torch.Tensor]],
    settings: tuple[ReductionOptions, bool, bool, float | None],
) -> Any:
    """Makes a copied or unpickled optimizer distributed again, over its own parameters."""
    options, counts_samples, holds_steps, max_grad_norm = settings
    optimizer = base.__new__(base)
    optimizer.__setstate__(state)
    counter = SampleCounter() if counts_samples else None
    make_distributed(optimizer, names, options, counter, holds_steps)
    optimizer._hvdkit.max_grad_norm = max_grad_norm
    schedule.reattach(optimizer)
    return optimizer
