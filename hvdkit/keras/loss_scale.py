"""One finite-or-not decision of all ranks in Keras' ``LossScaleOptimizer``.

Keras puts that optimizer around the user's own when a model with the policy ``mixed_float16`` is
compiled, so it cannot be handed out by hvdkit. Each rank's own decision would let a rank skip the
step that the others wait in, and their loss scales would drift apart.
"""

from __future__ import annotations

import functools
from typing import Any

from hvdkit.keras.backend import collectives, keras

_MARK = "_hvdkit_one_decision"


def teach_one_decision() -> None:
    """Makes ``LossScaleOptimizer.check_finite`` ask all ranks where its inner optimizer reduces.

    Done once, in the class; optimizers around any other inner optimizer are left as they were.
    """
    loss_scale: Any = keras.optimizers.LossScaleOptimizer
    own = loss_scale.check_finite
    if hasattr(own, _MARK):
        return

    @functools.wraps(own)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = own(self, grads)
        parts = getattr(self.inner_optimizer, "optimizers", [self.inner_optimizer])
        controller = getattr(parts[0], "_hvdkit", None) if parts else None
        if controller is None or not controller.settings.communicates:
            return finite
        return collectives.true_on_all(
            finite, f"{controller.prefix}.finite", controller.settings.process_set
        )

    setattr(check_finite, _MARK, True)
    loss_scale.check_finite = check_finite
