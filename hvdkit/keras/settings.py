"""What the gradient reduction of a Keras optimizer is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdkit.compressor import check_compression
from hvdkit.keras.backend import adapter
from hvdkit.keras.groups import check_groups
from hvdkit.options import check_predivide


@dataclass(frozen=True)
class ReductionSettings:
    """The options of ``DistributedOptimizer`` that concern the reduction; see there."""

    compression: Any = adapter.Compression.none
    op: int = adapter.Average
    gradient_predivide_factor: float = 1.0
    groups: Any = None
    sparse_as_dense: bool = False
    process_set: Any = adapter.global_process_set
    scale_local_gradients: bool = True
    sums_passes: bool = False
    """Whether accumulated gradients count as their sum (Horovod's default), not their mean."""
    device_dense: str = ""
    device_sparse: str = ""

    def __post_init__(self) -> None:
        if self.op not in (adapter.Average, adapter.Sum):
            raise ValueError(
                "Expected op=Average or op=Sum: Keras optimizers step on reduced gradients. "
                f"Received: op={self.op}."
            )
        check_predivide(self.gradient_predivide_factor, self.op, adapter.Average)
        check_compression(self.compression)
        check_groups(self.groups)

    @property
    def communicates(self) -> bool:
        """Whether there is another rank to reduce with."""
        return bool(
            adapter.is_initialized() and self.process_set.included() and self.process_set.size() > 1
        )
