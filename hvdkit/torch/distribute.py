"""``distribute``: everything that makes a one-process training script right on many ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hvdkit import options
from hvdkit.torch import schedule
from hvdkit.torch.amp import GradScaler
from hvdkit.torch.backend import mpi_ops
from hvdkit.torch.compression import Compression
from hvdkit.torch.optimizer import make_distributed
from hvdkit.torch.reduction import ReductionOptions
from hvdkit.torch.state import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from hvdkit.torch.stepping import StepController
from hvdkit.torch.subclass import named_like
from hvdkit.torch.weighting import SampleCounter, watch_forward

COMPRESSIONS = {"none": Compression.none, "fp16": Compression.fp16, "bf16": Compression.bf16}


def distribute(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    *,
    scale_lr: str = "linear",
    base_global_batch: int | None = None,
    batch_size: int | None = None,
    warmup_steps: int = 0,
    warmup_start: str = "base",
    compression: Any = "none",
    accumulate: int = 1,
    weighting: str = "samples",
    batch_dim: int = 0,
    max_grad_norm: float | None = None,
    root_rank: int = 0,
    summary: bool = True,
) -> tuple[Any, ...]:
    """Makes model, optimizer, scheduler and scaler ready to train on all ranks.

    Broadcasts the root's model, optimizer, scheduler and scaler state; makes the optimizer reduce
    gradients as an exact mean over all samples of a step; scales the learning rate by the ratio
    of global batches and warms it up. The training loop stays as it is::

        loss.backward()
        optimizer.step()
        scheduler.step()

    The losses must be means over the samples of a batch. With ``accumulate=k`` that loop runs
    once for each micro-batch: ``step`` and ``zero_grad`` take effect on every k-th call,
    ``scheduler.step`` only after a step that did, and ``optimizer.flush()`` steps with a last
    window that is not full.

    Args:
        model: The module that the loop calls; its non-persistent buffers are broadcast too.
        optimizer: Any torch optimizer over the model's parameters, new or used.
        scheduler: Any scheduler of ``torch.optim.lr_scheduler`` over `optimizer`, or None.
            ReduceLROnPlateau decides from the mean metric of all ranks.
        scaler: A :class:`GradScaler` of this package, or None.
        scale_lr: ``"linear"``, ``"sqrt"`` or ``"none"``: by what the learning rate follows the
            ratio of global batch sizes.
        base_global_batch: Samples a step that the learning rate was chosen for. Left out, that is
            one rank's batch: the ratio is ranks x accumulate.
        batch_size: Samples of one rank's batch; needed with `base_global_batch`.
        warmup_steps: Optimizer steps until the full rate.
        warmup_start: ``"base"``, from the unscaled rate (Goyal et al. 2017,
            https://arxiv.org/abs/1706.02677); ``"zero"``, from 0.
        compression: ``"none"``, ``"fp16"``, ``"bf16"``, or a class of ``Compression``.
        accumulate: Backward passes a step; their gradients are averaged.
        weighting: ``"samples"``: every sample weighs the same, also where batches are uneven.
            ``"ranks"``: every batch weighs the same, whatever its size.
        batch_dim: Dimension of the model's inputs that counts samples.
        max_grad_norm: Clips the norm of the reduced gradients, after unscaling; None for none.
        root_rank: The rank whose state all ranks start from.
        summary: Whether the root logs and prints what was done, in a few lines.

    Returns:
        ``(model, optimizer)``, then `scheduler` and `scaler` where they were given; the same
        objects that came in.

    Raises:
        ValueError: An option is wrong; the text lists the legal values.
        SynchronizationError: The ranks' models or optimizers differ in structure.

    Example:
        >>> import hvdkit.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = hvd.distribute(model, optimizer, summary=False)
        >>> model(torch.ones(4, 2)).mean().backward()
        >>> optimizer.step()
    """
    options.check_options(
        scale_lr=scale_lr,
        warmup_steps=warmup_steps,
        warmup_start=warmup_start,
        accumulate=accumulate,
        weighting=weighting,
        max_grad_norm=max_grad_norm,
    )
    options.check_whole("batch_dim", batch_dim, 0)
    _check_parts(model, optimizer, scheduler, scaler)
    chosen = options.chosen_compression(compression, COMPRESSIONS)
    record = options.scaling_record(
        scale_lr, base_global_batch, batch_size, accumulate, mpi_ops.size()
    )

    _broadcast_state(model, optimizer, scheduler, scaler, root_rank)
    counter = SampleCounter()
    named = _names_of(model, optimizer)
    reduction = ReductionOptions(compression=chosen, backward_passes_per_step=accumulate)
    make_distributed(optimizer, named, reduction, counter, holds_steps=True)
    controller = optimizer._hvdkit  # type: ignore[attr-defined]
    controller.max_grad_norm = max_grad_norm
    counted_dim = batch_dim if weighting == "samples" else None
    watch_forward(model, counter, counted_dim, controller.reducer.rescan)
    schedule.control_lr(
        optimizer, record, warmup_steps, options.start_multiplier(record, warmup_start)
    )
    if scheduler is not None:
        _prepare_scheduler(scheduler, controller)
    if summary and mpi_ops.rank() == root_rank:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        done = (record, warmup_steps, chosen, accumulate, weighting, mpi_ops.size())
        print(options.summary_of(rates, *done), flush=True)
    given = [part for part in (scheduler, scaler) if part is not None]
    return (model, optimizer, *given)


def _check_parts(model: Any, optimizer: Any, scheduler: Any, scaler: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"Expected a torch.nn.Module. Received: model={type(model).__name__}.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"Expected a torch.optim.Optimizer. Received: optimizer={type(optimizer).__name__}."
        )
    if scheduler is not None:
        if not isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
            raise ValueError(
                "Expected a scheduler of torch.optim.lr_scheduler. Received: "
                f"scheduler={type(scheduler).__name__}."
            )
        if scheduler.optimizer is not optimizer:
            raise ValueError(
                "Expected a scheduler over the same optimizer. Received: a scheduler over another "
                f"{type(scheduler.optimizer).__name__}. Fix: build it with this optimizer."
            )
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ValueError(
            "Expected a scaler that decides for all ranks together. Received: "
            f"{type(scaler).__module__}.{type(scaler).__name__}. Fix: use hvd.GradScaler, which "
            "takes the same arguments."
        )


def _names_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> list[tuple[str, torch.Tensor]]:
    """Names of the optimizer's parameters; those outside the model get numbers."""
    named = list(model.named_parameters())
    known = {id(parameter) for _, parameter in named}
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                named.append((f"group{group_index}.{index}", parameter))
    return named


def _broadcast_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    scaler: Any,
    root_rank: int,
) -> None:
    broadcast_parameters(model, root_rank)
    broadcast_optimizer_state(optimizer, root_rank)
    for part in (scheduler, scaler):
        if part is not None:
            state = broadcast_object(part.state_dict(), root_rank)
            if mpi_ops.rank() != root_rank:
                part.load_state_dict(state)


def _prepare_scheduler(scheduler: Any, controller: StepController) -> None:
    """One plateau decision for all ranks; no schedule step for a held optimizer step."""
    if isinstance(scheduler, ReduceLROnPlateau):
        schedule.synchronized_plateau(scheduler, _weighted_mean)
    else:
        scheduler.__class__ = _holding_class(type(scheduler), controller.steps)


def _holding_class(base: Any, steps: int) -> Any:
    """A class of one scheduler that steps only after optimizer steps that were taken."""
    seen = [steps]

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        controller = self.optimizer._hvdkit
        holding = controller.held_steps > 0 and controller.steps == seen[0]
        seen[0] = controller.steps
        if not holding:
            base.step(self, *args, **kwargs)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        return _rebuild_scheduler, (base,), self.__dict__

    return named_like(base, step=step, __reduce_ex__=reduce_ex)


def _rebuild_scheduler(base: Any) -> Any:
    """Makes a copied or unpickled scheduler; its optimizer begins to count steps anew."""
    scheduler = base.__new__(base)
    scheduler.__class__ = _holding_class(base, 0)
    return scheduler


def _weighted_mean(value: float, weight: float) -> float:
    pair = torch.tensor([value * weight if weight else 0.0, weight], dtype=torch.float64)
    handle = mpi_ops.allreduce_async_(pair, name="hvdkit.plateau", op=mpi_ops.Sum)
    total, weights = mpi_ops.synchronize(handle).tolist()
    return float(total / weights) if weights else math.nan
