"""Which GPU a rank takes; with a stand-in for ``tf.config``, since tests see none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvdkit.errors import DeviceError
from hvdkit.tensorflow.devices import pin_device
from hvdkit.world import World


class Config:
    """The functions of ``tf.config`` that count, for a number of devices."""

    def __init__(self, count: int, in_use: bool = False) -> None:
        self.devices = [SimpleNamespace(name=f"GPU:{index}") for index in range(count)]
        self.visible = list(self.devices)
        self.growing: list[object] = []
        self.in_use = in_use
        self.experimental = self

    def list_physical_devices(self, kind: str) -> list[object]:
        return self.devices

    def get_visible_devices(self, kind: str) -> list[object]:
        return self.visible

    def set_visible_devices(self, devices: list[object], kind: str) -> None:
        self._check()
        self.visible = devices

    def get_memory_growth(self, device: object) -> bool:
        return device in self.growing

    def set_memory_growth(self, device: object, enable: bool) -> None:
        self._check()
        self.growing.append(device)

    def _check(self) -> None:
        if self.in_use:
            raise RuntimeError("cannot be modified after being initialized")


def second_of(local_size: int) -> World:
    return World(1, local_size, 1, local_size, 0, 1)


def test_each_local_rank_takes_its_own() -> None:
    config = Config(4)
    assert pin_device(second_of(2), config) == 1
    assert config.visible == config.growing == [config.devices[1]]


def test_nothing_happens_without_devices() -> None:
    assert pin_device(second_of(2), Config(0, in_use=True)) is None


def test_a_device_of_ones_own_is_taken() -> None:
    config = Config(1)
    assert pin_device(second_of(2), config) == 0
    assert config.growing == config.devices


def test_too_few_devices_are_an_error() -> None:
    with pytest.raises(DeviceError, match="local ranks"):
        pin_device(second_of(3), Config(2))


def test_a_late_call_is_an_error() -> None:
    with pytest.raises(DeviceError, match=r"local_rank=1, device=GPU:1.*Fix: call hvd\.init"):
        pin_device(second_of(2), Config(2, in_use=True))


def test_a_late_call_that_changes_nothing_is_fine() -> None:
    config = Config(2)
    assert pin_device(second_of(2), config) == 1
    config.in_use = True
    assert pin_device(second_of(2), config) == 1
