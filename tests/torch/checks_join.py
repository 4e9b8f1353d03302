"""Checks of ``join`` on real ranks: joined ranks weigh nothing."""

from __future__ import annotations

import horovod.torch as horovod
import pytest
import torch

from hvdkit.torch import ops

SMALL, LARGE = 3, 40_000


def check_horovod_counts_joined_ranks_as_zeros(hvd):
    if ops.rank() == 0:
        horovod.join()
        return
    one, five = torch.ones(1), torch.full((1,), 5.0)
    active = ops.size() - 1
    assert horovod.allreduce(one, name="raw.mean").item() == pytest.approx(active / ops.size())
    assert horovod.allreduce(five, name="raw.min", op=horovod.Min).item() == 0.0
    horovod.join()


def reductions(count, active, tag):
    """Runs every operation among `active` ranks, rank r contributing r + 1."""
    values = [float(rank + 1) for rank in active]
    own = torch.full((count,), ops.rank() + 1.0)
    product = 1.0
    for value in values:
        product *= value
    expected = {
        ops.Average: sum(values) / len(values),
        ops.Sum: sum(values),
        ops.Min: min(values),
        ops.Max: max(values),
        ops.Product: product,
    }
    for op, result in expected.items():
        name = f"{tag}.{op}"
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            reduced = ops.allreduce(own.to(dtype), name=f"{name}.{dtype}", op=op)
            torch.testing.assert_close(reduced, torch.full((count,), result).to(dtype))
        in_place = own.clone()
        assert ops.allreduce_(in_place, name=f"{name}.in", op=op) is in_place
        torch.testing.assert_close(in_place, torch.full((count,), result))
        for reduced in ops.grouped_allreduce([own, own.view(1, -1)], name=f"{name}.g", op=op):
            torch.testing.assert_close(reduced.view(-1), torch.full((count,), result))
        group = [own.clone(), own.double()]
        ops.grouped_allreduce_(group, name=f"{name}.gin", op=op)
        torch.testing.assert_close(group[1], torch.full((count,), result).double())
        (alone,) = ops.grouped_allreduce([own], name=f"{name}.one", op=op)
        torch.testing.assert_close(alone, torch.full((count,), result))
        handles = [
            ops.allreduce_async(own * factor, name=f"{name}.a{factor}", op=op) for factor in (1, 2)
        ]
        for factor in (2, 1) if ops.rank() % 2 else (1, 2):
            reduced = ops.synchronize(handles[factor - 1])
            scale = factor ** (len(values) if op == ops.Product else 1)
            torch.testing.assert_close(reduced, torch.full((count,), result * scale))
        if op != ops.Sum:
            reduced = ops.allreduce(own, name=f"{name}.f", op=op, prescale_factor=-2.0)
            scale = (-2.0) ** (len(values) if op == ops.Product else 1)
            turned = {ops.Min: max(values), ops.Max: min(values)}.get(op, result)
            torch.testing.assert_close(reduced, torch.full((count,), turned * scale))


def check_joined_ranks_weigh_nothing(hvd):
    for order in (range(ops.size()), reversed(range(ops.size()))):
        order = list(order)
        steps = order.index(ops.rank()) + 1
        for step in range(steps):
            for count in (0, SMALL, LARGE):
                reductions(count, sorted(order[step:]), f"step.{count}")
        assert ops.join() in range(ops.size())


def check_integers_beside_joined_ranks(hvd):
    size, rank = ops.size(), ops.rank()
    top = 2**63 - 1
    for step in range(rank + 1):
        active = list(range(step, size))
        for dtype in (torch.int64, torch.int32, torch.uint8):
            value = torch.tensor([rank, 7], dtype=dtype)
            expected = [round(sum(active) / len(active)), 7]
            assert ops.allreduce(value, name=f"int{dtype}").tolist() == expected
            least = ops.allreduce(value + 1, name=f"min{dtype}", op=ops.Min)
            assert least.tolist() == [step + 1, 8]
        assert ops.allreduce(torch.tensor([top]), name="top").item() == top
        mixed = ops.grouped_allreduce([torch.tensor([rank]), torch.tensor([rank / 1])], name="mix")
        assert mixed[0].item() == round(sum(active) / len(active))
        assert mixed[1].item() == pytest.approx(sum(active) / len(active))
        flag = ops.allreduce(torch.tensor([True, rank % 2 == 0]), name="flag", op=ops.Min)
        assert flag.tolist() == [True, active == [size - 1] and (size - 1) % 2 == 0]
    ops.join()


def check_negative_maxima_beside_joined_ranks(hvd):
    if ops.rank() != 0:
        for count in (SMALL, LARGE):
            value = torch.full((count,), -float(ops.rank()))
            assert ops.allreduce(value, name=f"neg{count}", op=ops.Max)[0].item() == -1
            flipped = ops.allreduce(value, name=f"nan{count}", op=ops.Min, postscale_factor=0.5)
            assert flipped[0].item() == -(ops.size() - 1) / 2
    ops.join()


def check_gradients_beside_joined_ranks(hvd):
    if ops.rank() != 0:
        leaf = torch.ones(3, requires_grad=True)
        output = ops.allreduce(leaf, name="grad")
        (output * ops.rank()).sum().backward()
        active = range(1, ops.size())
        assert output.tolist() == [1.0] * 3
        assert leaf.grad.tolist() == pytest.approx([sum(active) / len(active)] * 3)
    ops.join()


def check_compression_beside_joined_ranks(hvd):
    from hvdkit.torch.compression import Compression

    if ops.rank() != 0:
        for value in (3.0, 4e4, 2e-8):
            average = ops.allreduce(torch.full((3,), value), compression=Compression.fp16, name="c")
            torch.testing.assert_close(average, torch.full((3,), value), rtol=1e-3, atol=0)
        least = ops.allreduce(
            torch.full((3,), 5.0), compression=Compression.fp16, name="cm", op=ops.Min
        )
        assert least.tolist() == [5.0] * 3
    ops.join()


def check_operations_in_flight_are_finished_by_join(hvd):
    """Horovod ends with a segmentation fault here."""
    rank, size = ops.rank(), ops.size()
    if rank == 0:
        handle = ops.allreduce_async(torch.ones(2), name="flight", op=ops.Sum)
        least = ops.allreduce_async(torch.ones(2) * 9, name="flight.min", op=ops.Min)
        ops.join()
        assert ops.poll(handle)
        assert ops.synchronize(handle).tolist() == [size, size]
        assert ops.synchronize(least).tolist() == [min(9, 1 if size > 1 else 9)] * 2
    else:
        later = ops.allreduce(torch.ones(2) * rank, name="flight.min", op=ops.Min)
        assert later.tolist() == [1.0, 1.0]
        assert ops.allreduce(torch.ones(2), name="flight", op=ops.Sum).tolist() == [size, size]
        assert ops.allreduce(torch.ones(2), name="flight").tolist() == [1.0, 1.0]
        ops.join()


def check_join_finishes_a_minimum_that_is_to_be_repeated(hvd):
    rank, size = ops.rank(), ops.size()
    handle = None
    if rank != 0:
        handle = ops.allreduce_async(torch.full((2,), rank + 4.0), name="again", op=ops.Min)
        if rank == size - 1:
            assert ops.synchronize(handle).tolist() == [5.0, 5.0]
            handle = None
    ops.join()
    if handle is not None:
        assert ops.synchronize(handle).tolist() == [5.0, 5.0]


def check_unnamed_operations_meet_after_uneven_joins(hvd):
    """Horovod hangs here: it numbers them by what each rank did before."""
    for _ in range(ops.rank() + 1):
        ops.synchronize(ops.allreduce_async(torch.ones(2)))
        ops.allreduce(torch.ones(2))
    ops.join()
    assert ops.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
    assert ops.synchronize(ops.allreduce_async(torch.ones(2))).tolist() == [1.0, 1.0]
    assert ops.allgather(torch.ones(1)).shape == (ops.size(),)
    assert ops.broadcast(torch.ones(1), 0).item() == 1


def check_adasum_beside_joined_ranks(hvd):
    value = torch.ones(3) * (ops.rank() + 1)
    if ops.rank() == ops.size() - 1 and ops.mpi_enabled():
        alone = ops.allreduce(value, name="ada", op=ops.Adasum)
        assert alone.tolist() == value.tolist()
    ops.join()


def check_other_operations_beside_joined_ranks_say_what_to_do(hvd):
    if ops.rank() != 0:
        one = torch.ones(ops.size())
        # allgather and alltoall are left out: Horovod writes past the end of a vector there
        # (tensor_sizes in controller.cc), and may do anything after that.
        for operation in (
            lambda: ops.broadcast(one, 1, name="joined.b"),
            lambda: ops.reducescatter(one, name="joined.r"),
        ):
            with pytest.raises(ops.HorovodInternalError, match=r"only allreduce works beside"):
                operation()
    ops.join()


def check_joined_twice_in_a_job(hvd):
    for _ in range(3):
        last = ops.join()
        assert 0 <= last < ops.size()
        assert ops.allreduce(torch.ones(1)).item() == 1.0
