"""The check inside the wheel: which MPI may take the place of the one that was built with."""

from __future__ import annotations

import pytest

from hvdkit.horovod_build.in_wheel import WrongMPIError, compare, family, loaded_path

OPEN_MPI_5 = "Open MPI v5.0.11, package: Open MPI user@host Distribution, ident: 5.0.11"
OPEN_MPI_4 = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (OPEN_MPI_5, "Open MPI 5.0"),
        (OPEN_MPI_4, "Open MPI 4.1"),
        ("MPICH Version:\t4.2.1\nMPICH Release date: Wed", "MPICH 4.2"),
        ("Intel(R) MPI Library 2021.13 for Linux* OS\n", "Intel(R) MPI Library 2021.13"),
        ("something else", "something else"),
    ],
)
def test_the_family_is_implementation_and_release_line(version: str, expected: str) -> None:
    assert family(version) == expected


def test_another_release_line_is_an_error_with_both_versions_the_path_and_the_remedy() -> None:
    with pytest.raises(WrongMPIError) as error:
        compare(OPEN_MPI_5, OPEN_MPI_4, "/usr/lib/libmpi.so.40")
    text = str(error.value)
    assert OPEN_MPI_5 in text
    assert OPEN_MPI_4 in text
    assert "/usr/lib/libmpi.so.40" in text
    assert "LD_LIBRARY_PATH" in text
    assert "hvdkit build --install" in text


def test_another_patch_release_is_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match=r"v5\.0\.12"):
        compare(OPEN_MPI_5, OPEN_MPI_5.replace("5.0.11", "5.0.12"), "/lib/libmpi.so.40")


def test_the_path_is_found_in_the_process_map() -> None:
    maps = (
        "7f10-7f11 r-xp 00000000 08:01 11   /usr/lib/libc.so.6\n"
        "7f12-7f13 r-xp 00000000 08:01 12   /a place/lib/libmpi.so.40\n"
    )
    assert loaded_path(maps) == "/a place/lib/libmpi.so.40"
    assert loaded_path("") == "unknown"
