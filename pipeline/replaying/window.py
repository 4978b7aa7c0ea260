"""The newest steps of one shard, laid out so that a batch is index arithmetic.

Guarantees: it holds exactly the entries that retention keeps for a window of this capacity (those
with fewer than `capacity_steps` newer steps), of what was ingested; every step of them can be
sampled; a chain joins segments of one copy, incarnation and episode only, without a gap; memory is
taken once, and more only where entries are larger or episodes shorter than planned for.

Three rings hold it. Positions in them never change while a row lives.
- `steps`, a row a step: `reward`, `action`, `segment` (its position), `row` (position of the
  observation acted on; the next row is what came of it).
- `segments`: `first_row` and `last_step` (positions), `ending`, `next` (position of the segment that
  goes on, -1 for none), `entry`, `entry_start` (position of the entry's first step), `version` and
  `fence` that acted, `sampled`; and `copy`, `episode`, `end_step` to find what goes on.
- `rows`, a row an observation: one column a leaf, values or (frame leaves) frame numbers.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from algorithms.contract import ActionSpec, Leaf, ObservationSpec
from pipeline.configuration import ExperimentConfig
from pipeline.replaying.frame_slab import FrameSlab
from pipeline.replaying.ring import Column, Ring
from storage.errors import DamagedError
from storage.protocol import StoredEntry
from storage.segment import Ending, Entry


@dataclass(frozen=True, eq=False)
class LiveEntry:
    """One entry of the window; entries that did not decode are there too, without steps."""

    entry: int
    nonce: str
    """"" where it could not be read."""
    total_steps: int
    agent: str
    incarnation: int
    steps: int = 0
    segments: int = 0
    first_segment: int = 0
    rows: int = 0
    frames: Mapping[str, NDArray[np.int32]] | None = None


def frame_leaves(observations: ObservationSpec, config: ExperimentConfig) -> tuple[Leaf, ...]:
    """Leaves that are stored as frames."""
    return tuple(leaf for leaf in observations.leaves if leaf_bytes(leaf) >= config.frame_min_bytes)


def leaf_bytes(leaf: Leaf) -> int:
    return int(np.dtype(leaf.dtype).itemsize * np.prod(leaf.shape, dtype=np.int64))


def planned_steps(config: ExperimentConfig, capacity_steps: int) -> int:
    """Steps that a window can hold: the oldest entry stays until all of it is out."""
    return capacity_steps + config.copies * config.segment_steps


class ShardWindow:
    """One shard's window. Pure: knows no storage."""

    def __init__(
        self,
        observations: ObservationSpec,
        actions: ActionSpec,
        config: ExperimentConfig,
        capacity_steps: int,
        slabs: Mapping[str, FrameSlab],
    ) -> None:
        self.capacity_steps = capacity_steps
        self.slabs = slabs
        self.leaves = observations.leaves
        self.total_steps = 0
        """Steps written to the shard when the newest ingested entry was."""
        self.entries: deque[LiveEntry] = deque()
        self._history = observations.stack - 1
        self._action = np.dtype(actions.dtype), actions.shape
        steps = planned_steps(config, capacity_steps)
        segments = 2 * (steps // config.segment_steps + config.copies)
        columns: dict[str, Column] = {"reward": (np.float32, ()), "action": self._action}
        columns |= {name: (np.int64, ()) for name in ("segment", "row")}
        self.steps = Ring(columns, steps)
        names = ("first_row", "last_step", "next", "entry", "entry_start", "version", "fence")
        self.segments = Ring(
            {name: (np.int64, ()) for name in (*names, "episode", "end_step")}
            | {"copy": (np.int32, ()), "ending": (np.int8, ()), "sampled": (np.bool_, ())},
            segments,
        )
        self.rows = Ring(
            {
                leaf.name: (np.int32, ())
                if leaf.name in slabs
                else (np.dtype(leaf.dtype), leaf.shape)
                for leaf in self.leaves
            },
            steps + segments * (1 + self._history) // 2,
        )
        self._tails: dict[tuple[str, int, int], tuple[int, int, int]] = {}
        """(agent, incarnation, copy) to (episode, end step, segment) of what may go on."""

    @property
    def size_bytes(self) -> int:
        """Memory of the columns; slabs apart."""
        return self.steps.size_bytes + self.segments.size_bytes + self.rows.size_bytes

    @property
    def last(self) -> LiveEntry | None:
        return self.entries[-1] if self.entries else None

    # ------------------------------------------------------------------ coming

    def ingest(self, stored: StoredEntry, entry: Entry) -> None:
        """Append an entry and let go what it pushes out. Raises DamagedError, and changes nothing,
        when the entry does not fit the experiment."""
        self._check(stored, entry)
        self._evict(stored.total_steps)
        table = entry.segments
        count = len(table)
        kept = np.minimum(table.history, self._history).astype(np.int64)
        row_counts = kept + table.steps + 1
        row_starts = self.rows.end + np.cumsum(row_counts) - row_counts
        ends = np.cumsum(table.steps, dtype=np.int64)
        first_steps = self.steps.end + ends - table.steps

        rows, frames = self._rows_of(entry, table.history - kept, row_counts)
        self.rows.append(rows, int(row_counts.sum()))
        entry_start = self.steps.append(
            {
                "reward": entry.rewards,
                "action": entry.actions,
                "segment": np.repeat(self.segments.end + np.arange(count), table.steps),
                "row": np.repeat(row_starts + kept - first_steps, table.steps)
                + np.arange(self.steps.end, self.steps.end + entry.steps),
            },
            entry.steps,
        )
        end_steps = table.first_step + table.steps
        first_segment = self.segments.append(
            {
                "first_row": row_starts,
                "last_step": first_steps + table.steps - 1,
                "ending": table.ending,
                "next": -1,
                "entry": stored.entry,
                "entry_start": entry_start,
                "version": stored.version,
                "fence": stored.fence,
                "sampled": 0,
                "copy": table.copy,
                "episode": table.episode,
                "end_step": end_steps,
            },
            count,
        )
        live = LiveEntry(
            stored.entry,
            stored.nonce,
            stored.total_steps,
            stored.agent,
            stored.incarnation,
            entry.steps,
            count,
            first_segment,
            int(row_counts.sum()),
            frames,
        )
        self._append(live)
        self._join(live, entry, end_steps)

    def skip(self, stored: StoredEntry) -> None:
        """Take note of an entry that cannot be used, so that the next one continues it."""
        # Where its fields do not read, its count of steps does not either.
        total_steps = stored.total_steps if stored.data else self.total_steps
        self._evict(total_steps)
        self._append(
            LiveEntry(
                stored.entry,
                stored.nonce,
                total_steps,
                stored.agent,
                stored.incarnation,
                first_segment=self.segments.end,
            )
        )

    def _append(self, live: LiveEntry) -> None:
        self.entries.append(live)
        self.total_steps = live.total_steps

    def _check(self, stored: StoredEntry, entry: Entry) -> None:
        if stored.steps != entry.steps:
            raise DamagedError(f"entry of {entry.steps} steps, its field says {stored.steps}")
        for leaf in self.leaves:
            values = entry.observations.get(leaf.name)
            if values is None:
                raise DamagedError(f"observation leaf {leaf.name!r}: missing")
            if leaf.name in self.slabs:
                if leaf.name not in entry.frame_leaves:
                    raise DamagedError(f"observation leaf {leaf.name!r}: must come as frames")
                continue
            found = (values.dtype, values.shape[1:])
            if leaf.name in entry.frame_leaves or found != (np.dtype(leaf.dtype), leaf.shape):
                raise DamagedError(
                    f"observation leaf {leaf.name!r}: {found[0]} {found[1]}, "
                    f"must be {leaf.dtype} {leaf.shape}"
                )
        if (entry.actions.dtype, entry.actions.shape[1:]) != self._action:
            raise DamagedError(
                f"actions: {entry.actions.dtype} {entry.actions.shape[1:]}, must be "
                f"{self._action[0]} {self._action[1]}"
            )

    def _rows_of(
        self, entry: Entry, left_out: NDArray, counts: NDArray
    ) -> tuple[dict[str, NDArray], dict[str, NDArray[np.int32]]]:
        """Columns of `rows`, without history beyond this experiment's stack, and frame numbers."""
        chosen: NDArray | slice = slice(None)
        if left_out.any():
            # History that another learner's longer stack needs.
            chosen = np.repeat(np.cumsum(left_out), counts) + np.arange(counts.sum())
        rows, frames = {}, {}
        for leaf in self.leaves:
            values = entry.observations[leaf.name][chosen]
            if leaf.name in self.slabs:
                indices, place = np.unique(values, return_inverse=True)
                keys = [entry.frame_keys[index] for index in indices.tolist()]
                frames[leaf.name] = self.slabs[leaf.name].add(keys)
                values = frames[leaf.name][place]
            rows[leaf.name] = values
        return rows, frames

    def _join(self, live: LiveEntry, entry: Entry, end_steps: NDArray) -> None:
        """Link segments to those that they go on from, and remember which may go on."""
        table = entry.segments
        from_segments, to_segments = [], []
        columns = (table.copy, table.episode, table.first_step, end_steps, table.ending)
        for place, (copy, episode, first, end, ending) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            segment = live.first_segment + place
            key = (live.agent, live.incarnation, copy)
            tail = self._tails.pop(key, None)
            if tail is not None and tail[:2] == (episode, first):
                from_segments.append(tail[2])
                to_segments.append(segment)
            if ending == Ending.CUT:
                self._tails[key] = (episode, end, segment)
        if from_segments:
            self.segments.put("next", np.array(from_segments), np.array(to_segments))

    # ------------------------------------------------------------------ going

    def evict_before(self, entry: int) -> None:
        """Let go all entries below `entry`: they are no longer live in the store."""
        while self.entries and self.entries[0].entry < entry:
            self._drop_first()

    def cut_after(self, entry: int) -> None:
        """Forget all entries above `entry`: the stream went on differently."""
        while self.entries and self.entries[-1].entry > entry:
            live = self.entries.pop()
            self.steps.drop_last(live.steps)
            self.segments.drop_last(live.segments)
            self.rows.drop_last(live.rows)
            self._release(live)
        self.total_steps = self.entries[-1].total_steps if self.entries else 0
        positions = np.arange(self.segments.first, self.segments.end)
        beyond = self.segments.take("next", positions) >= self.segments.end
        self.segments.put("next", positions[beyond], -1)
        self._tails.clear()
        for live in self.entries:
            for key, tail in self._open_tails(live):
                self._tails[key] = tail

    def clear(self) -> None:
        self.cut_after(-1)

    def _evict(self, total_steps: int) -> None:
        while self.entries and total_steps - self.entries[0].total_steps >= self.capacity_steps:
            self._drop_first()

    def _drop_first(self) -> None:
        live = self.entries.popleft()
        for key, tail in self._open_tails(live):
            if self._tails.get(key) == tail:
                del self._tails[key]
        self.steps.drop_first(live.steps)
        self.segments.drop_first(live.segments)
        self.rows.drop_first(live.rows)
        self._release(live)

    def _release(self, live: LiveEntry) -> None:
        for leaf, numbers in (live.frames or {}).items():
            self.slabs[leaf].release(numbers)

    def _open_tails(
        self, live: LiveEntry
    ) -> list[tuple[tuple[str, int, int], tuple[int, int, int]]]:
        """Segments of an entry that were cut and that nothing goes on from, as `_tails` has them."""
        positions = live.first_segment + np.arange(live.segments)
        is_open = (self.segments.take("next", positions) < 0) & (
            self.segments.take("ending", positions) == Ending.CUT
        )
        positions = positions[is_open]
        columns = [
            self.segments.take(name, positions).tolist() for name in ("copy", "episode", "end_step")
        ]
        return [
            ((live.agent, live.incarnation, copy), (episode, end, segment))
            for copy, episode, end, segment in zip(*columns, positions.tolist(), strict=True)
        ]
