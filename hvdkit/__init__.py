"""hvdkit: Horovod-backed training for PyTorch and TensorFlow/Keras.

Importing this package loads no framework. Import an adapter for the work itself:
``import hvdkit.torch as hvd``.
"""

from __future__ import annotations

__version__ = "0.1.0"
