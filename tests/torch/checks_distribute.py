"""hvd.distribute on real ranks, against one process with the big batch."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hvdkit.errors import SynchronizationError
from tests.torch.checks_optimizer import equal_on_all_ranks, raises


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def train_alone(
    make: Callable[[Any], torch.optim.Optimizer],
    batches: Sequence[slice],
    data: tuple[torch.Tensor, torch.Tensor],
    max_grad_norm: float | None = None,
) -> nn.Module:
    """What one process computes with the big batches."""
    model = network()
    optimizer = make(model.parameters())
    for batch in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0][batch]), data[1][batch]).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
    return model


def distance(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def check_parity_with_the_big_batch(hvd: Any) -> None:
    """K steps on n ranks, accumulated once or twice, are K steps of one process."""
    per_micro_batch, steps = 4, 6
    for accumulate in (1, 2):
        big = per_micro_batch * accumulate * hvd.size()
        data = samples(steps * big)
        batches = [slice(step * big, (step + 1) * big) for step in range(steps)]
        for name, make in OPTIMIZERS.items():
            model = network()
            model, optimizer = hvd.distribute(
                model,
                make(model.parameters()),
                scale_lr="none",
                accumulate=accumulate,
                summary=False,
            )
            for step in range(steps):
                for micro in range(accumulate):
                    start = step * big + (micro * hvd.size() + hvd.rank()) * per_micro_batch
                    mine = slice(start, start + per_micro_batch)
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(data[0][mine]), data[1][mine]).backward()
                    optimizer.step()
            off = distance(model, train_alone(make, batches, data))
            assert off < 1e-9, (name, accumulate, off)


def check_uneven_batches(hvd: Any) -> None:
    """Local batches of 30 and 10 weigh by samples; Horovod's plain average is 3.0 instead of 2."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = hvd.distribute(
        model, torch.optim.SGD(model.parameters(), lr=1.0), scale_lr="none", summary=False
    )
    # Gradients of the mean loss: 1 on rank 0, 5 elsewhere.
    count, value = (30, 1.0) if hvd.rank() == 0 else (10, 5.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((count, 1), value)).mean().backward()
        optimizer.step()
    others = hvd.size() - 1
    expected = (30 * 1.0 + others * 10 * 5.0) / (30 + others * 10)
    assert abs(model.weight.item() + 2 * expected) < 1e-5
    if hvd.size() == 2:
        assert expected == 2.0


def check_uneven_windows_everywhere(hvd: Any) -> None:
    """Uneven micro-batches, ranks without any, last windows that are not full."""
    sizes = [[5, 3, 4], [2, 7], [], [1]]  # of each step, the same list for all ranks
    for compression in ("none", "fp16", "bf16"):
        tolerance = {"none": 1e-9, "fp16": 2e-3, "bf16": 2e-2}[compression]
        model = network()
        model, optimizer = hvd.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            scale_lr="none",
            accumulate=3,
            compression=compression,
            summary=False,
        )
        data = samples(400)
        reference = network()
        alone = torch.optim.SGD(reference.parameters(), lr=0.1)
        start = 0
        for step in range(len(sizes)):
            big_batch = []
            for rank in range(hvd.size()):
                for size in sizes[(step + rank) % len(sizes)]:
                    mine = slice(start, start + size)
                    big_batch += range(start, start + size)
                    start += size
                    if rank == hvd.rank():
                        loss = nn.functional.cross_entropy(model(data[0][mine]), data[1][mine])
                        loss.backward()
                        optimizer.step()
            # Ranks with fewer micro-batches end the window early; no step was due before.
            for _ in range(len(sizes[(step + hvd.rank()) % len(sizes)]), 3):
                optimizer.step()
            optimizer.zero_grad()
            alone.zero_grad()
            nn.functional.cross_entropy(
                reference(data[0][big_batch]), data[1][big_batch]
            ).backward()
            alone.step()
        off = distance(model, reference)
        assert off < tolerance, (compression, off)
        assert equal_on_all_ranks(hvd, model[0].weight)


def check_flush_of_a_short_window(hvd: Any) -> None:
    data = samples(12 * hvd.size())
    model = network()
    model, optimizer = hvd.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        scale_lr="none",
        accumulate=4,
        summary=False,
    )
    used: list[int] = []
    for micro in range(3):
        start = (micro * hvd.size() + hvd.rank()) * 4
        mine = slice(start, start + 4)
        nn.functional.cross_entropy(model(data[0][mine]), data[1][mine]).backward()
        optimizer.step()
        optimizer.zero_grad()  # within the window: keeps what is accumulated
    with pytest.warns(UserWarning, match="3 of 4 accumulated backward passes"):
        optimizer.state_dict()
    used = list(range(12 * hvd.size()))
    before = model[0].weight.detach().clone()
    optimizer.flush()
    assert not torch.equal(before, model[0].weight)
    optimizer.flush()  # nothing is left
    reference = train_alone(
        lambda parameters: torch.optim.SGD(parameters, lr=0.1), [slice(0, len(used))], data
    )
    assert distance(model, reference) < 1e-9


def check_rank_weighting(hvd: Any) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = hvd.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        scale_lr="none",
        weighting="ranks",
        summary=False,
    )
    count, value = (30, 1.0) if hvd.rank() == 0 else (10, 5.0)
    model(torch.full((count, 1), value)).mean().backward()
    optimizer.step()
    expected = (1.0 + 5.0 * (hvd.size() - 1)) / hvd.size()
    assert abs(model.weight.item() + expected) < 1e-6


def check_stated_weights(hvd: Any) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = hvd.distribute(
        model, torch.optim.SGD(model.parameters(), lr=1.0), scale_lr="none", summary=False
    )
    tokens = 100 if hvd.rank() == 0 else 20
    optimizer.set_samples(tokens)
    model(torch.full((4, 1), 1.0 + hvd.rank())).mean().backward()
    optimizer.step()
    weights = [100] + [20] * (hvd.size() - 1)
    expected = sum(w * (1 + rank) for rank, w in enumerate(weights)) / sum(weights)
    assert abs(model.weight.item() + expected) < 1e-5
    raises(ValueError, "at least 0", optimizer.set_samples, -1)


def check_samples_that_cannot_be_counted(hvd: Any) -> None:
    model = network()
    model, optimizer = hvd.distribute(
        model, torch.optim.SGD(model.parameters(), lr=1.0), summary=False
    )
    loss = model[0](torch.ones(2, 6, dtype=torch.float64)).mean()
    raises(SynchronizationError, "set_samples(n)", loss.backward)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()


def check_evaluation_without_no_grad_counts_nothing(hvd: Any) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = hvd.distribute(
        model, torch.optim.SGD(model.parameters(), lr=1.0), scale_lr="none", summary=False
    )
    for _ in range(2):
        if hvd.rank() == 0:
            model(torch.ones(64, 1))  # never differentiated
        optimizer.zero_grad()
        model(torch.full((4, 1), float(hvd.rank()))).mean().backward()
        optimizer.step()
    assert abs(model.weight.item() + (hvd.size() - 1)) < 1e-6


def check_state_of_the_root_is_everywhere(hvd: Any) -> None:
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].register_buffer("extra", torch.full((1,), float(hvd.rank())), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    scaler = hvd.GradScaler("cpu", init_scale=2.0 ** (hvd.rank() + 4))
    if hvd.rank() == 0:
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
    model, optimizer, scheduler, scaler = hvd.distribute(
        model, optimizer, scheduler, scaler, summary=False
    )
    for value in (*model.parameters(), *model.buffers()):
        assert equal_on_all_ranks(hvd, value.float())
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert scheduler.last_epoch == 1
    assert scaler.get_scale() == 16.0
    model(torch.full((4, 2), float(hvd.rank()))).sum().backward()
    optimizer.step()
    assert equal_on_all_ranks(hvd, model[0].weight)
    assert optimizer.state[model[0].weight]["step"].item() == 2


def check_scaled_rate_and_warmup(hvd: Any) -> None:
    weight = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(weight.weight)
    steps = 4
    model, optimizer = hvd.distribute(
        weight, torch.optim.SGD(weight.parameters(), lr=0.5), warmup_steps=steps, summary=False
    )
    seen = []
    for _ in range(6):
        optimizer.zero_grad()
        before = model.weight.item()
        model(torch.ones(2, 1)).mean().backward()
        optimizer.step()
        seen.append(before - model.weight.item())
    size = hvd.size()
    expected = [0.5 * (1 + (size - 1) * min(1.0, (step + 1) / steps)) for step in range(6)]
    assert all(abs(a - b) < 1e-5 for a, b in zip(seen, expected, strict=True)), (seen, expected)
    assert hvd.effective_lrs(optimizer) == [0.5 * size]
    raises(ValueError, "distributed already", lambda: hvd.distribute(model, optimizer))


def check_batch_sizes_as_ratio(hvd: Any) -> None:
    layer = nn.Linear(1, 1)
    _, optimizer = hvd.distribute(
        layer,
        torch.optim.SGD(layer.parameters(), lr=0.1),
        scale_lr="sqrt",
        base_global_batch=64,
        batch_size=32,
        accumulate=8,
        summary=False,
    )
    assert abs(hvd.effective_lrs(optimizer)[0] - 0.1 * (32 * 8 * hvd.size() / 64) ** 0.5) < 1e-9


def check_scheduler_counts_real_steps(hvd: Any) -> None:
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    layer, optimizer, scheduler = hvd.distribute(
        layer, optimizer, scheduler, accumulate=2, scale_lr="none", summary=False
    )
    assert isinstance(scheduler, torch.optim.lr_scheduler.ExponentialLR)
    rates = []
    for _ in range(6):
        layer(torch.ones(1, 1)).mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.25, 0.25, 0.125]


def check_plateau_decides_once_for_all(hvd: Any) -> None:
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    layer, optimizer, plateau = hvd.distribute(layer, optimizer, plateau, summary=False)
    # The last rank alone sees an improvement; the mean over ranks gets worse.
    for step in range(3):
        alone_better = hvd.size() > 1 and hvd.rank() == hvd.size() - 1
        metric = -float(step) if alone_better else 10.0 * step
        plateau.step(metric)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert equal_on_all_ranks(hvd, torch.tensor([plateau.best], dtype=torch.float64))


def check_gradient_clipping(hvd: Any) -> None:
    data = samples(24 * hvd.size())
    big = 4 * hvd.size()
    model = network()
    model, optimizer = hvd.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        scale_lr="none",
        max_grad_norm=0.05,
        summary=False,
    )
    for step in range(6):
        start = step * big + hvd.rank() * 4
        mine = slice(start, start + 4)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0][mine]), data[1][mine]).backward()
        optimizer.step()
    batches = [slice(step * big, (step + 1) * big) for step in range(6)]
    reference = train_alone(
        lambda parameters: torch.optim.SGD(parameters, lr=0.5), batches, data, max_grad_norm=0.05
    )
    assert distance(model, reference) < 1e-9


def check_join_within_distribute(hvd: Any) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = hvd.distribute(
        model, torch.optim.SGD(model.parameters(), lr=1.0), scale_lr="none", summary=False
    )
    for _ in range(1 + hvd.rank()):
        optimizer.zero_grad()
        model(torch.full((4, 1), 3.0)).mean().backward()
        optimizer.step()
    hvd.join()
    assert abs(model.weight.item() + 3.0 * (1 + hvd.rank())) < 1e-5


def check_resume_continues_the_warmup(hvd: Any) -> None:
    def start() -> tuple[nn.Module, Any]:
        layer = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(layer.weight)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9)
        return layer, optimizer

    def steps(model: nn.Module, optimizer: Any, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(2, 1, dtype=torch.float64)).mean().backward()
            optimizer.step()

    model, optimizer = hvd.distribute(*start(), warmup_steps=6, summary=False)
    steps(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(model, optimizer, 5)
    for loaded_before in (True, False):
        resumed, second = start()
        if loaded_before and hvd.rank() == 0:  # only the root has the checkpoint
            resumed.load_state_dict(saved[0])
            second.load_state_dict(copy.deepcopy(saved[1]))
        resumed, second = hvd.distribute(resumed, second, warmup_steps=6, summary=False)
        if not loaded_before:
            resumed.load_state_dict(saved[0])
            second.load_state_dict(copy.deepcopy(saved[1]))
        steps(resumed, second, 5)
        assert torch.equal(resumed.weight, model.weight), (loaded_before, resumed.weight)


def check_copy_of_a_distributed_optimizer(hvd: Any) -> None:
    model = network()
    model, optimizer = hvd.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), warmup_steps=3, summary=False
    )
    other_model, other = copy.deepcopy((model, optimizer))
    inputs = torch.full((2 + hvd.rank(), 6), 1.0 + hvd.rank(), dtype=torch.float64)
    for chosen, its_optimizer in ((model, optimizer), (other_model, other)):
        if chosen is other_model:  # nobody watches the copied model's inputs
            raises(SynchronizationError, "set_samples(n)", chosen(inputs).mean().backward)
            its_optimizer.zero_grad()
            its_optimizer.set_samples(2 + hvd.rank())
        chosen(inputs).mean().backward()
        its_optimizer.step()
    assert torch.equal(model[0].weight, other_model[0].weight)
    assert hvd.effective_lrs(optimizer) == hvd.effective_lrs(other)


def check_arguments(hvd: Any) -> None:
    def call(**keywords: Any) -> None:
        layer = nn.Linear(1, 1)
        hvd.distribute(layer, torch.optim.SGD(layer.parameters(), lr=0.1), **keywords)

    def check(text: str, **keywords: Any) -> None:
        raises(ValueError, text, lambda: call(**keywords))

    check("'linear', 'sqrt', 'none'", scale_lr="cubic")
    check("'none', 'fp16', 'bf16'", compression="fp8")
    check("'samples', 'ranks'", weighting="tokens")
    check("'base', 'zero'", warmup_start=0.5)
    check("accumulate", accumulate=0)
    check("warmup_steps", warmup_steps=-1)
    check("max_grad_norm", max_grad_norm=0.0)
    check("together", base_global_batch=32)
    check("hvd.GradScaler", scaler=torch.amp.GradScaler("cpu"))
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    check("same optimizer", scheduler=torch.optim.lr_scheduler.StepLR(other, 1))
    raises(ValueError, "torch.nn.Module", lambda: hvd.distribute("model", other))


def check_summary_is_said_once(hvd: Any) -> None:
    layer = nn.Linear(1, 1)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        hvd.distribute(layer, torch.optim.SGD(layer.parameters(), lr=0.1), warmup_steps=10)
    text = output.getvalue()
    if hvd.rank() == 0:
        assert len(text.splitlines()) <= 4
        for part in (f"{hvd.size()} ranks", f"0.1 -> {0.1 * hvd.size():g}", "warmup 10 steps"):
            assert part in text, text
    else:
        assert text == ""


def accumulating(hvd: Any, **keywords: Any) -> tuple[nn.Module, Any]:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return hvd.distribute(
        layer,
        torch.optim.SGD(layer.parameters(), lr=1.0),
        scale_lr="none",
        summary=False,
        **keywords,
    )


def check_gradients_taken_without_accumulating_count_nothing(hvd: Any) -> None:
    model, optimizer = accumulating(hvd)
    torch.autograd.grad(model(torch.ones(4, 1)).mean(), list(model.parameters()))
    model(torch.ones(4, 1)).mean().backward()
    optimizer.step()
    assert abs(model.weight.item() + 1.0) < 1e-6


def check_clipping_and_unscaling_in_every_micro_batch(hvd: Any) -> None:
    for scaled in (False, True):
        model, optimizer = accumulating(hvd, accumulate=2)
        scaler = hvd.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        for value in (1.0, 3.0):
            scaler.scale(model(torch.full((4, 1), value)).mean()).backward()
            scaler.unscale_(optimizer)
            hvd.clip_grad_norm_(model.parameters(), 1e3)
            scaler.step(optimizer)
            scaler.update()
        assert abs(model.weight.item() + 2.0) < 1e-6, model.weight


def check_synchronize_within_a_held_window(hvd: Any) -> None:
    model, optimizer = accumulating(hvd, accumulate=2)
    for value in (1.0, 3.0):
        model(torch.full((4, 1), value + hvd.rank())).mean().backward()
        optimizer.synchronize()
        optimizer.step()
    assert abs(model.weight.item() + 2.0 + (hvd.size() - 1) / 2) < 1e-6, model.weight


def check_flush_with_a_scaler(hvd: Any) -> None:
    model, optimizer = accumulating(hvd, accumulate=3)
    scaler = hvd.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(4, 1)).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    raises(ValueError, "flush(scaler)", optimizer.flush)
    optimizer.flush(scaler)
    scaler.update()
    assert abs(model.weight.item() + 1.0) < 1e-6


def check_a_metric_without_samples_weighs_nothing(hvd: Any) -> None:
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    _, _, plateau = hvd.distribute(layer, optimizer, plateau, summary=False)
    empty = hvd.size() > 1 and hvd.rank() == 0
    plateau.step(float("nan") if empty else 1.0, weight=0 if empty else 10)
    assert plateau.best == 1.0


def check_a_saved_model(hvd: Any) -> None:
    model, optimizer = accumulating(hvd)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(torch.ones(1, 1)), model(torch.ones(1, 1)))
    model(torch.ones(4, 1)).mean().backward()
    optimizer.step()
    assert abs(model.weight.item() + 1.0) < 1e-6


class TwoHeads(nn.Module):
    """A trunk with two heads of which each forward pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(1, 1, bias=False)
        self.heads = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        for weight in self.parameters():
            nn.init.ones_(weight)

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.trunk(inputs))


def check_two_forward_passes_in_one_loss(hvd: Any) -> None:
    for accumulate in (1, 2):
        model, optimizer = hvd.distribute(
            (model := TwoHeads()),
            torch.optim.SGD(model.parameters(), lr=1.0),
            accumulate=accumulate,
            scale_lr="none",
            summary=False,
        )
        for _ in range(accumulate):
            inputs = torch.ones(4, 1)
            (model(inputs, 0).mean() + 0.5 * model(inputs, 1).mean()).backward()
            optimizer.step()
        weights = [weight.item() for weight in model.parameters()]
        assert weights == [1 - 1.5, 1 - 1.0, 1 - 0.5], weights


def check_two_forward_passes_of_other_sizes(hvd: Any) -> None:
    model = TwoHeads()
    model, optimizer = hvd.distribute(
        model, torch.optim.SGD(model.parameters(), lr=1.0), scale_lr="none", summary=False
    )

    def loss() -> torch.Tensor:
        return model(torch.ones(4, 1), 0).mean() + model(torch.ones(2, 1), 1).mean()

    raises(SynchronizationError, "Received: 2 and 4 samples", loss().backward)
    optimizer._hvdkit.drop_window()
    model.zero_grad()
    optimizer.set_samples(3)  # neither of the two sizes
    loss().backward()
    optimizer.step()
    assert [weight.item() for weight in model.parameters()] == [1 - 2.0, 0.0, 0.0]


def check_a_batch_in_chunks(hvd: Any) -> None:
    """Forward passes over parts of a batch count as the whole batch."""
    model, optimizer = accumulating(hvd)
    # Chunks of 4 and 2 samples on the last rank, 4 and 4 on the others: the mean over all samples.
    sizes = (4, 2) if hvd.rank() == hvd.size() - 1 else (4, 4)
    value = float(hvd.rank())
    torch.cat([model(torch.full((size, 1), value)) for size in sizes]).mean().backward()
    optimizer.step()
    ranks, last = hvd.size(), hvd.size() - 1
    mean = (8 * sum(range(last)) + 6 * last) / (8 * ranks - 2)
    assert abs(model.weight.item() + mean) < 1e-6


def check_a_pickled_scheduler(hvd: Any) -> None:
    for make in (
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        torch.optim.lr_scheduler.ReduceLROnPlateau,
    ):
        layer = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        _, _, scheduler = hvd.distribute(
            layer, optimizer, make(optimizer), accumulate=2, scale_lr="none", summary=False
        )
        for copied in (pickle.loads(pickle.dumps(scheduler)), copy.deepcopy(scheduler)):
            assert copied.state_dict() == scheduler.state_dict()
            assert type(copied).__name__ == type(scheduler).__name__
            assert copied.optimizer is not optimizer
            if isinstance(copied, torch.optim.lr_scheduler.ReduceLROnPlateau):
                copied.step(float(hvd.rank()), weight=1)
                assert copied.best == (hvd.size() - 1) / 2
                continue
            for _ in range(4):  # two steps, each held once
                copied.optimizer.set_samples(1)
                sum(p.sum() for p in copied.optimizer.param_groups[0]["params"]).backward()
                copied.optimizer.step()
                copied.step()
            assert copied.last_epoch == scheduler.last_epoch + 2
            assert scheduler.optimizer.param_groups[0]["lr"] == 1.0


def check_a_closure_of_a_rank_without_samples(hvd: Any) -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    layer, optimizer = hvd.distribute(
        layer, torch.optim.LBFGS(layer.parameters(), lr=0.5), scale_lr="none", summary=False
    )
    count = 0 if hvd.size() > 1 and hvd.rank() == 0 else 4

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (layer(torch.ones(count, 1)) ** 2).mean()  # not a number where count is 0
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert first.item() == 1.0
    assert abs(layer.weight.item()) < 0.1
    assert equal_on_all_ranks(hvd, layer.weight)


def check_a_returned_parameter_keeps_no_hooks(hvd: Any) -> None:
    class Returns(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> Any:
            return super().forward(inputs), self.weight

    model = Returns(1, 1, bias=False)
    model, optimizer = hvd.distribute(
        model, torch.optim.SGD(model.parameters(), lr=1.0), scale_lr="none", summary=False
    )
    before = len(model.weight._backward_hooks)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 1))[0].mean().backward()
        optimizer.step()
    assert len(model.weight._backward_hooks) == before


def check_compiled_after_distribute(hvd: Any) -> None:
    model = network()
    data = samples(8 * hvd.size())
    model, optimizer = hvd.distribute(
        model, OPTIMIZERS["sgd"](model.parameters()), scale_lr="none", summary=False
    )
    compiled = torch.compile(model, backend="aot_eager")
    mine = slice(hvd.rank() * 8, hvd.rank() * 8 + 8)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(compiled(data[0][mine]), data[1][mine]).backward()
        optimizer.step()
    everything = slice(0, 8 * hvd.size())
    assert distance(model, train_alone(OPTIMIZERS["sgd"], [everything] * 3, data)) < 1e-9


def check_recomputed_segments(hvd: Any) -> None:
    """Checkpointed segments that share a parameter."""
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        layer = nn.Linear(2, 2, bias=False).double()

        class Twice(nn.Module):
            def __init__(self, layer: nn.Linear, reentrant: bool) -> None:
                super().__init__()
                self.layer, self.reentrant = layer, reentrant

            def forward(self, inputs: torch.Tensor) -> Any:
                for _ in range(2):
                    inputs = checkpoint(self.layer, inputs, use_reentrant=self.reentrant)
                return inputs

        model = Twice(layer, reentrant)
        model, optimizer = hvd.distribute(
            model, torch.optim.SGD(model.parameters(), lr=1.0), scale_lr="none", summary=False
        )
        start = layer.weight.detach().clone()
        inputs = torch.full((4, 2), 1.0 + hvd.rank(), dtype=torch.float64, requires_grad=True)
        loss = model(inputs).mean()
        if reentrant:
            raises(SynchronizationError, "use_reentrant=False", loss.backward)
            optimizer._hvdkit.drop_window()
            continue
        loss.backward()
        optimizer.step()
        expected = start.clone().requires_grad_()
        mean_input = torch.full((4, 2), (1.0 + hvd.size()) / 2, dtype=torch.float64)
        (mean_input @ expected.T @ expected.T).mean().backward()
        assert torch.allclose(layer.weight, start - expected.grad)
