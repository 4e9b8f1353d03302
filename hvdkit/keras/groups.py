"""Which variables are reduced together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def check_groups(groups: Any) -> None:
    """Raises ValueError where `groups` is not what Horovod's ``groups`` may be."""
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups > 0):
        return
    if not (
        isinstance(groups, (list, tuple)) and all(isinstance(g, (list, tuple)) for g in groups)
    ):
        raise ValueError(
            "groups must be a positive number or a list of lists of variables. "
            f"Received: groups={groups!r}."
        )
    members = [id(variable) for group in groups for variable in group]
    if len(members) != len(set(members)):
        raise ValueError("A variable may stand in one of the groups only.")


def plan_groups(variables: Sequence[Any], groups: Any) -> list[list[int]]:
    """Splits variables into those that are reduced together, as lists of their indices.

    Args:
        variables: In an order that all ranks share.
        groups: None, a number of groups, or lists of variables; those in no list go alone.

    Example:
        >>> plan_groups(["a", "b", "c"], 2)
        [[0], [1, 2]]
    """
    count = len(variables)
    if groups is None:
        return [[index] for index in range(count)]
    if isinstance(groups, int):
        edges = [count * part // groups for part in range(groups + 1)]
        parts = [list(range(*pair)) for pair in itertools.pairwise(edges)]
        return [part for part in parts if part]
    place = {id(variable): index for index, variable in enumerate(variables)}
    parts = [[place[id(v)] for v in group if id(v) in place] for group in groups]
    grouped = {index for part in parts for index in part}
    parts += [[index] for index in range(count) if index not in grouped]
    return [part for part in parts if part]
