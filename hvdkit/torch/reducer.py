"""Reduces the gradients of one optimizer over all ranks while the backward pass still runs.

Each gradient's reduction starts in the hook that autograd calls when the gradient is complete.
At the end of a window the ranks exchange a few numbers: how many of them take part, how many
samples they computed, whether one of them has gradients that it could not start or clears them
without a step, and a checksum of what it did start. In the usual step that tells every rank that
all is under way. Only where it is not (unused or late parameters, sparse gradients, partial
windows) do they agree on what to reduce, parameter by parameter; a rank without a gradient then
contributes zeros.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvdkit.compressor import name_of
from hvdkit.errors import SynchronizationError
from hvdkit.torch.agreement import Totals, agree_on_gradients, agree_on_largest, exchange_counts
from hvdkit.torch.backend import mpi_ops
from hvdkit.torch.buckets import Bucket, Job, Slot, plan_buckets, single_bucket, unique_names
from hvdkit.torch.reduction import ReductionOptions, dense_reduction
from hvdkit.torch.sparse import sparse_reduction
from hvdkit.torch.weighting import SampleCounter

_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter -> weak reference to the reducer whose hooks it has."""

_optimizers_in: dict[int, int] = {}
"""Process set -> how many optimizers have reduced in it. All its members count alike."""


def reducers_of(parameters: Sequence[torch.Tensor]) -> list[GradientReducer]:
    """The living reducers that these parameters belong to, each once."""
    found: dict[int, GradientReducer] = {}
    for parameter in parameters:
        reference = _owners.get(parameter)
        reducer = reference() if reference is not None else None
        if reducer is not None:
            found[id(reducer)] = reducer
    return list(found.values())


class GradientReducer:
    """Starts, awaits and finishes the reductions of one optimizer's gradients.

    Args:
        param_groups: The optimizer's own list; groups added to it later are found.
        named_parameters: Names for the reductions, or None for numbered ones.
        options: What the user asked for.
        counter: Weighs gradients by samples, or None for Horovod's meaning: the plain average
            over ranks of the sum over backward passes.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        named_parameters: Sequence[tuple[str, torch.Tensor]] | None,
        options: ReductionOptions,
        counter: SampleCounter | None = None,
    ) -> None:
        self.options = options
        self.counter = counter
        self.synchronized = False
        self.holds: Callable[[], bool] = lambda: False
        """Whether the window is still to be filled, so that nothing may be reduced yet."""
        self._param_groups = param_groups
        self._names = unique_names(named_parameters or [])
        self._slots: dict[torch.Tensor, Slot] = {}
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._jobs: list[Job] = []
        self._launched_mask = 0
        self._active = False
        self._communicates = False
        self._find_slots()
        if named_parameters is not None:
            self._check_all_named()
        for bucket in plan_buckets(list(self._slots.values()), options.groups, options.multi_stage):
            self._add_bucket(bucket)
        for slot in self._slots.values():
            self._hook(slot)

    @functools.cached_property
    def _prefix(self) -> str:
        """Keeps optimizers apart; the first one's names stay the user's own.

        Numbered at the first reduction, not at construction: a copy that only one rank makes, and
        never steps, must not shift the names of later optimizers.
        """
        set_id = self.process_set.process_set_id
        number = _optimizers_in.get(set_id, 0)
        _optimizers_in[set_id] = number + 1
        where = f"set{set_id}." if set_id else ""
        return f"{where}optimizer{number}." if number else where

    @property
    def process_set(self) -> Any:
        """The Horovod process set that reduces."""
        return self.options.process_set or mpi_ops.global_process_set

    @property
    def communicates(self) -> bool:
        """Whether there is another rank to reduce with."""
        return bool(
            mpi_ops.is_initialized() and self.process_set.included() and self.process_set.size() > 1
        )

    @property
    def pending(self) -> bool:
        """Whether a backward pass has happened that no step has used."""
        return self._active and not self.synchronized

    def names(self) -> list[tuple[str, torch.Tensor]]:
        """Every parameter with the name of its reduction."""
        return [(slot.name, slot.parameter) for slot in self._slots.values()]

    def set_passes(self, passes: int) -> None:
        """Changes ``backward_passes_per_step`` between two windows."""
        if self.pending:
            raise SynchronizationError(
                "backward_passes_per_step may change only between two steps. "
                "Fix: call it after optimizer.step()."
            )
        self.options = dataclasses.replace(self.options, backward_passes_per_step=passes)

    def rescan(self) -> None:
        """Finds parameters that were added or unfrozen since the last call."""
        self._find_slots()
        for slot in self._slots.values():
            if slot.parameter.requires_grad and not slot.hooked:
                if slot.index not in self._bucket_of:
                    self._add_bucket(single_bucket([slot]))
                # The gradient of a backward pass that the hook has missed counts all the same.
                slot.passes = int(slot.parameter.grad is not None)
                self._hook(slot)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Ends the window: when it returns, every gradient is the reduced one on every rank.

        Does nothing if it was called since the last backward pass.

        Raises:
            SynchronizationError: A gradient was changed while it was being reduced, or ranks
                disagree on whether a gradient is sparse.
        """
        if self.synchronized:
            return
        self.rescan()
        self._check_ownership()
        if not self.communicates:
            self._scale_gradients(self._local_factor())
        elif self.options.op != mpi_ops.Adasum:  # which adds steps, not gradients
            totals = self._complete_launches(discarding=False)
            self._finish_jobs(self._correction(totals))
        self._close_window()
        self.synchronized = True

    def discard(self) -> None:
        """Ends the window without a result, as the generator's step does to a discriminator.

        Raises:
            SynchronizationError: Another rank steps with these gradients; on all ranks.
        """
        if self.communicates and self.options.op != mpi_ops.Adasum:
            self.rescan()
            self._complete_launches(discarding=True)
        self.forget()

    def begin_window(self) -> None:
        """The gradients were used or cleared: the next step needs new ones."""
        self.synchronized = False
        self.rescan()

    def follow(self, param_groups: list[dict[str, Any]]) -> None:
        """Works on another list of groups from now on."""
        self._param_groups = param_groups
        self.rescan()

    def release(self, parameter: torch.Tensor) -> None:
        """Gives a parameter up to another optimizer."""
        for handle in self._slots[parameter].hook_handles:
            handle.remove()

    def forget(self) -> None:
        """Drops what is under way, as after loading a state. Waits for started reductions."""
        self._finish_jobs(1.0, check=False)
        self._close_window()
        self.synchronized = False

    def _close_window(self) -> None:
        self._jobs.clear()
        self._launched_mask = 0
        self._active = False
        for slot in self._slots.values():
            slot.passes, slot.grad = 0, None
        for bucket in self._buckets:
            bucket.ready, bucket.launched = 0, False
        if self.counter is not None:
            self.counter.reset()

    # --- parameters -----------------------------------------------------------------------

    def _find_slots(self) -> None:
        for group_index, group in enumerate(self._param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter not in self._slots:
                    name = self._names.get(parameter, f"group{group_index}.{index}")
                    slot = Slot(parameter, name, len(self._slots))
                    self._slots[parameter] = slot

    def _check_all_named(self) -> None:
        unnamed = sum(parameter not in self._names for parameter in self._slots)
        if unnamed:
            raise ValueError(
                "named_parameters must name every parameter of the optimizer. "
                f"Received: {len(self._names)} names, {unnamed} parameters without one. "
                "Fix: chain the named_parameters() of every model that the optimizer trains."
            )

    def _add_bucket(self, bucket: Bucket) -> None:
        self._buckets.append(bucket)
        for slot in bucket.slots:
            self._bucket_of[slot.index] = bucket

    def _hook(self, slot: Slot) -> None:
        if not slot.parameter.requires_grad:
            return
        for former in reducers_of([slot.parameter]):
            if former is not self:
                former.release(slot.parameter)
        this = weakref.ref(self)
        _owners[slot.parameter] = this

        def on_gradient(parameter: torch.Tensor) -> None:
            reducer = this()
            if reducer is not None:
                reducer._on_gradient(slot)

        slot.hook_handles.append(slot.parameter.register_post_accumulate_grad_hook(on_gradient))
        if self.counter is not None:
            slot.hook_handles.append(slot.parameter.register_hook(_micro_batch_hook(this, slot)))
        slot.hooked = True

    def _check_ownership(self) -> None:
        for slot in self._slots.values():
            reference = _owners.get(slot.parameter) if slot.hooked else None
            if reference is not None and reference() is not self:
                raise SynchronizationError(
                    f"Parameter {slot.name!r} now belongs to another DistributedOptimizer. Fix: "
                    "step the newest optimizer only, or give each its own parameters."
                )

    # --- during the backward pass ---------------------------------------------------------

    def _on_gradient(self, slot: Slot) -> None:
        if self.synchronized:  # a loss scaler skipped the step: these gradients are the next ones
            self.synchronized = False
        if not self._active:
            self._active = True
            self._communicates = self.communicates and self.options.op != mpi_ops.Adasum
        if self.counter is not None:
            self.counter.accumulate()
        slot.passes += 1
        allowed = self.options.backward_passes_per_step
        if slot.passes > allowed:
            raise SynchronizationError(
                f"Parameter {slot.name!r} received {slot.passes} gradients before step(), expected "
                f"at most backward_passes_per_step={allowed}. Fix: call optimizer.step() after "
                f"{allowed} backward passes, or raise backward_passes_per_step. Where one backward "
                "pass gave them, as with a parameter in two segments of "
                "torch.utils.checkpoint: pass use_reentrant=False."
            )
        if slot.passes < allowed or not self._communicates:
            return
        grad = slot.parameter.grad
        assert grad is not None
        if grad.is_sparse and not self.options.sparse_as_dense:
            return
        bucket = self._bucket_of[slot.index]
        bucket.ready += 1
        if bucket.ready == len(bucket.slots):
            self._launch(bucket, bucket.slots)
        self._advance_finished()

    @torch.no_grad()  # a backward pass with create_graph=True is not to record the reduction
    def _launch(self, bucket: Bucket, slots: Sequence[Slot]) -> None:
        bucket.launched = True
        self._launched_mask |= 1 << bucket.slots[0].index
        for slot in slots:
            if slot.parameter.grad is None or (self.counter is not None and not slot.passes):
                slot.parameter.grad = torch.zeros_like(slot.parameter)
        grads = [slot.start() for slot in slots]
        if self.counter is not None:
            self._agree_on_reference(self.counter)
            if self.counter.rank_factor != 1.0:
                for slot, grad in zip(slots, grads, strict=True):
                    grad.mul_(self.counter.rank_factor)
                    slot.start()
        steps = dense_reduction(
            self.options, self._prefix + bucket.name, grads, self.process_set, self._pass_scale
        )
        self._jobs.append(Job(slots, steps))

    @property
    def _pass_scale(self) -> float:
        """Makes a mean over backward passes of what was accumulated, where samples are counted."""
        return 1.0 if self.counter is None else 1.0 / self.options.backward_passes_per_step

    def _advance_finished(self) -> None:
        """Starts the next stage of compressed reductions whose last one is done."""
        if not self.options.multi_stage:
            return
        for job in self._jobs:
            if job.results is None and mpi_ops.poll(job.handle):
                job.advance(mpi_ops.synchronize(job.handle))

    # --- at the end of a window -----------------------------------------------------------

    def _complete_launches(self, discarding: bool) -> Totals:
        """Makes sure that all ranks have started the same reductions."""
        if self.counter is not None:
            self._agree_on_reference(self.counter)
        totals = self._exchange_counts(discarding)
        if totals.other_options:
            passes, op, predivide, compression, _ = self._shared_options()
            raise SynchronizationError(
                "Expected the same options on all ranks, whose reductions do not match otherwise. "
                f"Received: backward_passes_per_step={passes}, {op=}, "
                f"gradient_predivide_factor={predivide}, compression={compression} and "
                f"groups={self.options.groups!r} on this rank, and others on another. Fix: pass "
                "the same on every rank."
            )
        if totals.discarding not in (0, totals.active):
            raise SynchronizationError(
                f"{totals.discarding} of {totals.active} ranks cleared their gradients between "
                "backward() and step(), and the others step. Expected one decision on all ranks. "
                "Fix: to skip a batch, decide it together, for example from hvd.allreduce(loss)."
            )
        if totals.disagreement:
            self._launch_what_is_left()
        return totals

    def _exchange_counts(self, discarding: bool) -> Totals:
        left = any(
            self._contributes(slot) and not self._bucket_of[slot.index].launched
            for slot in self._slots.values()
            if slot.hooked
        )
        samples = self.counter.total if self.counter is not None else 0
        name = f"{self._prefix}hvdkit.counts"
        return exchange_counts(
            name,
            self.process_set,
            samples,
            left,
            discarding,
            self._launched_mask,
            self._shared_options(),
            self._device,
        )

    def _shared_options(self) -> tuple[Any, ...]:
        """The options that have to be the same on all ranks."""
        options = self.options
        groups = options.groups
        if groups is not None and not isinstance(groups, int):
            slots = self._slots
            groups = [[slots[p].index if p in slots else None for p in group] for group in groups]
        return (
            options.backward_passes_per_step,
            options.op,
            options.gradient_predivide_factor,
            name_of(options.compression),
            groups,
        )

    @property
    def _device(self) -> torch.device:
        return next(iter(self._slots)).device

    def _contributes(self, slot: Slot) -> bool:
        if self.counter is not None:
            return slot.passes > 0
        return slot.parameter.grad is not None

    def _kind_of_gradient(self, slot: Slot) -> tuple[int, int]:
        grad = slot.parameter.grad
        if not slot.hooked or grad is None or not self._contributes(slot):
            return 0, 0
        if grad.is_sparse:
            return grad.sparse_dim(), int(self.options.sparse_as_dense)
        return 0, 1

    def _launch_what_is_left(self) -> None:
        """Agrees with the other ranks on the gradients that not all of them have started."""
        slots = list(self._slots.values())
        kinds = [self._kind_of_gradient(slot) for slot in slots]
        name = f"{self._prefix}hvdkit.flags"
        agreed = agree_on_gradients(name, self.process_set, kinds, self._device)
        for slot, (sparse_dim, dense) in zip(slots, agreed, strict=True):
            if sparse_dim and dense and not self.options.sparse_as_dense:
                raise SynchronizationError(
                    f"The gradient of {slot.name!r} is sparse on one rank and dense on another. "
                    "Fix: pass sparse_as_dense=True, or use it the same way on all ranks."
                )
            if sparse_dim and not self._contributes(slot):
                slot.parameter.grad = _empty_sparse(slot.parameter, sparse_dim)
        for bucket in self._buckets:
            if bucket.launched:
                continue
            dense_slots = [slot for slot in bucket.slots if agreed[slot.index][1]]
            if dense_slots:
                self._launch(bucket, dense_slots)
            for slot in bucket.slots:
                sparse_dim, dense = agreed[slot.index]
                if sparse_dim and not dense:
                    self._launch_sparse(slot)

    def _launch_sparse(self, slot: Slot) -> None:
        grad = slot.start()
        if self.counter is not None:
            grad = grad * (self.counter.rank_factor * self._pass_scale)
        steps = sparse_reduction(grad, self._prefix + slot.name, self.options.op, self.process_set)
        self._jobs.append(Job([slot], steps))

    def _finish_jobs(self, correction: float, check: bool = True) -> None:
        # Ranks may hold the jobs in different orders. Waiting for the earliest stage first makes
        # sure that nobody waits for a later stage while somebody else has not yet started it.
        stage = 1
        while waiting := [job for job in self._jobs if job.results is None]:
            for job in waiting:
                if job.stage == stage:
                    job.advance(mpi_ops.synchronize(job.handle))
            stage += 1
        dense: list[torch.Tensor] = []
        for job in self._jobs:
            assert job.results is not None
            for slot, result in zip(job.slots, job.results, strict=True):
                if check and slot.touched():
                    raise SynchronizationError(_touched_text(slot.name))
                dense += self._store(slot, result, correction)
        if correction != 1.0 and dense:
            torch._foreach_mul_(dense, correction)

    def _store(self, slot: Slot, result: torch.Tensor, correction: float) -> list[torch.Tensor]:
        """Puts a result into ``.grad``; returns it where the correction is still to be applied."""
        grad = slot.parameter.grad
        assert grad is not None
        if result.is_sparse:
            slot.parameter.grad = result * correction if correction != 1.0 else result
            return []
        if grad.is_sparse:
            slot.parameter.grad = (result * correction).to_sparse(grad.sparse_dim())
            return []
        if result.data_ptr() != grad.data_ptr() or result.dtype != grad.dtype:
            grad.copy_(result)
        return [grad]

    # --- weights --------------------------------------------------------------------------

    def _agree_on_reference(self, counter: SampleCounter) -> None:
        """Makes the size of a usual micro-batch the same number on all ranks, once."""
        if counter.reference is None:
            name = f"{self._prefix}hvdkit.reference"
            largest = agree_on_largest(name, self.process_set, counter.first, self._device)
            counter.reference = max(1, largest)

    def _correction(self, totals: Totals) -> float:
        """What the reduced gradients are multiplied by: 1 unless ranks joined or were uneven."""
        if self.options.op != mpi_ops.Average:
            self._refuse_joined(totals)
            return 1.0
        ranks = int(self.process_set.size())
        if self.counter is None:
            return ranks / totals.active
        if not totals.samples:
            return 1.0
        assert self.counter.reference is not None
        passes = self.options.backward_passes_per_step
        return ranks * self.counter.reference * passes / totals.samples

    def _refuse_joined(self, totals: Totals) -> None:
        if self.options.op != mpi_ops.Sum and totals.active != self.process_set.size():
            raise SynchronizationError(
                "Ranks have joined, and Horovod counts them as zeros in this reduction. Expected "
                f"op=Average or Sum with hvd.join(). Received: op={self.options.op}."
            )

    def _local_factor(self) -> float:
        if self.counter is None or not self.counter.total:
            return 1.0
        return self.counter.first / self.counter.total

    def _scale_gradients(self, factor: float) -> None:
        if factor == 1.0:
            return
        for slot in self._slots.values():
            if slot.passes and slot.parameter.grad is not None:
                slot.parameter.grad.mul_(factor)


def _micro_batch_hook(
    this: weakref.ref[GradientReducer], slot: Slot
) -> Callable[[torch.Tensor], torch.Tensor | None]:
    def before_accumulation(grad: torch.Tensor) -> torch.Tensor | None:
        reducer = this()
        if reducer is None or reducer.counter is None:
            return None
        if reducer.synchronized:
            reducer.synchronized = False
        reducer.counter.open_micro_batch()
        factor = reducer.counter.micro_factor
        if factor == 1.0:
            return None
        return grad * factor if factor else torch.zeros_like(grad)

    return before_accumulation


def _empty_sparse(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[sparse_dim:]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def _touched_text(name: str) -> str:
    return (
        f"The gradient of {name!r} was changed while it was being reduced, so ranks would apply "
        "different steps. Expected no change between backward() and step(). Fix: clip with "
        "hvd.clip_grad_norm_, scale with hvd.GradScaler, or call optimizer.synchronize() first."
    )
