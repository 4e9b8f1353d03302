"""Subclasses that take the place of a user's class without showing it."""

from __future__ import annotations

from typing import Any


def named_like(base: type, *mixins: type, **attributes: Any) -> Any:
    """A subclass of `base` with its name, module and docstring.

    Given to an object as its ``__class__``, it changes what the object does and leaves the object's
    ``__dict__``, and so its ``state_dict()``, alone.

    Args:
        base: The class to stand for.
        mixins: Classes whose methods go before those of `base`.
        attributes: Methods and attributes of the subclass itself.

    Example:
        >>> class Lamp:
        ...     pass
        >>> named_like(Lamp, lit=True).__name__
        'Lamp'
    """
    shown = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (*mixins, base), {**shown, **attributes})
