"""Checks of the collectives on real ranks; see tests.ranks."""

from __future__ import annotations

import inspect
import warnings

import horovod.torch as horovod
import pytest
import torch

from hvdkit.errors import SynchronizationError
from hvdkit.torch import ops

GLOBAL = horovod.global_process_set


def mean_rank(hvd):
    return (hvd.size() - 1) / 2


def check_signatures_are_those_of_horovod(hvd):
    for name in ops.__all__:
        ours, theirs = getattr(ops, name), getattr(horovod, name, None)
        if theirs is None or not inspect.isfunction(ours):
            continue
        pairs = zip(
            inspect.signature(ours).parameters.values(),
            inspect.signature(theirs).parameters.values(),
            strict=True,
        )
        for our, their in pairs:
            assert (our.name, our.kind) == (their.name, their.kind), name
            if our.name == "compression":
                assert our.default.__name__ == their.default.__name__
            else:
                assert our.default == their.default, (name, our.name)


def check_every_collective_of_horovod_is_there(hvd):
    elsewhere = {"allgather_object", "broadcast_object"}
    elsewhere |= {"broadcast_parameters", "broadcast_optimizer_state"}
    kinds = (type(horovod.allreduce), type(horovod.size), int)
    missing = {
        name
        for name, value in vars(horovod).items()
        if not name.startswith("_") and isinstance(value, kinds) and name not in elsewhere
    } - set(ops.__all__)
    assert missing <= {"DistributedOptimizer", "check_extension"}, missing


def check_bfloat16_is_averaged_everywhere(hvd):
    value = torch.full((3,), ops.rank() + 0.5, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="not supported"):
        horovod.allreduce(value)
    expected = torch.full((3,), mean_rank(hvd) + 0.5, dtype=torch.bfloat16)
    torch.testing.assert_close(ops.allreduce(value), expected)
    torch.testing.assert_close(ops.synchronize(ops.allreduce_async(value)), expected)
    in_place = value.clone()
    assert ops.allreduce_(in_place) is in_place
    torch.testing.assert_close(in_place, expected)
    in_place = value.clone()
    handle = ops.allreduce_async_(in_place, name="bf16")
    assert isinstance(handle, int)
    assert ops.synchronize(handle) is in_place
    torch.testing.assert_close(in_place, expected)
    first, second = ops.grouped_allreduce([value, value.float()])
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, expected.float())
    group = [value.clone(), value.float()]
    result = ops.grouped_allreduce_(group)
    assert result[0] is group[0]
    torch.testing.assert_close(group[0], expected)
    torch.testing.assert_close(ops.allreduce(value, op=ops.Max)[0].item(), ops.size() - 0.5)


def check_bfloat16_is_differentiable(hvd):
    value = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    (ops.allreduce(value, op=ops.Sum) * (ops.rank() + 1)).sum().backward()
    expected = ops.size() * (ops.size() + 1) / 2
    torch.testing.assert_close(value.grad, torch.full((2,), expected, dtype=torch.bfloat16))


def check_bfloat16_is_moved_and_scattered(hvd):
    rank, size = ops.rank(), ops.size()
    value = torch.full((size,), rank, dtype=torch.bfloat16)
    gathered = ops.allgather(value)
    assert gathered.dtype == torch.bfloat16
    assert gathered.tolist() == [r for r in range(size) for _ in range(size)]
    assert ops.broadcast(value, root_rank=size - 1).tolist() == [size - 1] * size
    assert ops.alltoall(value).tolist() == list(range(size))
    assert ops.reducescatter(value).tolist() == [mean_rank(hvd)]
    first, second = ops.grouped_reducescatter([value, value.long()], op=ops.Sum)
    assert first.tolist() == second.tolist() == [sum(range(size))]


def check_half_averages_that_fit_do_not_overflow(hvd):
    big = torch.full((2,), 6e4, dtype=torch.float16)
    assert horovod.allreduce(big, name="half").isinf().all()
    torch.testing.assert_close(ops.allreduce(big), big)
    torch.testing.assert_close(ops.grouped_allreduce([big, big])[1], big)


def check_integer_averages_are_rounded_to_nearest(hvd):
    rank, size = ops.rank(), ops.size()
    numbers = torch.tensor([rank, -rank, 4 * rank, 3])
    assert horovod.allreduce(torch.tensor([int(rank == size - 1)])).item() == 0
    exact = [sum(range(size)), -sum(range(size)), 4 * sum(range(size)), 3 * size]
    expected = [round(total / size) for total in exact]
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        average = ops.allreduce(numbers.to(dtype))
        assert average.dtype == dtype
        assert average.tolist() == expected
    unsigned = torch.tensor([200, 250 - rank], dtype=torch.uint8)
    assert ops.allreduce(unsigned).tolist() == [200, round(250 - mean_rank(hvd))]
    assert ops.allreduce(torch.tensor(2 * rank)).item() == round(2 * mean_rank(hvd))
    assert ops.reducescatter(numbers[:1].repeat(size)).tolist() == [round(mean_rank(hvd))]


def check_inexact_integer_averages_warn_once(hvd):
    from hvdkit.torch import ops_wire

    ops_wire._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ops.allreduce(torch.tensor([2, 3]))
        assert not caught
        for _ in range(3):
            ops.allreduce(torch.tensor([ops.rank()]))
    assert len(caught) == 1
    assert "half to even" in str(caught[0].message)


def check_large_integers_stay_exact(hvd):
    size, rank = ops.size(), ops.rank()
    top, low = 2**63 - 1, -(2**63)
    assert horovod.allreduce(torch.tensor([top])).item() != top
    assert ops.allreduce(torch.tensor([top, low, top - 2 * rank])).tolist() == [
        top,
        low,
        top - (size - 1),
    ]
    odd = 2**53 + 1
    assert ops.allreduce(torch.tensor([odd]), op=ops.Sum).item() == size * odd
    assert ops.allreduce(torch.tensor([odd]), op=ops.Max).item() == odd


def check_integers_are_scaled_once(hvd):
    ones = torch.ones(2, dtype=torch.int64)
    assert horovod.allreduce(ones, op=horovod.Sum, prescale_factor=0.5).tolist() == [0, 0]
    halves = ops.allreduce(ones, op=ops.Sum, prescale_factor=0.5)
    assert halves.tolist() == [ops.size() // 2] * 2
    assert ops.allreduce(ones * 3, postscale_factor=2.0).tolist() == [6, 6]
    assert ops.allreduce(ones * 3, op=ops.Max, prescale_factor=2.0).tolist() == [6, 6]


def check_factors_apply_to_every_operation(hvd):
    rank, size = ops.rank(), ops.size()
    value = torch.full((2,), rank + 1.0)
    for op in (ops.Average, ops.Sum, ops.Min, ops.Max, ops.Product):
        for pre, post in ((2.0, 3.0), (-1.0, 1.0), (1e-20, 1.0), (0.0, 1.0)):
            factors = {"prescale_factor": pre, "postscale_factor": post, "op": op}
            theirs = horovod.allreduce(value, name=f"f{op}", **factors)
            torch.testing.assert_close(ops.allreduce(value, **factors), theirs)
            large = value.repeat(40_000)
            torch.testing.assert_close(ops.allreduce(large, **factors)[:2], theirs)
            group = ops.grouped_allreduce([value, value], **factors)
            torch.testing.assert_close(group[1], theirs)
    assert size == ops.allreduce(torch.ones(1), op=ops.Sum).item()


def check_results_are_bitwise_those_of_horovod(hvd):
    torch.manual_seed(ops.rank())
    for count in (1, 7, 1000, 30_000):
        for dtype in (torch.float32, torch.float64):
            value = torch.randn(count, dtype=dtype)
            for op in (ops.Average, ops.Sum, ops.Min, ops.Max, ops.Product):
                theirs = horovod.allreduce(value, op=op, name="bits.theirs")
                assert torch.equal(ops.allreduce(value, op=op, name="bits"), theirs)


def check_other_dtypes_are_reduced_or_refused(hvd):
    rank, size = ops.rank(), ops.size()
    flags = torch.tensor([rank == 0, True])
    assert ops.allreduce(flags, op=ops.Max).tolist() == [True, True]
    assert ops.allreduce(flags, op=ops.Min).tolist() == [False, True]
    for op in (ops.Sum, ops.Average):
        with pytest.raises(ValueError, match=r"Received: dtype=torch\.bool"):
            ops.allreduce(flags, op=op)
    short = torch.tensor([rank], dtype=torch.int16)
    assert ops.allreduce(short, op=ops.Sum).tolist() == [sum(range(size))]
    plane = torch.tensor([1 + rank * 1j])
    assert ops.allreduce(plane).tolist() == [1 + mean_rank(hvd) * 1j]
    with pytest.raises(ValueError, match="Max"):
        ops.allreduce(plane, op=ops.Max)
    eight = torch.tensor([1.5], dtype=torch.float8_e4m3fn)
    assert ops.allreduce(eight).float().item() == 1.5


def check_any_layout_is_accepted(hvd):
    rank, size = ops.rank(), ops.size()
    grid = torch.arange(6.0).view(2, 3).t() + rank
    with pytest.raises(ValueError, match="contiguous"):
        horovod.allreduce_(grid.clone().t().contiguous().t())
    expected = torch.arange(6.0).view(2, 3).t() + mean_rank(hvd)
    torch.testing.assert_close(ops.allreduce(grid), expected)
    in_place = torch.arange(6.0).view(2, 3).t() + rank
    assert ops.allreduce_(in_place) is in_place
    assert not in_place.is_contiguous()
    torch.testing.assert_close(in_place, expected)
    torch.testing.assert_close(ops.broadcast_(in_place, 0), expected)
    assert ops.allgather(grid).shape == (3 * size, 2)
    columns = torch.full((4, 2), float(rank))
    ops.broadcast_(columns[:, 1], root_rank=size - 1)
    assert columns.tolist() == [[rank, size - 1]] * 4
    torch.testing.assert_close(ops.reducescatter(torch.ones(2, size).t()), torch.ones(1, 2))


def check_scalars_and_empty_tensors(hvd):
    rank, size = ops.rank(), ops.size()
    assert ops.allreduce(torch.tensor(float(rank))).item() == mean_rank(hvd)
    assert ops.allreduce(torch.tensor(float(rank))).shape == ()
    assert ops.allgather(torch.tensor(rank)).tolist() == list(range(size))
    assert ops.broadcast(torch.tensor(rank), 0).item() == 0
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        empty = torch.empty(0, 3, dtype=dtype)
        for op in (ops.Average, ops.Sum, ops.Min):
            assert ops.allreduce(empty, op=op).shape == (0, 3)
        assert ops.allgather(empty).shape == (0, 3)
        assert ops.broadcast(empty, 0).shape == (0, 3)
    uneven = torch.full((rank, 2), rank, dtype=torch.bfloat16)
    assert ops.allgather(uneven)[:, 0].tolist() == [r for r in range(size) for _ in range(r)]
    for refused in (ops.alltoall, ops.reducescatter):
        with pytest.raises(ValueError, match="without dimensions"):
            refused(torch.tensor(1.0))
    with pytest.raises(ValueError, match="at least one tensor"):
        ops.grouped_allreduce([])


def check_every_dtype_is_moved_bit_for_bit(hvd):
    rank, size = ops.rank(), ops.size()
    cases = {
        torch.bool: [True, False],
        torch.complex64: [1 + 2j, -3j],
        torch.complex128: [1 + 2j, -3j],
        torch.bfloat16: [1.5, float("inf")],
        torch.float8_e5m2: [1.5, -2.0],
        torch.uint16: [1, 65535],
        torch.int16: [1, -5],
    }
    for dtype, values in cases.items():
        root = torch.tensor(values).to(dtype)
        value = root if rank == 0 else torch.zeros_like(root)
        received = ops.broadcast(value, 0)
        assert received.dtype == dtype
        assert received.tolist() == root.tolist()
        target = value.clone()
        assert ops.broadcast_(target, 0) is target
        assert target.tolist() == root.tolist()
        assert ops.allgather(root.view(1, 2)).tolist() == [root.tolist()] * size
        assert ops.grouped_allgather([root, root.view(2, 1)])[1].shape == (2 * size, 1)
        sent = root[:1].repeat(size)
        output, counts = ops.alltoall(sent, splits=[1] * size)
        assert (output.tolist(), counts.tolist()) == (sent.tolist(), [1] * size)
    conjugate = torch.tensor([1 + 2j]).conj()
    assert ops.allgather(conjugate).tolist() == [1 - 2j] * size


def check_alltoall_with_splits(hvd):
    rank, size = ops.rank(), ops.size()
    rows = torch.full((sum(range(size)), 2), rank, dtype=torch.bfloat16)
    output, counts = ops.alltoall(rows, splits=torch.arange(size, dtype=torch.int32))
    assert output[:, 0].tolist() == [r for r in range(size) for _ in range(rank)]
    assert counts.tolist() == [rank] * size
    output, counts = ops.alltoall(torch.ones(size), splits=torch.ones(size, dtype=torch.int64))
    assert counts.tolist() == [1] * size
    handle = ops.alltoall_async(torch.full((size,), float(rank)))
    assert ops.synchronize(handle)[0].tolist() == list(range(size))


def check_gradients_are_those_of_horovod(hvd):
    rank, size = ops.rank(), ops.size()
    cases = {
        "allreduce": lambda m, x: m.allreduce(x, name="g.ar"),
        "sum": lambda m, x: m.allreduce(x, name="g.s", op=m.Sum, prescale_factor=0.5),
        "grouped": lambda m, x: m.grouped_allreduce([x, 2 * x], name="g.gr")[1],
        "allgather": lambda m, x: m.allgather(x, name="g.ag"),
        "grouped_allgather": lambda m, x: m.grouped_allgather([x, 2 * x], name="g.gag")[1],
        "broadcast": lambda m, x: m.broadcast(x, size - 1, name="g.b"),
        "alltoall": lambda m, x: m.alltoall(x, [1] * size, name="g.a2a")[0],
        "reducescatter": lambda m, x: m.reducescatter(x, name="g.rs", op=m.Sum),
        "grouped_reducescatter": lambda m, x: m.grouped_reducescatter([x, x], name="g.grs")[1],
    }
    for name, case in cases.items():
        gradients = []
        for module in (horovod, ops):
            leaf = torch.arange(2.0 * size).view(size, 2).requires_grad_()
            output = case(module, leaf)
            weights = torch.arange(output.numel(), dtype=torch.float32).view(output.shape) + rank
            (output * weights).sum().backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(gradients[1], gradients[0], msg=f"{name}: {gradients}")


def check_compressed_means_do_not_overflow(hvd):
    from hvdkit.torch.compression import Compression

    big = torch.full((5,), 4e4, requires_grad=True)
    lost = horovod.allreduce(big.detach(), compression=horovod.Compression.fp16, name="c")
    assert lost.isinf().all()
    for compression in (Compression.fp16, Compression.bf16):
        average = ops.allreduce(big, compression=compression)
        torch.testing.assert_close(average, big.detach(), rtol=1e-2, atol=0)
        big.grad = None
        (average * 1e-7).sum().backward()
        torch.testing.assert_close(big.grad, torch.full((5,), 1e-7), rtol=1e-2, atol=0)
        first, second = ops.grouped_allreduce([big, big[:2] * 2], compression=compression)
        torch.testing.assert_close(second, 2 * first[:2], rtol=1e-2, atol=0)
        assert ops.allreduce(torch.tensor([3]), compression=compression).tolist() == [3]
        largest = ops.allreduce(
            torch.tensor([ops.rank() + 0.1]), op=ops.Max, compression=compression
        )
        torch.testing.assert_close(largest, torch.tensor([ops.size() - 0.9]))
        scattered = ops.reducescatter(torch.ones(ops.size()), compression=compression)
        assert scattered.tolist() == [1.0]


def check_own_compressors_are_used(hvd):
    class Halve:
        @staticmethod
        def compress(tensor):
            return tensor / 2, "context"

        @staticmethod
        def decompress(tensor, ctx):
            assert ctx == "context"
            return tensor * 4

    leaf = torch.ones(2, requires_grad=True)
    result = ops.allreduce(leaf, compression=Halve)
    result.sum().backward()
    assert result.tolist() == leaf.grad.tolist() == [2.0, 2.0]
    assert ops.reducescatter(torch.ones(ops.size()), compression=Halve).tolist() == [2.0]


def check_sparse_allreduce(hvd):
    rank, size = ops.rank(), ops.size()
    for dtype in (torch.float32, torch.bfloat16):
        dense = torch.zeros(size + 1, 2, dtype=dtype)
        dense[rank] = rank + 1
        dense[size] = 1
        for op, share in ((ops.Sum, 1), (ops.Average, size)):
            wait = ops.sparse_allreduce_async(dense.to_sparse(1), name=f"sp{dtype}{op}", op=op)
            result = wait()
            assert result.is_sparse
            assert result.dtype == dtype
            expected = [*range(1, size + 1), size]
            assert result.to_dense()[:, 0].tolist() == [value / share for value in expected]
    with pytest.raises(ValueError, match="Average or op=Sum"):
        ops.sparse_allreduce_async(torch.eye(2).to_sparse(), name="sp", op=ops.Max)


def check_poll_and_synchronize(hvd):
    handles = [ops.allreduce_async(torch.ones(2) * i) for i in range(3)]
    handles.append(ops.allreduce_async(torch.tensor([ops.rank()]), op=ops.Max))
    while not all(ops.poll(handle) for handle in handles):
        pass
    assert ops.synchronize(handles[3]).item() == ops.size() - 1
    for i in (2, 0, 1):
        assert ops.synchronize(handles[i]).tolist() == [i, i]
        assert ops.synchronize(handles[i]) is None


def check_ranks_may_wait_in_different_orders(hvd):
    tensors = [torch.full((4,), float(ops.rank() + i)) for i in range(4)]
    handles = [
        ops.allreduce_async(tensor, name=f"order{i}", op=ops.Max)
        for i, tensor in enumerate(tensors)
    ]
    order = range(4) if ops.rank() % 2 else reversed(range(4))
    for i in order:
        assert ops.synchronize(handles[i])[0].item() == ops.size() - 1 + i


def check_errors_are_horovods(hvd):
    with pytest.raises(ops.HorovodInternalError, match="shape"):
        ops.allreduce(torch.ones(ops.rank() + 1, 3), name="uneven")
    assert ops.allreduce(torch.ones(1), name="uneven").item() == 1
    with pytest.raises(ops.HorovodInternalError, match="shape"):
        ops.allreduce(torch.ones(30_000 + ops.rank()), name="uneven.large")
    assert ops.allreduce(torch.ones(30_000), name="uneven.large")[0].item() == 1
    with pytest.raises(ValueError, match="root_rank=99"):
        ops.broadcast(torch.ones(1), root_rank=99)
    with pytest.raises(ValueError, match="not both"):
        ops.allreduce(torch.ones(1), average=True, op=ops.Sum)
    with pytest.raises(ValueError, match="not in use"):
        ops.allreduce(torch.ones(1), process_set=ops.ProcessSet([0]))
    with pytest.warns(DeprecationWarning, match="average"):
        assert ops.allreduce(torch.ones(1), average=False).item() == ops.size()


def check_shapes_that_differ_between_ranks_are_an_error_everywhere(hvd):
    """Also in groups, where Horovod gave out memory that nothing had written."""
    if ops.size() == 1:
        return
    rank = ops.rank()
    odd, even = torch.ones(2 + rank), torch.ones(3)
    turned = torch.ones((2, 3) if rank == 0 else (3, 2))
    bf16 = hvd.Compression.bf16
    for call in (
        lambda: ops.grouped_allreduce([odd, even], op=ops.Sum),
        lambda: ops.grouped_allreduce([even, odd], op=ops.Sum),
        lambda: ops.grouped_allreduce([odd, even]),
        lambda: ops.grouped_allgather([turned, even]),
    ):
        with pytest.raises(ops.HorovodInternalError, match="Mismatched"):
            call()
    with pytest.raises(SynchronizationError, match="same shapes on all ranks"):
        ops.allreduce(turned, compression=bf16)


def check_adasum_takes_every_float(hvd):
    value = torch.ones(4, dtype=torch.bfloat16)
    if not ops.mpi_enabled():
        with pytest.raises(ValueError, match="over MPI"):
            ops.allreduce(value, op=ops.Adasum)
        return
    torch.testing.assert_close(ops.allreduce(value, op=ops.Adasum), value)


def check_process_sets(hvd):
    rank, size = ops.rank(), ops.size()
    members = [0, size - 1] if size > 2 else [1]
    some = ops.add_process_set(members)
    if some.included():
        mean = sum(members) / len(members)
        for op, result in ((ops.Average, mean), (ops.Max, size - 1), (ops.Min, members[0])):
            for dtype in (torch.float32, torch.bfloat16):
                value = torch.full((2,), rank, dtype=dtype)
                assert ops.allreduce(value, op=op, process_set=some).tolist() == [result] * 2
        whole = ops.allreduce(torch.tensor([3 * rank]), process_set=some)
        assert whole.item() == round(3 * mean)
        assert ops.allgather(torch.tensor(rank), process_set=some).tolist() == members
        assert ops.broadcast(torch.tensor(rank), size - 1, process_set=some).item() == size - 1
        outsider = 1 if size > 2 else 0
        with pytest.raises(ValueError, match=f"root_rank={outsider}"):
            ops.broadcast(torch.tensor(rank), outsider, process_set=some)
        ops.synchronize(ops.allreduce_async(torch.ones(1), process_set=some))
    # Unnamed operations of all ranks still meet, although some ranks have run fewer.
    assert ops.allgather(torch.ones(1)).shape == (size,)
    assert ops.synchronize(ops.allreduce_async(torch.ones(1))).item() == 1
    assert ops.remove_process_set(some)


def check_device_without_gpu(hvd):
    assert ops.device() == torch.device("cpu")


def check_each_rank_gets_a_gpu(hvd):
    from types import SimpleNamespace
    from unittest import mock

    from hvdkit.errors import DeviceError

    rank, size = ops.rank(), ops.size()

    def choose(seen, **keywords):
        with (
            mock.patch.object(torch.version, "cuda", "13.0"),
            mock.patch.object(torch.cuda, "device_count", return_value=len(seen)),
            mock.patch.object(
                torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=seen[i])
            ),
        ):
            return ops.device(**keywords)

    assert choose([f"GPU-{i}" for i in range(8)]) == torch.device("cuda", rank)
    assert choose([f"GPU-{rank}"]) == torch.device("cuda", 0)
    assert choose([]) == torch.device("cpu")
    with pytest.raises(DeviceError, match="local ranks"):
        choose(["GPU-0"])
    assert choose(["GPU-0"], allow_sharing=True) == torch.device("cuda", 0)
    assert size == ops.size()


def check_init_refuses_ranks_that_do_not_see_each_other(hvd):
    """Starts this rank alone although the launcher has started more."""
    import subprocess
    import sys

    code = (
        "import hvdkit.torch.ops as ops\n"
        "from hvdkit.errors import LaunchError\n"
        "from hvdkit.torch import local_ops\n"
        "ops.mpi_ops = local_ops\n"
        "try:\n    ops.init()\n"
        "except LaunchError as error:\n    print('refused:', error, local_ops.is_initialized())\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert "refused" in child.stdout
    told_by = "OMPI_COMM_WORLD_SIZE" if ops.mpi_enabled() else "HOROVOD_SIZE"
    assert f"{told_by}={ops.size()}" in child.stdout
    assert child.stdout.strip().endswith("False")
    from hvdkit import world

    assert world.current() == world.World.from_horovod(horovod)
