"""One step of all environment copies of an agent, as the segmenter takes it.

Guarantees: nothing of its own; it only names what belongs together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class VectorStep:
    """N copies, one step each. Observations are unstacked."""

    observation: Mapping[str, NDArray]
    """Leaf name to (N, *shape): what the policy acted on."""
    action: NDArray
    """(N, *action shape), as the policy chose it."""
    reward: NDArray[np.float32]
    """(N,)."""
    terminated: NDArray[np.bool_]
    """(N,) the task ended with this step."""
    truncated: NDArray[np.bool_]
    """(N,) the episode was cut short from outside."""
    next_observation: Mapping[str, NDArray]
    """Leaf name to (N, *shape): what the action led to; where an episode ended its real final
    observation, never the one after the reset."""
    valid: NDArray[np.bool_]
    """(N,) False where the environment only reset itself: no step of any episode."""
    recorded: Mapping[str, NDArray] = field(default_factory=dict)
    """What the policy recorded about this step: each (N, ...)."""
    state: Mapping[str, NDArray] = field(default_factory=dict)
    """Recurrent state that the policy acted with, before this step: each (N, ...)."""
