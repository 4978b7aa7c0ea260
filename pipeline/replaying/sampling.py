"""Which steps a batch holds, and when it may be drawn.

Guarantees: every step of every window is equally likely; batch `number` of a seed draws from its own
random stream, whatever was drawn before; what is drawn stays within `samples_per_insert` of what was
written.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def batch_generator(seed: int, number: int) -> np.random.Generator:
    """The random stream of batch `number` (counter-based: nothing is to be kept between batches)."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, number % 2**64]))


def draw(
    generator: np.random.Generator, window_steps: Sequence[int], count: int
) -> list[NDArray[np.int64]]:
    """Draw `count` steps with replacement from windows of so many steps.

    Returns, for each window, offsets from its oldest step, in the order drawn; all empty when there
    is no step.
    """
    total = sum(window_steps)
    if total == 0:
        return [np.empty(0, np.int64) for _ in window_steps]
    drawn = generator.integers(0, total, count)
    ends = np.cumsum(window_steps)
    return [
        drawn[(drawn >= end - steps) & (drawn < end)] - (end - steps)
        for steps, end in zip(window_steps, ends.tolist(), strict=True)
    ]


@dataclass
class Pacing:
    """How many samples may be drawn for what was written."""

    samples_per_insert: float
    minimum_steps: int
    batch_size: int
    base_steps: int = 0
    """Steps written before this replay counted: nothing is caught up for them."""
    samples: int = 0
    """Drawn so far."""

    def allows(self, total_steps: int) -> bool:
        """Whether a batch may be drawn after `total_steps` were written."""
        allowed = self.samples_per_insert * (total_steps - self.base_steps)
        return total_steps >= self.minimum_steps and self.samples + self.batch_size <= allowed

    def waiting(self, total_steps: int) -> str:
        """What the next batch waits for, with numbers; "" when it does not."""
        if total_steps < self.minimum_steps:
            return f"{total_steps} of {self.minimum_steps} steps before the first batch"
        if self.allows(total_steps):
            return ""
        allowed = int(self.samples_per_insert * (total_steps - self.base_steps))
        return (
            f"new steps: {self.samples} samples drawn, {max(0, allowed)} allowed "
            f"({self.samples_per_insert:g} for each step written)"
        )
