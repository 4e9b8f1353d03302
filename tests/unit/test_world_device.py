"""Which device a rank takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.errors import DeviceError
from hvdkit.world import World, device_index


def local(rank: int, size: int) -> World:
    return World(rank, size, rank, size, 0, 1)


@given(st.integers(1, 8), st.integers(0, 8))
def test_same_devices_for_all(ranks: int, devices: int) -> None:
    for rank in range(ranks):
        if devices == 0:
            assert device_index(local(rank, ranks), 0) is None
        elif devices >= ranks:
            assert device_index(local(rank, ranks), devices) == rank
        else:
            with pytest.raises(DeviceError, match=rf"local ranks \[0, {devices}"):
                device_index(local(rank, ranks), devices)
            assert device_index(local(rank, ranks), devices, allow_sharing=True) == rank % devices


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))
def test_groups_of_ranks_with_their_own_devices(groups: int, each: int, spare: int) -> None:
    """Group g sees devices that no other group sees; each rank gets a device of its own."""
    seen = [
        [f"GPU-{g}-{d}" for d in range(each + spare)] for g in range(groups) for _ in range(each)
    ]
    taken = set()
    for rank, mine in enumerate(seen):
        index = device_index(local(rank, len(seen)), each + spare, local_identifiers=seen)
        assert index is not None
        taken.add(mine[index])
    assert len(taken) == len(seen)


def test_one_device_each_needs_identifiers() -> None:
    with pytest.raises(DeviceError, match="local_identifiers"):
        device_index(local(1, 2), 1)
    assert device_index(local(1, 2), 1, local_identifiers=[["GPU-a"], ["GPU-b"]]) == 0
    with pytest.raises(DeviceError, match=r"GPU-a: local ranks \[0, 1\]"):
        device_index(local(1, 2), 1, local_identifiers=[["GPU-a"], ["GPU-a"]])


def test_overlapping_lists_are_caught() -> None:
    with pytest.raises(DeviceError, match=r"b: local ranks \[1, 2\]"):
        device_index(local(0, 3), 2, local_identifiers=[["a", "b"], ["a", "b"], ["b", "c"]])


def test_a_rank_without_devices_among_others() -> None:
    assert device_index(local(0, 2), 0, local_identifiers=[[], ["a"]]) is None
    assert device_index(local(1, 2), 1, local_identifiers=[[], ["a"]]) == 0


@pytest.mark.parametrize("lists", [[["a"]], [["a"], ["b", "c"]]])
def test_identifiers_must_fit(lists: list[list[str]]) -> None:
    with pytest.raises(ValueError, match="local_identifiers"):
        device_index(local(1, 2), 1, local_identifiers=lists)
    with pytest.raises(ValueError, match="visible_devices"):
        device_index(local(1, 2), -1)
