"""Compares signatures."""

from __future__ import annotations

import inspect


def describe(function: object) -> list[tuple[str, object, object]]:
    """Names, kinds and plain defaults of the parameters."""
    return [
        (
            parameter.name,
            parameter.kind,
            parameter.default
            if isinstance(parameter.default, (int, float, str, type(None)))
            or parameter.default is inspect.Parameter.empty
            else "an object",
        )
        for parameter in inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    ]
