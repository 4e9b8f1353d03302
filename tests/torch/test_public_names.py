"""hvdkit.torch has every public name of horovod.torch, with the same signature."""

from __future__ import annotations

import inspect
import types

import horovod.torch as horovod
import pytest

import hvdkit.torch as hvd
from tests.signatures import describe

NAMES = sorted(
    name
    for name, value in vars(horovod).items()
    if not name.startswith("_") and not isinstance(value, types.ModuleType)
)


@pytest.mark.parametrize("name", NAMES)
def test_name_and_signature(name: str) -> None:
    theirs, ours = getattr(horovod, name), getattr(hvd, name)
    if inspect.isfunction(theirs):
        assert describe(ours) == describe(theirs)


def test_everything_listed_is_there() -> None:
    assert [name for name in hvd.__all__ if not hasattr(hvd, name)] == []


def test_unknown_names_are_said() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        hvd.no_such_name  # noqa: B018
