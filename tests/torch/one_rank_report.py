"""Runs collectives and training on one rank and prints JSON, for tests.torch.test_local_ops."""

from __future__ import annotations

import json
import warnings

import torch

import hvdkit.torch as hvd
from hvdkit.torch import ops
from hvdkit.torch.backend import HOROVOD_INSTALLED, mpi_ops

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def plain(value):
    """A value that JSON can hold and that keeps dtype and shape."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), str(value.tolist())]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    return value


def attempt(function, *args, **keywords):
    """The result, or the kind of error."""
    try:
        result = function(*args, **keywords)
        return plain(ops.synchronize(result) if function.__name__.endswith("async") else result)
    except (ValueError, RuntimeError) as error:
        return f"raises {type(error).__name__}"


def reductions(report):
    for dtype in DTYPES:
        value = torch.tensor([[0, 1], [3, 2]]).to(dtype)
        for op in ("Average", "Sum", "Min", "Max", "Product", "Adasum"):
            number = getattr(ops, op)
            for factors in ({}, {"prescale_factor": 0.5, "postscale_factor": 3.0}):
                key = f"{dtype} {op} {factors}"
                report[f"allreduce {key}"] = attempt(ops.allreduce, value, op=number, **factors)
                target = value.clone()
                attempt(ops.allreduce_, target, op=number, **factors)
                report[f"allreduce_ {key}"] = plain(target)
                group = [value, value.t()]
                for function in (ops.grouped_allreduce, ops.grouped_allreduce_async):
                    name = f"{function.__name__} {key}"
                    report[name] = attempt(function, group, op=number, **factors)
                report[f"reducescatter {key}"] = attempt(
                    ops.reducescatter, value, op=number, **factors
                )


def moves(report):
    for dtype in DTYPES:
        for value in (torch.tensor([[0, 1], [3, 2]]), torch.tensor(1), torch.empty(0, 2)):
            typed = value.to(dtype)
            key = f"{dtype} {list(value.shape)}"
            for function in (ops.allgather, ops.allgather_async):
                report[f"{function.__name__} {key}"] = attempt(function, typed)
            report[f"broadcast {key}"] = attempt(ops.broadcast, typed, 0)
            report[f"broadcast_ {key}"] = attempt(ops.broadcast_, typed.clone(), 0)
            report[f"broadcast 1 {key}"] = attempt(ops.broadcast, typed, 1)
            report[f"grouped_allgather {key}"] = attempt(ops.grouped_allgather, [typed, typed])
            for splits in (None, [2], [1], torch.tensor([2])):
                report[f"alltoall {splits} {key}"] = attempt(ops.alltoall, typed, splits)
            report[f"alltoall_async {key}"] = attempt(ops.alltoall_async, typed)


def rest(report):
    leaf = torch.arange(4.0).requires_grad_()
    for function in (ops.allreduce, ops.allgather, ops.alltoall, ops.reducescatter):
        leaf.grad = None
        (function(leaf) * torch.arange(4.0)).sum().backward()
        report[f"gradient {function.__name__}"] = plain(leaf.grad)
    sparse = torch.eye(3).to_sparse()
    report["sparse"] = plain(ops.sparse_allreduce_async(sparse, "s", ops.Average)().to_dense())
    report["join"] = [ops.join(), ops.join()]
    report["barrier"] = ops.barrier()
    handle = ops.allreduce_async(torch.ones(1))
    report["handle"] = [type(handle).__name__, type(ops.poll(handle)).__name__]
    ops.synchronize(handle)
    report["used handle"] = ops.synchronize(handle)
    asked = "rank size local_rank local_size cross_rank cross_size is_homogeneous is_initialized"
    report["place"] = [getattr(ops, name)() for name in asked.split()]
    built = "mpi_built nccl_built ddl_built ccl_built cuda_built rocm_built gloo_built"
    report["kinds"] = [type(getattr(ops, name)()).__name__ for name in built.split()]
    report["numbers"] = [ops.Average, ops.Sum, ops.Adasum, ops.Min, ops.Max, ops.Product]
    whole = ops.global_process_set
    report["set"] = [whole.size(), whole.rank(), whole.included(), whole.ranks, str(whole)]
    report["new set"] = [ops.ProcessSet([0]).size(), ops.ProcessSet([0]).included()]
    report["removed"] = ops.remove_process_set(whole)
    report["set in use"] = attempt(ops.allreduce, leaf, process_set=ops.ProcessSet([0]))


def training(report):
    """The whole of hvd.distribute, then a plain script in Horovod's manner."""
    for compression in ("none", "fp16", "bf16"):
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        model, optimizer, scheduler, scaler = hvd.distribute(
            model,
            optimizer,
            scheduler,
            hvd.GradScaler("cpu", init_scale=64.0),
            accumulate=2,
            warmup_steps=2,
            max_grad_norm=0.5,
            compression=compression,
            summary=False,
        )
        for count in (4, 3, 5, 5, 2):
            scaler.scale(model(torch.rand(count, 3)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        optimizer.flush(scaler)
        report[f"trained {compression}"] = [plain(value) for value in model.state_dict().values()]
        report[f"rates {compression}"] = [hvd.effective_lrs(optimizer), scaler.get_scale()]
    layer = torch.nn.Linear(2, 1)
    plain_optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters(), hvd.Compression.fp16
    )
    hvd.broadcast_parameters(layer, root_rank=0)
    hvd.broadcast_optimizer_state(plain_optimizer, root_rank=0)
    layer(torch.ones(1, 2)).sum().backward()
    hvd.clip_grad_norm_(layer.parameters(), 0.1)
    plain_optimizer.step()
    report["plain script"] = [plain(value) for value in layer.state_dict().values()]
    report["objects"] = [hvd.broadcast_object({"a": 1}), hvd.allgather_object([2])]


def main() -> None:
    warnings.simplefilter("ignore")
    report = {"before init": attempt(mpi_ops.size), "initialized": mpi_ops.is_initialized()}
    ops.init()
    for part in (reductions, moves, rest, training):
        part(report)
    ops.shutdown()
    report["after shutdown"] = [mpi_ops.is_initialized(), attempt(ops.allreduce, torch.ones(1))]
    print(json.dumps([HOROVOD_INSTALLED, report]))


if __name__ == "__main__":
    main()
