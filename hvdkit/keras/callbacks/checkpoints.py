"""Callbacks of which only the root's writes."""

from __future__ import annotations

from typing import Any

from hvdkit.keras.backend import adapter, keras


class RootOnly(keras.callbacks.Callback):  # type: ignore[misc]
    """Runs a callback on one rank and not on the others, for what writes files or reports.

    Ranks that write one file at a time spoil it.

    Args:
        callback: Any Keras callback that neither communicates nor steers the training.
        root_rank: The rank that it runs on.

    Example:
        >>> import keras, hvdkit.keras as hvd
        >>> hvd.init()
        >>> callbacks = [hvd.callbacks.RootOnly(keras.callbacks.CSVLogger("log.csv"))]
    """

    def __init__(self, callback: Any, root_rank: int = 0) -> None:
        super().__init__()
        self.callback = callback
        self.root_rank = root_rank

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, name)
        if name.startswith("on_") or name in ("set_model", "set_params"):
            callback = object.__getattribute__(self, "callback")
            if adapter.rank() != object.__getattribute__(self, "root_rank"):
                return _nothing
            return getattr(callback, name)
        return own


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a callback does on the other ranks."""


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keeps the best model so far, written by rank 0.

    Args:
        monitor: The result that is compared.
        verbose: 1 to report each file.
        save_weights_only: Whether only weights are written.
        mode: ``"min"``, ``"max"`` or ``"auto"``.
        save_freq: ``"epoch"``, or a number of batches.
        filepath: Where to write, a name that ends in ``.keras`` or ``.weights.h5``; may also be
            set later, as ``callback.filepath``.

    Example:
        >>> import hvdkit.keras as hvd
        >>> callback = hvd.callbacks.BestModelCheckpoint(filepath="best.keras")
        >>> callback.filepath
        'best.keras'
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = None,
    ) -> None:
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath=f"best{ending}" if filepath is None else filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks that there is a place to write to."""
        if self.filepath is None:
            raise ValueError(
                "Expected the file that the best model is written to. Received: filepath=None. "
                "Fix: pass filepath='best.keras', or set callback.filepath before fit()."
            )
        super().on_train_begin(logs)

    def _save_model(self, epoch: int, batch: Any, logs: Any) -> None:
        if adapter.rank() == 0:
            super()._save_model(epoch, batch, logs)
