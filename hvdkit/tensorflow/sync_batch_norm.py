"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdkit.tensorflow.backend import mpi_ops
from hvdkit.tensorflow.reduction import reduce_tensors
from hvdkit.tensorflow.values import leaf_name, numbered


@keras.saving.register_keras_serializable(package="hvdkit")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """``keras.layers.BatchNormalization`` with the mean and variance of all ranks' samples.

    Ranks may have batches of different sizes: each sample weighs the same. The variance is taken
    around the common mean, in a second exchange, since a difference of squares would lose digits.

    Args:
        fused: Horovod's argument; only False is possible.
        kwargs: As for ``keras.layers.BatchNormalization``.

    Raises:
        ValueError: `fused` is True.

    Example:
        >>> import tensorflow as tf, hvdkit.tensorflow as hvd
        >>> hvd.init()
        >>> layer = hvd.SyncBatchNormalization()
        >>> layer(tf.constant([[1.0], [3.0]]), training=True).numpy().round(2).tolist()
        [[-1.0], [1.0]]
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ValueError(
                "The statistics of several ranks cannot be fused into one kernel. Expected "
                f"fused=False. Received: fused={fused}."
            )
        kwargs.pop("synchronized", None)
        super().__init__(**kwargs)

    @tf.autograph.experimental.do_not_convert
    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        weights = tf.ones_like(inputs)
        if mask is not None:
            weights *= tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
        axes = self._reduction_axes
        count, total = self._summed(
            "mean", tf.reduce_sum(weights, axes), tf.reduce_sum(inputs * weights, axes)
        )
        count = tf.maximum(tf.stop_gradient(count), 1.0)
        mean = total / count
        broadcast_shape = [1] * len(inputs.shape)
        broadcast_shape[self.axis] = -1
        centred = (inputs - tf.reshape(mean, broadcast_shape)) * weights
        (squares,) = self._summed("variance", tf.reduce_sum(tf.square(centred), axes))
        return mean, squares / count

    def _summed(self, what: str, *tensors: tf.Tensor) -> list[tf.Tensor]:
        if mpi_ops.size() == 1:
            return list(tensors)
        label = f"sync_batch_norm_{what}_{leaf_name(self)}"
        whole = mpi_ops.global_process_set
        # Keras' name scopes have numbers of models and layers, which ranks may differ in.
        return reduce_tensors(tensors, numbered(label), mpi_ops.Sum, 1.0, 1.0, whole, True)
