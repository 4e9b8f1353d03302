"""Each rank's share of a data set, as a ``tf.data.Dataset``.

A room of its own, below the TensorFlow and Keras adapters: Keras takes these data sets with its
PyTorch backend too, where Horovod's TensorFlow extension must stay out of the process.
"""

from __future__ import annotations

from hvdkit.tfdata.shard import is_sharded, set_epoch, shard

__all__ = ["is_sharded", "set_epoch", "shard"]
