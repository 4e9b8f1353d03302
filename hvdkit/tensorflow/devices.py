"""Shows TensorFlow only the GPU of this rank, and lets it take memory as it needs it."""

from __future__ import annotations

from typing import Any

from hvdkit import world
from hvdkit.errors import DeviceError


def pin_device(place: world.World, config: Any) -> int | None:
    """Makes one GPU visible to TensorFlow, that of this rank.

    Where a launcher shows each rank a single device, that one is taken: TensorFlow does not say
    whether it is another rank's too.

    Args:
        place: The place of this process.
        config: ``tf.config``.

    Returns:
        The index of the device among those that this process sees; None if it sees none.

    Raises:
        DeviceError: TensorFlow was used before, so that it holds other devices already; or there
            are fewer devices than ranks on this machine.

    Example:
        >>> import tensorflow as tf
        >>> from hvdkit import world
        >>> from hvdkit.tensorflow.devices import pin_device
        >>> pin_device(world.World.single(), tf.config) in (None, 0)
        True
    """
    devices = config.list_physical_devices("GPU")
    index = world.device_index(place, len(devices), allow_sharing=len(devices) == 1)
    if index is None:
        return None
    chosen = devices[index]
    try:
        if config.get_visible_devices("GPU") != [chosen]:
            config.set_visible_devices([chosen], "GPU")
        if not config.experimental.get_memory_growth(chosen):
            config.experimental.set_memory_growth(chosen, True)
    except RuntimeError as error:
        raise DeviceError(
            "Expected hvd.init() before TensorFlow's first operation, since a process that has "
            "taken all GPUs cannot give them back. Received: "
            f"local_rank={place.local_rank}, device={chosen.name}: {error}. "
            "Fix: call hvd.init() first, right after the imports."
        ) from error
    return index
