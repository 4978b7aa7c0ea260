"""Stacks each copy's last observations, as a policy sees them.

Guarantees: a stack holds one episode only; at its first steps the first observation is repeated;
returned arrays are the caller's own.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from algorithms.contract import ObservationSpec


class FrameStacker:
    """The last `observations.stack` time steps of N copies. Leaves of any shape, oldest first."""

    def __init__(self, observations: ObservationSpec, copies: int) -> None:
        self._rows = {
            leaf.name: np.zeros((copies, observations.stack, *leaf.shape), leaf.dtype)
            for leaf in observations.leaves
        }

    def reset(
        self, mask: NDArray[np.bool_], observation: Mapping[str, NDArray]
    ) -> dict[str, NDArray]:
        """Begin an episode where `mask` (N,) is set: its stack repeats the first observation."""
        self._begin(mask, observation)
        return self.stacked()

    def push(
        self, observation: Mapping[str, NDArray], starts: NDArray[np.bool_] | None = None
    ) -> dict[str, NDArray]:
        """Add one time step, leaf name to (N, *shape); where `starts` (N,) is set, begin an episode
        with it. Returns leaf name to (N, stack, *shape)."""
        for name, rows in self._rows.items():
            rows[:, :-1] = rows[:, 1:]
            rows[:, -1] = observation[name]
        if starts is not None:
            self._begin(starts, observation)
        return self.stacked()

    def stacked(self) -> dict[str, NDArray]:
        """Leaf name to (N, stack, *shape)."""
        return {name: rows.copy() for name, rows in self._rows.items()}

    def _begin(self, mask: NDArray[np.bool_], observation: Mapping[str, NDArray]) -> None:
        if mask.any():
            for name, rows in self._rows.items():
                rows[mask] = observation[name][mask][:, None]
