"""What an agent says happened: segments of consecutive steps, laid end to end in an entry.

Guarantees: an `Entry` that passed `storage.codec.check_entry` has columns of matching lengths, no
object or structured dtype, no NaN or infinity in observations or rewards, and frame indices inside
its frame table.

Layout. An entry holds G segments. Segment g is `steps[g]` consecutive steps of one environment copy
in one episode. Its observations are `history[g] + steps[g] + 1` rows: the observations just before
its first step (as many as the longest stack needs and the episode has), one for each step, and the
one after its last step. Step columns hold `steps[g]` rows a segment, segment after segment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Ending(IntEnum):
    """How a segment's last step ended. Every other step of a segment goes on."""

    CUT = 0
    """The episode goes on in the next segment of the same copy."""
    TERMINATED = 1
    """The task ended: no bootstrapping."""
    TRUNCATED = 2
    """The episode was cut short from outside: bootstrap from the final observation."""


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """One row a segment; all arrays (G,)."""

    copy: NDArray[np.int32]
    """Environment copy within the agent, from 0."""
    episode: NDArray[np.int64]
    """Episode number of that copy within this incarnation, from 0."""
    first_step: NDArray[np.int64]
    """Step index within the episode of the segment's first step, from 0."""
    steps: NDArray[np.int32]
    history: NDArray[np.int32]
    """Observation rows before the first step: min(longest stack - 1, first_step)."""
    ending: NDArray[np.int8]
    """`Ending` values."""

    def __len__(self) -> int:
        return len(self.copy)


@dataclass(frozen=True, eq=False)
class Entry:
    """What an agent writes at once. R = sum(history + steps + 1), S = sum(steps), G segments."""

    segments: SegmentTable
    observations: Mapping[str, NDArray]
    """Leaf name to rows: (R, *shape) values for a small leaf; (R,) uint32 for a frame leaf, indices
    into `frame_keys`. A leaf is a frame leaf exactly when it is in `frame_leaves`."""
    actions: NDArray
    """(S, *action shape), as the policy chose them (a discrete action counts from 0)."""
    rewards: NDArray[np.float32]
    """(S,), raw."""
    frame_leaves: tuple[str, ...] = ()
    frame_keys: tuple[str, ...] = ()
    """Distinct frame keys of the entry, in order of first use."""
    step_fields: Mapping[str, NDArray] = field(default_factory=dict)
    """What the policy recorded at each step: (S, ...)."""
    segment_fields: Mapping[str, NDArray] = field(default_factory=dict)
    """What holds at each segment's first step (recurrent state): (G, ...)."""
    entry_fields: Mapping[str, NDArray] = field(default_factory=dict)
    """What belongs to the whole entry (observation statistics)."""

    @property
    def steps(self) -> int:
        return int(self.segments.steps.sum())

    @property
    def episodes_ended(self) -> int:
        return int(np.count_nonzero(self.segments.ending))
