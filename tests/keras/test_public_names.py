"""hvdkit.keras has every public name of Horovod's two Keras modules, with the same signature."""

from __future__ import annotations

import inspect
import types

import horovod.keras
import horovod.tensorflow.keras
import horovod.tensorflow.keras.elastic
import pytest

import hvdkit.keras as hvd
from tests.signatures import describe

NOT_API = {"is_version_greater_equal_than"}
BY_OTHER_SIGNATURE = {
    # The two modules of Horovod differ; ours are those of horovod.tensorflow.keras.
    ("keras", "DistributedOptimizer"),
    ("keras", "allreduce"),
    # Files may be named; the rest is as in horovod.tensorflow.keras.
    ("keras", "BestModelCheckpoint"),
    ("keras.callbacks", "BestModelCheckpoint"),
}


def names() -> list[tuple[str, object, object, str]]:
    found = []
    for module in (horovod.keras, horovod.tensorflow.keras):
        for theirs, ours in ((module, hvd), (module.callbacks, hvd.callbacks)):
            for name, value in vars(theirs).items():
                public = not name.startswith("_") and not isinstance(value, types.ModuleType)
                if public and name not in NOT_API:
                    found.append((theirs.__name__.removeprefix("horovod."), theirs, ours, name))
    return found


@pytest.mark.parametrize(
    ("where", "theirs", "ours", "name"), [pytest.param(*n, id=f"{n[0]}.{n[3]}") for n in names()]
)
def test_name_and_signature(where: str, theirs: object, ours: object, name: str) -> None:
    original, replaced = getattr(theirs, name), getattr(ours, name)
    if (where, name) in BY_OTHER_SIGNATURE:
        return
    if inspect.isfunction(original):
        assert describe(replaced) == describe(original)
    elif inspect.isclass(original) and where.endswith("callbacks"):
        expected = describe(original.__init__)
        assert describe(replaced.__init__)[: len(expected)] == expected


def test_elastic_has_horovods_names() -> None:
    for name in horovod.tensorflow.keras.elastic.__all__:
        assert hasattr(hvd.elastic, name), name


def test_everything_listed_is_there() -> None:
    assert [name for name in hvd.__all__ if not hasattr(hvd, name)] == []


def test_unknown_names_are_said() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        hvd.no_such_name  # noqa: B018
