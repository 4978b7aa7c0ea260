"""The seam between an agent and whatever it plays in: N copies stepped as one.

Guarantees that every implementation gives: arrays that it returned never change afterwards; a
final observation is the episode's own, never the one after the reset; NaN and infinity never get
through.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from algorithms.contract import ActionSpec, ObservationSpec


class UnsupportedEnvironmentError(ValueError):
    """An environment that cannot be made or played; the message is one line for people."""


class DamagedStepError(ValueError):
    """An environment gave what may not be written: NaN, infinity, another shape or dtype than its
    space says. Names the leaf (or reward), the copy and the step."""


@dataclass(frozen=True, eq=False)
class StepResult:
    """What one action in each of N copies led to. Observations are unstacked."""

    observation: Mapping[str, NDArray]
    """Leaf name to (N, *shape): to be acted on next. Where an episode ended, the next one's first."""
    final_observation: Mapping[str, NDArray]
    """Leaf name to (N, *shape): what the action led to, where an episode ended its final
    observation. Shares memory with `observation` when no episode ended."""
    reward: NDArray[np.float32]
    """(N,), raw."""
    terminated: NDArray[np.bool_]
    """(N,) the task ended."""
    truncated: NDArray[np.bool_]
    """(N,) the episode was cut short from outside; never together with `terminated`."""
    valid: NDArray[np.bool_]
    """(N,) False where the environment ignored the action and reset itself (autoreset at the next
    step, native vector environments only): no step of any episode."""

    @property
    def starts(self) -> NDArray[np.bool_]:
        """(N,) where an episode ended or the copy reset itself: stacks and recurrent state begin
        anew with `observation`."""
        return self.terminated | self.truncated | ~self.valid


class VectorEnvironment(Protocol):
    """N copies of an environment, each in its own episode."""

    observations: ObservationSpec
    actions: ActionSpec
    copies: int
    description: dict[str, str]
    """What is in effect: id, time limit, frame skip…; printed at start."""

    def reset(self, seeds: Sequence[int] | None = None) -> dict[str, NDArray]:
        """Begin an episode in every copy, with `seeds` (N,) or else those it was made with; leaf
        name to (N, *shape)."""
        ...

    def step(self, action: NDArray) -> StepResult:
        """Act: (N, *action shape), as the policy chose. Raises DamagedStepError; an environment's
        own exception gets a note with copy and step."""
        ...

    def close(self) -> None: ...
