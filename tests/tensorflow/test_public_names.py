"""hvdkit.tensorflow has every public name of horovod.tensorflow, with the same signature."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types

import horovod.tensorflow as horovod
import pytest

import hvdkit.tensorflow as hvd
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


def test_elastic_has_horovods_names() -> None:
    for name in horovod.elastic.__all__:
        assert hasattr(hvd.elastic, name), name


def test_everything_listed_is_there() -> None:
    assert [name for name in hvd.__all__ if not hasattr(hvd, name)] == []


def test_unknown_names_are_said() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        hvd.no_such_name  # noqa: B018


def test_without_tensorflow_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['tensorflow'] = None; import hvdkit.tensorflow"
    job = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert job.returncode == 1
    message = job.stderr.splitlines()[-1]
    assert message.startswith("hvdkit.errors.MissingDependencyError: hvdkit.tensorflow needs")
    assert "pip install 'hvdkit[tensorflow]'" in message
