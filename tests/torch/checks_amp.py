"""Clipping and loss scaling on real ranks: reduce, unscale, clip, one found_inf, step."""

from __future__ import annotations

from typing import Any

import horovod.torch as horovod
import torch
from torch import nn

from hvdkit.errors import SynchronizationError
from tests.torch.checks_optimizer import equal_on_all_ranks, mean_rank, parameter, pull, raises


def check_clipping_uses_the_reduced_gradient(hvd: Any) -> None:
    """The mean gradient is (30, 40) times the mean rank; each rank's own one is another."""
    weight = parameter(0.0, 0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    (weight * torch.tensor([30.0, 40.0]) * hvd.rank()).sum().backward()
    norm = hvd.clip_grad_norm_([weight], 1.0)
    assert abs(norm.item() - 50 * mean_rank(hvd)) < 1e-4
    optimizer.step()
    assert torch.allclose(weight, torch.tensor([-0.6, -0.8]), atol=1e-5)


def check_clipping_by_value(hvd: Any) -> None:
    weight = parameter(0.0, 0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    (weight * torch.tensor([8.0, -0.5]) * (hvd.rank() + 1)).sum().backward()
    hvd.clip_grad_value_(weight, 1.0)
    optimizer.step()
    mean = 0.5 * (mean_rank(hvd) + 1)
    assert torch.allclose(weight, torch.tensor([-1.0, min(mean, 1.0)]))


def check_scaler_matches_unscaled_training(hvd: Any) -> None:
    """Horovod's order gives an update that is too large by the scale."""
    for keywords in ({}, {"fused": True}, {"foreach": True}):
        for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
            weight, reference = parameter(1.0, 1.0), parameter(1.0, 1.0)
            scaler = hvd.GradScaler("cpu", init_scale=1024.0)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.Adam([weight], lr=0.1, **keywords), compression=compression
            )
            alone = torch.optim.Adam([reference], lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale((weight * float(hvd.rank() + 1)).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                reference.grad = torch.full_like(reference, mean_rank(hvd) + 1)
                alone.step()
            assert torch.allclose(weight, reference, atol=1e-5), (keywords, compression)
            assert scaler.get_scale() == 1024.0


def check_unscale_then_clip(hvd: Any) -> None:
    weight = parameter(0.0, 0.0)
    scaler = hvd.GradScaler("cpu", init_scale=4096.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    scaler.scale((weight * torch.tensor([30.0, 40.0])).sum()).backward()
    scaler.unscale_(optimizer)
    assert abs(hvd.clip_grad_norm_([weight], 1.0).item() - 50.0) < 1e-4
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(weight, torch.tensor([-0.6, -0.8]))


def check_infinity_on_one_rank(hvd: Any) -> None:
    """All ranks skip the step and halve the scale; Horovod's ranks go separate ways."""
    for bad in (float("inf"), float("nan")):
        for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
            weight = parameter(0.0)
            scaler = hvd.GradScaler("cpu", init_scale=1024.0)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([weight], lr=1.0), compression=compression
            )
            for step in range(3):
                optimizer.zero_grad()
                last_rank_overflows = step == 1 and hvd.rank() == hvd.size() - 1
                value = bad if last_rank_overflows else 1.0
                scaler.scale((weight * value).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
            assert abs(weight.item() + 2.0) < 1e-2, (bad, compression, weight)
            assert equal_on_all_ranks(hvd, weight)


def check_plain_optimizer_with_the_scaler(hvd: Any) -> None:
    """found_inf is agreed on even where nothing reduces the gradients."""
    weight = parameter(0.0)
    scaler = hvd.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    value = float("inf") if hvd.rank() == 0 else 1.0
    scaler.scale((weight * value).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0.0
    assert scaler.get_scale() == 32.0


def check_torchs_own_scaler_is_found_out(hvd: Any) -> None:
    weight = parameter(0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    scaler.scale((weight * 1.0).sum()).backward()
    raises(SynchronizationError, "hvd.GradScaler", scaler.step, optimizer)


def check_ranks_with_different_scales(hvd: Any) -> None:
    weight = parameter(0.0)
    scaler = hvd.GradScaler("cpu", init_scale=2.0 ** (4 + hvd.rank()))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    scaler.scale(weight.sum()).backward()
    raises(SynchronizationError, "different loss scales", scaler.step, optimizer)


def check_disabled_scaler(hvd: Any) -> None:
    weight = parameter(0.0)
    scaler = hvd.GradScaler("cpu", enabled=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    scaler.scale((weight * hvd.rank()).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == -mean_rank(hvd)


def check_scaler_with_accumulation_and_clipping(hvd: Any) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    scaler = hvd.GradScaler("cpu", init_scale=256.0)
    model, optimizer, scaler = hvd.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        scaler=scaler,
        accumulate=2,
        scale_lr="none",
        max_grad_norm=0.5,
        summary=False,
    )
    for _ in range(4):
        scaler.scale(model(torch.full((2, 1), 1.0 + hvd.rank())).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert abs(model.weight.item() + 2 * 0.5) < 1e-5
    assert scaler.get_scale() == 256.0


def check_fp16_never_overflows_and_never_vanishes(hvd: Any) -> None:
    """Horovod: inf for gradients of 4e4, 0.0 for 2e-8."""
    generator = torch.Generator().manual_seed(5 + hvd.rank())
    for magnitude in (1e-8, 2e-8, 1e-4, 1.0, 4e4, 1e6):
        for compression, bound in ((hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2)):
            weight = nn.Parameter(torch.zeros(1000))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([weight], lr=1.0), compression=compression
            )
            gradient = magnitude * (0.5 + torch.rand(1000, generator=generator))
            (weight * gradient).sum().backward()
            optimizer.synchronize()
            exact = hvd.allreduce(gradient.double(), name="exact")
            error = (weight.grad.double() - exact).abs() / exact
            assert error.max() < bound, (magnitude, compression, error.max())
            assert equal_on_all_ranks(hvd, weight.grad)
            optimizer.zero_grad()
    for value, wrong in ((4e4, float("inf")), (2e-8, 0.0)):
        tensor = torch.full((4,), value)
        faulty = horovod.allreduce(tensor, name="faulty", compression=horovod.Compression.fp16)
        assert faulty[0].item() == wrong or hvd.size() == 1


def check_compression_of_many_parameters(hvd: Any) -> None:
    """Buckets, unused parameters, several dtypes and orders that differ between ranks."""
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        weights = [nn.Parameter(torch.zeros(50, 3, dtype=torch.float64)) for _ in range(3)]
        weights += [nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(()))]
        weights += [nn.Parameter(torch.zeros(5, dtype=torch.bfloat16)), parameter(0.0)]
        weights += [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3_000_000))]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(weights, lr=1.0), compression=compression
        )
        for step in range(3):
            optimizer.zero_grad()
            for index, weight in enumerate(weights if hvd.rank() % 2 else reversed(weights)):
                if index != step:
                    (weight.float().sum() * (hvd.rank() + 1.0)).backward()
            optimizer.synchronize()
            for weight in weights:
                if weight.grad is not None:
                    assert equal_on_all_ranks(hvd, weight.grad.double().reshape(-1)[:5])
                    assert weight.grad.dtype == weight.dtype
            optimizer.step()


def check_compression_with_joined_ranks(hvd: Any) -> None:
    weight = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), compression=hvd.Compression.fp16
    )
    for _ in range(1 + hvd.rank()):
        optimizer.zero_grad()
        pull(weight, 6.0)
        optimizer.step()
    hvd.join()
    assert abs(weight.item() + 6.0 * (1 + hvd.rank())) < 1e-2


def check_compressed_allreduce(hvd: Any) -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        tensor = torch.full((10,), 4e4 * (1 + hvd.rank()))
        mean = hvd.allreduce(tensor, name="compressed", compression=compression)
        assert torch.allclose(mean, torch.tensor(4e4 * (1 + mean_rank(hvd))), rtol=1e-2)
        total = hvd.allreduce(tensor, name="total", compression=compression, op=hvd.Sum)
        assert torch.allclose(total, mean * hvd.size(), rtol=1e-2)
        largest = hvd.allreduce(tensor, name="largest", compression=compression, op=hvd.Max)
        assert torch.allclose(largest, torch.tensor(4e4 * hvd.size()), rtol=1e-2)
