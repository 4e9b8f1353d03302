"""The examples in the builder's and the command line's docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import hvdkit.cli
import hvdkit.horovod_build

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (hvdkit.horovod_build, hvdkit.cli)
    for module in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", ["hvdkit.cli", *MODULES])
def test_the_examples_are_true(name: str) -> None:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    result = doctest.testmod(importlib.import_module(name), optionflags=options)
    assert result.failed == 0
