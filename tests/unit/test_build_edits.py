"""Edits as data: needed or not by version, and applied exactly once or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdkit.errors import BuildError
from hvdkit.horovod_build.edit_list import EDITS
from hvdkit.horovod_build.edits import Edit, apply_edits, select_edits

CURRENT = {"python": "3.13.0", "torch": "2.13.0+cpu", "tensorflow": "2.21.0"}


def test_an_edit_replaces_its_place_and_fills_in_values(tmp_path: Path) -> None:
    tmp_path.joinpath("a.txt").write_text("before OLD after")
    apply_edits(tmp_path, [Edit("a.txt", "OLD", "C++@CXX_STANDARD@", "w")], {"CXX_STANDARD": "20"})
    assert tmp_path.joinpath("a.txt").read_text() == "before C++20 after"


@pytest.mark.parametrize(("text", "count"), [("nothing here", 0), ("OLD and OLD", 2)])
def test_an_edit_without_its_one_place_is_an_error_naming_it(
    tmp_path: Path, text: str, count: int
) -> None:
    tmp_path.joinpath("a.txt").write_text(text)
    with pytest.raises(BuildError, match=rf"a\.txt, but its text occurs {count} times.*find='OLD'"):
        apply_edits(tmp_path, [Edit("a.txt", "OLD", "NEW", "a reason")], {})
    assert tmp_path.joinpath("a.txt").read_text() == text


def test_an_edit_of_a_missing_file_is_an_error_naming_it(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"gone/b\.txt.*not in this source.*a reason"):
        apply_edits(tmp_path, [Edit("gone/b.txt", "OLD", "NEW", "a reason")], {})


def test_the_xla_edit_is_for_new_tensorflow_only() -> None:
    def names(versions: dict[str, str]) -> list[str]:
        return [edit.file for edit in select_edits(EDITS, versions)]

    assert "horovod/tensorflow/CMakeLists.txt" in names(CURRENT)
    assert "horovod/tensorflow/CMakeLists.txt" not in names({**CURRENT, "tensorflow": "2.12.0"})
    assert "horovod/tensorflow/CMakeLists.txt" not in names({"python": "3.11", "torch": "2.13.0"})


def test_every_edit_says_why_and_no_edit_is_there_twice() -> None:
    assert all(edit.why and edit.find != edit.put for edit in EDITS)
    places = [(edit.file, edit.find) for edit in EDITS]
    assert len(set(places)) == len(places)
