"""Edits of Horovod's source as data, and the one function that applies them.

An edit names a file, the text it expects there, how often, and the text to put in its place.
An edit that does not find its place is an error: a build never goes on with half of its mends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.specifiers import SpecifierSet

from hvdkit.errors import BuildError


@dataclass(frozen=True)
class Edit:
    """One replacement in one file of the source.

    Args:
        file: Path inside the unpacked source.
        find: Text that occurs there.
        put: Text that takes its place. ``@NAME@`` stands for a value of the build.
        why: The fault this mends, in a sentence.
        versions: Version ranges in which the edit is needed, by name (``python``, ``torch``,
            ``tensorflow``). A name that the build does not contain leaves the edit out.
        times: How often the text occurs; all are replaced.

    Example:
        >>> edit = Edit("setup.py", "old", "new", "an example", {"python": ">=3.12"})
        >>> edit.is_needed({"python": "3.13"}), edit.is_needed({"python": "3.11"})
        (True, False)
    """

    file: str
    find: str
    put: str
    why: str
    versions: Mapping[str, str] = field(default_factory=dict)
    times: int = 1

    def is_needed(self, versions: Mapping[str, str]) -> bool:
        """Whether a build with these versions needs this edit.

        Example:
            >>> Edit("a.txt", "x", "y", "always").is_needed({})
            True
        """
        return all(
            name in versions and SpecifierSet(wanted).contains(versions[name], prereleases=True)
            for name, wanted in self.versions.items()
        )

    def describe(self) -> str:
        """One line for people: where, for which versions, and why.

        Example:
            >>> Edit("a.txt", "x", "y", "always needed").describe()
            'a.txt: always needed'
        """
        ranges = ", ".join(f"{name} {wanted}" for name, wanted in sorted(self.versions.items()))
        return f"{self.file}{f' [{ranges}]' if ranges else ''}: {self.why}"


def select_edits(edits: Iterable[Edit], versions: Mapping[str, str]) -> tuple[Edit, ...]:
    """The edits that a build with these versions needs, in their order.

    Example:
        >>> select_edits([Edit("a", "x", "y", "w", {"torch": ">=2"})], {"torch": "1.13"})
        ()
    """
    return tuple(edit for edit in edits if edit.is_needed(versions))


def apply_edits(root: Path, edits: Iterable[Edit], values: Mapping[str, str]) -> None:
    """Applies edits to the source at `root`.

    Args:
        root: Folder of the unpacked source.
        edits: The edits, applied in this order.
        values: What ``@NAME@`` stands for in the texts to put.

    Raises:
        BuildError: A file is missing, or the text to find is not there as often as it should be.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("set(STANDARD 14)")
        >>> apply_edits(folder, [Edit("a.txt", "14", "@CXX@", "too old")], {"CXX": "20"})
        >>> (folder / "a.txt").read_text()
        'set(STANDARD 20)'
    """
    for edit in edits:
        path = root / edit.file
        try:
            text = path.read_text()
        except FileNotFoundError as error:
            raise BuildError(_misplaced(edit, "the file is not in this source")) from error
        count = text.count(edit.find)
        if count != edit.times:
            raise BuildError(_misplaced(edit, f"its text occurs {count} times"))
        put = edit.put
        for name, value in values.items():
            put = put.replace(f"@{name}@", value)
        path.write_text(text.replace(edit.find, put))


def _misplaced(edit: Edit, problem: str) -> str:
    often = "exactly once" if edit.times == 1 else f"{edit.times} times"
    return (
        f"An edit of Horovod's source does not find its place: expected its text {often} in "
        f"{edit.file}, but {problem}. The edit is there because: {edit.why}. "
        f"Received: find={edit.find!r}. Build from the pinned release, or adapt the edit in "
        f"hvdkit/horovod_build/edit_list.py."
    )
