"""n-step transitions out of a window's columns, a whole batch at a time.

Guarantees: no sum and no stack crosses an episode's start; the discount counts the rewards that were
really summed; a terminated episode is not bootstrapped from, a truncated one is, from its final
observation; nothing but the views is written to.

For a step t, with k <= n the rewards there are until the episode ends or nothing more was written:
    n_step_return = r_t + gamma r_(t+1) + … + gamma^(k-1) r_(t+k-1)
    discount      = gamma^k, or 0 when the step t+k-1 terminated
    next          = the observation after step t+k-1
(Sutton and Barto 2018, eq. 7.1, cut at an episode's end as in section 12.3's truncated returns.)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.replaying.window import ShardWindow
from storage.segment import Ending


@dataclass(frozen=True, eq=False)
class Targets:
    """All (B,)."""

    n_step_return: NDArray[np.float32]
    discount: NDArray[np.float32]
    next_segment: NDArray[np.int64]
    next_row: NDArray[np.int64]
    """Row of the observation to bootstrap from, in `next_segment`."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What is to be written of one window's samples, as positions."""

    steps: NDArray[np.int64]
    """(B,)"""
    segments: NDArray[np.int64]
    """(B,) of these steps."""
    targets: Targets
    rows: Mapping[str, NDArray[np.int64]]
    """Part of the observations ("joint", or "observation" and "next_observation") to (B, width)."""

    def __len__(self) -> int:
        return len(self.steps)


def n_step_targets(
    window: ShardWindow, steps: NDArray[np.int64], n_step: int, gamma: float
) -> Targets:
    """Sum along each step's chain of segments; `steps` (B,) are live positions."""
    step = steps.copy()
    segment = window.steps.take("segment", step)
    total = np.zeros(len(step))
    discount = np.ones(len(step))
    going = np.ones(len(step), bool)
    for place in range(n_step):
        # `discount` stands still where the sum has ended, and those rewards are not added.
        total += np.where(going, discount * window.steps.take("reward", step), 0.0)
        discount = np.where(going, discount * gamma, discount)
        if place == n_step - 1:
            break
        at_end = step == window.segments.take("last_step", segment)
        following = window.segments.take("next", segment)
        going &= ~at_end | (following >= 0)
        if not going.any():
            break
        moves = going & at_end
        step = np.where(going, step + 1, step)
        if moves.any():
            step[moves] = _first_step(window, following[moves])
            segment = np.where(moves, following, segment)
    ended = step == window.segments.take("last_step", segment)
    terminated = ended & (window.segments.take("ending", segment) == Ending.TERMINATED)
    return Targets(
        total.astype(np.float32),
        np.where(terminated, 0.0, discount).astype(np.float32),
        segment,
        window.steps.take("row", step) + 1,
    )


def _first_step(window: ShardWindow, segments: NDArray[np.int64]) -> NDArray[np.int64]:
    """Position of each segment's first step: steps follow one another as their segments do."""
    before = segments - 1
    has_before = before >= window.segments.first
    last = window.segments.take("last_step", np.maximum(before, window.segments.first))
    return np.where(has_before, last + 1, window.steps.first)


def stacked_rows(
    window: ShardWindow, segments: NDArray[np.int64], rows: NDArray[np.int64], width: int
) -> NDArray[np.int64]:
    """(B, width) rows that end in `rows` (B,), oldest first. Before the first row of a segment, which
    is the episode's first or lies a whole stack before the segment's first step, that row repeats.
    """
    first = window.segments.take("first_row", segments)
    return np.maximum(rows[:, None] + np.arange(1 - width, 1), first[:, None])


def plan(
    window: ShardWindow, steps: NDArray[np.int64], n_step: int, gamma: float, stack: int
) -> Plan:
    """All positions that the transitions of `steps` (B,) need."""
    segments = window.steps.take("segment", steps)
    targets = n_step_targets(window, steps, n_step, gamma)
    row = window.steps.take("row", steps)
    if n_step == 1:
        # Observation and successor are neighbours: one field of stack + 1 rows holds both.
        rows = {"joint": stacked_rows(window, segments, row + 1, stack + 1)}
    else:
        rows = {
            "observation": stacked_rows(window, segments, row, stack),
            "next_observation": stacked_rows(window, targets.next_segment, targets.next_row, stack),
        }
    return Plan(steps, segments, targets, rows)


def frames_of(window: ShardWindow, planned: Plan) -> dict[str, NDArray[np.int32]]:
    """Frame leaf to the frame numbers (B, …) that each sample needs."""
    return {
        leaf: np.concatenate(
            [window.rows.take(leaf, rows) for rows in planned.rows.values()], axis=1
        )
        for leaf in window.slabs
    }


def write(window: ShardWindow, shard: int, planned: Plan, views: Mapping[str, NDArray]) -> None:
    """Fill `views`, the fields of `transitions_layout` for len(planned) samples, contiguous. All
    frames must be in the slabs."""
    for part, rows in planned.rows.items():
        for leaf in window.leaves:
            out = views[f"{part}/{leaf.name}"]
            if leaf.name in window.slabs:
                window.slabs[leaf.name].take(window.rows.take(leaf.name, rows), out)
            else:
                window.rows.take(leaf.name, rows, out)
    window.steps.take("action", planned.steps, views["action"])
    views["n_step_return"][...] = planned.targets.n_step_return
    views["discount"][...] = planned.targets.discount
    views["weight"][...] = 1.0
    views["shard"][...] = shard
    for name in ("version", "fence", "entry"):
        window.segments.take(name, planned.segments, views[name])
    views["step"][...] = planned.steps - window.segments.take("entry_start", planned.segments)
