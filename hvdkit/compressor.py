"""What the adapters' compressions have in common; the reductions themselves are each adapter's."""

from __future__ import annotations

from typing import Any

FP16_HEADROOM_EXPONENT = 15
"""Sums stay below 2**15 = 32768; the largest finite fp16 is 65504, so rounding cannot reach inf."""

SCALE_EXPONENTS = (-126, 100)
"""Keeps the scale a normal float32 number, and its inverse finite."""


class Compressor:
    """Interface of a user's own compression, as in Horovod.

    Example:
        >>> class Halve(Compressor):
        ...     @staticmethod
        ...     def compress(tensor):
        ...         return tensor / 2, None
        ...     @staticmethod
        ...     def decompress(tensor, ctx):
        ...         return tensor * 2
        >>> wire, context = Halve.compress(3.0)
        >>> Halve.decompress(wire, context)
        3.0
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns what goes over the wire, and what `decompress` needs besides it."""
        raise NotImplementedError("a Compressor defines compress(tensor)")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor in its former dtype."""
        raise NotImplementedError("a Compressor defines decompress(tensor, ctx)")


class NoneCompressor(Compressor):
    """Sends tensors as they are. 16-bit gradients are summed in float32."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor itself."""
        return tensor


def name_of(compression: Any) -> str:
    """The name of a compression's class, which ranks can compare.

    Example:
        >>> name_of(NoneCompressor), name_of(NoneCompressor())
        ('NoneCompressor', 'NoneCompressor')
    """
    kind = compression if isinstance(compression, type) else type(compression)
    return str(kind.__qualname__)


def check_compression(compression: Any) -> None:
    """Raises ValueError where something is no compression."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ValueError(
            "Expected compression to have compress and decompress, as hvd.Compression.fp16. "
            f"Received: compression={compression!r}."
        )
