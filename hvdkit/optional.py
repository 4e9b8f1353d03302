"""The one gate for packages that hvdkit can do without."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from hvdkit.errors import MissingDependencyError


def available(package: str) -> bool:
    """Whether `package` is installed, found out without importing it.

    Args:
        package: A top-level module name.

    Returns:
        True if it could be found.

    Example:
        >>> available("json"), available("no_such_package")
        (True, False)
    """
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a half-initialised module, or a test's stand-in: it is there
        return True


def require(package: str, *, feature: str, extra: str | None = None) -> ModuleType:
    """Imports an optional package now, or says what needs it and how to install it.

    Args:
        package: The module to import, dots allowed.
        feature: What the user asked for, for example ``"hvdkit.torch"``.
        extra: The pip extra of hvdkit that brings the package; None if there is none.

    Returns:
        The imported module.

    Raises:
        MissingDependencyError: It cannot be imported; ``__cause__`` is the original error.

    Example:
        >>> require("json", feature="the example").dumps([1])
        '[1]'
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        top = package.partition(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and error.name in (top, package)
        what = "is not installed" if missing else "is installed but cannot be imported"
        target = f"'hvdkit[{extra}]'" if extra is not None else top
        raise MissingDependencyError(
            f"{feature} needs the package {package}, which {what}. "
            f"Received: {type(error).__name__}: {error}. Fix: pip install {target}"
        ) from error
