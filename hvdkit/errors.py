"""The exceptions hvdkit raises for faults that are not a wrong argument.

A wrong argument is a ``ValueError`` or ``TypeError``, as everywhere in Python.
"""

from __future__ import annotations


class HvdkitError(Exception):
    """Base of every exception of hvdkit; its text names the remedy."""


class MissingDependencyError(HvdkitError, ImportError):
    """A feature needs a package that is not installed."""


class BuildError(HvdkitError):
    """Horovod could not be built; nothing was installed."""


class LaunchError(HvdkitError):
    """The processes of a job do not form the group that their launcher announced."""


class DeviceError(HvdkitError):
    """A rank cannot have the device it would compute on."""


class SynchronizationError(HvdkitError):
    """Ranks hold different structures, or a gradient was touched while it was being reduced."""


class UnsupportedError(HvdkitError):
    """hvdkit has no working code for this version or backend of a framework."""
