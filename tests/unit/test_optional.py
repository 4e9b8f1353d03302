"""The gate for optional packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvdkit.errors import MissingDependencyError
from hvdkit.optional import available, require


def test_a_present_package_is_imported() -> None:
    assert require("json.decoder", feature="x").__name__ == "json.decoder"


def test_a_missing_package_names_feature_extra_and_cause() -> None:
    with pytest.raises(MissingDependencyError) as caught:
        require("no_such_package", feature="hvdkit.torch", extra="torch")
    assert "hvdkit.torch needs the package no_such_package, which is not installed" in str(
        caught.value
    )
    assert "pip install 'hvdkit[torch]'" in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_broken_package_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_built.py").write_text("import its_absent_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingDependencyError, match=r"cannot be imported.*its_absent_library"):
        require("half_built", feature="x")


def test_available_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "would_fail.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert available("would_fail")
    assert "would_fail" not in sys.modules
    assert not available("no_such_package")
