"""Turns vector steps into entries: one segment for each run of a copy's steps within one episode.

Guarantees: every valid step lands in exactly one segment, in order; no segment crosses an episode's
start; each carries min(longest stack - 1, first step) observations before its first step and the
real observation after its last one; what it returns shares no memory with what it was given.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from algorithms.contract import ActionSpec, Leaf, ObservationSpec
from pipeline.acting.vector_step import VectorStep
from pipeline.configuration import ExperimentConfig
from storage.codec import encode_frame, frame_key
from storage.errors import InvalidEntryError
from storage.segment import Ending, Entry, SegmentTable

_KEY = "S16"
_FRAME_OVERHEAD_BYTES = 32
"""A frame key in the stream, and in the write's arguments."""
_SEGMENT_BYTES = 29
"""One row of the segment table."""
_ENTRY_BYTES = 512
"""Readable fields and column headers."""


@dataclass(frozen=True, eq=False)
class CutEntry:
    """One entry, with the encoded bytes of all its frames."""

    entry: Entry
    payloads: dict[str, bytes]


class Segmenter:
    """One agent's open steps. `copies`, `segment_steps` and byte limits come from `config`."""

    def __init__(
        self, observations: ObservationSpec, actions: ActionSpec, config: ExperimentConfig
    ) -> None:
        self._copies = config.copies
        self._capacity = config.segment_steps
        self._entry_bytes = config.entry_bytes
        self._history = max(observations.stack, config.stack) - 1
        self._frames = tuple(
            leaf.name for leaf in observations.leaves if _leaf_bytes(leaf) >= config.frame_min_bytes
        )
        self._action_dtype = np.dtype(actions.dtype)
        # Rows of a leaf along time: history, then what was acted on, then what came of it.
        length = self._history + 2 * self._capacity
        self._rows: dict[str, NDArray] = {
            leaf.name: np.zeros((length, self._copies), _KEY)
            if leaf.name in self._frames
            else np.zeros((length, self._copies, *leaf.shape), leaf.dtype)
            for leaf in observations.leaves
        }
        self._leaves = {leaf.name: leaf for leaf in observations.leaves}
        shape = (self._capacity, self._copies)
        self._actions = np.zeros((*shape, *actions.shape), self._action_dtype)
        self._rewards = np.zeros(shape, np.float32)
        self._valid = np.zeros(shape, bool)
        self._endings = np.zeros(shape, np.int8)
        self._episodes = np.zeros(shape, np.int64)
        self._steps = np.zeros(shape, np.int64)
        self._recorded: dict[str, NDArray] | None = None
        self._states: dict[str, NDArray] | None = None
        self._episode = np.zeros(self._copies, np.int64)
        self._step = np.zeros(self._copies, np.int64)
        self._used = 0
        self._payloads: dict[bytes, bytes] = {}
        self._newest_keys: set[bytes] = set()
        self._open_keys: set[bytes] = set()
        self._open_bytes = 0

    @property
    def open_steps(self) -> int:
        """Valid steps, of all copies together, that no entry holds yet."""
        return int(np.count_nonzero(self._valid[: self._used]))

    def add(self, step: VectorStep) -> list[CutEntry]:
        """Take one step of every copy; returns the entries that are now complete, usually none.

        Raises InvalidEntryError, naming leaf, copy and step, for a dtype or shape that is not the
        specified one and for NaN or infinity in a frame.
        """
        self._check(step)
        keys = self._encode_frames(step)
        cut: list[CutEntry] = []
        new_bytes = self._cost(step)
        if self._used and self._open_bytes + new_bytes > self._entry_bytes:
            cut = self.cut()
            new_bytes = self._cost(step)
        self._append(step, keys)
        self._open_bytes += new_bytes
        if self._used == self._capacity or self._open_bytes > self._entry_bytes:
            cut += self.cut()
        return cut

    def cut(self) -> list[CutEntry]:
        """Close what is open: no entry, one, or several where one vector step was too big."""
        used, history = self._used, self._history
        entries = [self._build(*copies) for copies in self._copy_ranges()] if used else []
        for rows in self._rows.values():
            rows[:history] = rows[used : used + history].copy()
        self._used = 0
        self._open_bytes = 0
        self._open_keys = set()
        keep = self._history_keys() | self._newest_keys
        self._payloads = {key: self._payloads[key] for key in keep}
        return [entry for entry in entries if entry is not None]

    # ------------------------------------------------------------------ taking steps

    def _check(self, step: VectorStep) -> None:
        for observation in (step.observation, step.next_observation):
            for name, leaf in self._leaves.items():
                if name not in observation:
                    raise InvalidEntryError(f"observation leaf {name!r}: missing")
                values = np.asarray(observation[name])
                shape = (self._copies, *leaf.shape)
                if values.dtype != leaf.dtype or values.shape != shape:
                    raise InvalidEntryError(
                        f"observation leaf {name!r}: {values.dtype} {values.shape}, "
                        f"must be {leaf.dtype} {shape}"
                    )
                if name in self._frames and values.dtype.kind == "f":
                    self._check_finite(name, values, step.valid)

    def _check_finite(self, name: str, values: NDArray, valid: NDArray[np.bool_]) -> None:
        if np.isfinite(values).all():
            return
        sound = np.isfinite(values.reshape(self._copies, -1)).all(axis=1) | ~valid
        for copy in np.flatnonzero(~sound):
            raise InvalidEntryError(
                f"observation leaf {name!r}: NaN or infinity at step {self._step[copy]} of "
                f"episode {self._episode[copy]} of copy {copy}, must be finite"
            )

    def _encode_frames(self, step: VectorStep) -> dict[str, NDArray]:
        """Keys (2, N) of each frame leaf, before and after the step; payloads of new ones kept."""
        keys = {name: np.zeros((2, self._copies), _KEY) for name in self._frames}
        copies = np.flatnonzero(step.valid).tolist()
        for name, both in keys.items():
            for row, observation in enumerate((step.observation, step.next_observation)):
                frames = observation[name]
                for copy in copies:
                    key = frame_key(frames[copy]).encode()
                    if key not in self._payloads:
                        self._payloads[key] = encode_frame(frames[copy])
                    both[row, copy] = key
        self._newest_keys = _distinct(keys.values())
        return keys

    def _cost(self, step: VectorStep) -> int:
        """Bytes that the step adds to the open entry; never less than it will."""
        keys = self._newest_keys
        starts = self._copies
        if self._used == 0:
            keys = keys | self._history_keys()
        else:
            starts = int(np.count_nonzero(step.valid & (self._step == 0)))
        new = keys - self._open_keys
        self._open_keys |= new
        frames = sum(len(self._payloads[key]) + _FRAME_OVERHEAD_BYTES for key in new)
        columns = self._copies * self._step_bytes(step) + starts * self._start_bytes(step)
        return frames + columns + (_ENTRY_BYTES if self._used == 0 else 0)

    def _row_bytes(self) -> int:
        return sum(
            4 if name in self._frames else _leaf_bytes(leaf) for name, leaf in self._leaves.items()
        )

    def _step_bytes(self, step: VectorStep) -> int:
        """Column bytes of one step of one copy."""
        recorded = sum(np.asarray(values).nbytes for values in step.recorded.values())
        return (
            self._row_bytes()
            + self._actions[0, 0].nbytes
            + self._rewards.itemsize
            + recorded // self._copies
        )

    def _start_bytes(self, step: VectorStep) -> int:
        """Column bytes of a segment beyond its steps."""
        state = sum(np.asarray(values).nbytes for values in step.state.values())
        return _SEGMENT_BYTES + (self._history + 1) * self._row_bytes() + state // self._copies

    def _append(self, step: VectorStep, keys: Mapping[str, NDArray]) -> None:
        at, before = self._used, self._history
        after = before + self._capacity
        for name, rows in self._rows.items():
            if name in keys:
                rows[before + at], rows[after + at] = keys[name]
            else:
                rows[before + at] = step.observation[name]
                rows[after + at] = step.next_observation[name]
        np.copyto(self._actions[at], step.action, casting="same_kind")
        np.copyto(self._rewards[at], step.reward, casting="same_kind")
        self._recorded = self._store(self._recorded, step.recorded, "step field")
        self._states = self._store(self._states, step.state, "segment field")
        valid = np.asarray(step.valid, bool)
        # A reset that no ended episode called for still begins another episode.
        lost = ~valid & (self._step > 0)
        self._episode[lost] += 1
        self._step[lost] = 0
        self._valid[at] = valid
        self._episodes[at] = self._episode
        self._steps[at] = self._step
        self._endings[at] = np.where(
            step.terminated,
            Ending.TERMINATED,
            np.where(step.truncated, Ending.TRUNCATED, Ending.CUT),
        )
        ended = valid & (self._endings[at] != Ending.CUT)
        self._episode += ended
        self._step += valid
        self._step[ended] = 0
        self._used += 1

    def _store(
        self, columns: dict[str, NDArray] | None, fields: Mapping[str, NDArray], what: str
    ) -> dict[str, NDArray]:
        """Keep one row of every field; the first step fixes names, dtypes and shapes."""
        if columns is None:
            columns = {
                name: np.zeros((self._capacity, *values.shape), values.dtype)
                for name, values in fields.items()
            }
        if columns.keys() != fields.keys():
            raise InvalidEntryError(f"{what}s: {sorted(fields)}, must be {sorted(columns)}")
        for name, values in fields.items():
            column = columns[name]
            if values.dtype != column.dtype or values.shape != column.shape[1:]:
                raise InvalidEntryError(
                    f"{what} {name!r}: {values.dtype} {values.shape}, "
                    f"must be {column.dtype} {column.shape[1:]}"
                )
            column[self._used] = values
        return columns

    # ------------------------------------------------------------------ cutting

    def _history_keys(self) -> set[bytes]:
        return _distinct(self._rows[name][: self._history] for name in self._frames)

    def _copy_ranges(self) -> list[tuple[int, int]]:
        """[first, end) of the copies of each entry: all of them unless one step was too big."""
        if self._open_bytes <= self._entry_bytes or self._copies == 1:
            return [(0, self._copies)]
        frames_bytes = [self._frame_bytes(copy) for copy in range(self._copies)]
        columns_bytes = (self._open_bytes - _ENTRY_BYTES - self._all_frame_bytes()) // self._copies
        ranges, first, size = [], 0, _ENTRY_BYTES
        for copy, frame_bytes in enumerate(frames_bytes):
            cost = frame_bytes + columns_bytes
            if copy > first and size + cost > self._entry_bytes:
                ranges.append((first, copy))
                first, size = copy, _ENTRY_BYTES
            size += cost
        return [*ranges, (first, self._copies)]

    def _all_frame_bytes(self) -> int:
        return sum(len(self._payloads[key]) + _FRAME_OVERHEAD_BYTES for key in self._open_keys)

    def _frame_bytes(self, copy: int) -> int:
        end = self._history + self._capacity
        keys = _distinct(
            rows
            for name in self._frames
            for rows in (
                self._rows[name][: self._history + self._used, copy],
                self._rows[name][end : end + self._used, copy],
            )
        )
        return sum(len(self._payloads[key]) + _FRAME_OVERHEAD_BYTES for key in keys)

    def _build(self, first: int, end: int) -> CutEntry | None:
        """The entry of copies [first, end); None when they made no valid step."""
        used, history = self._used, self._history
        copies, times = np.nonzero(self._valid[:used, first:end].T)
        copies += first
        if not len(copies):
            return None
        episodes, steps = self._episodes[times, copies], self._steps[times, copies]
        begins = np.ones(len(copies), bool)
        begins[1:] = (copies[1:] != copies[:-1]) | (episodes[1:] != episodes[:-1])
        begin = np.flatnonzero(begins)
        lengths = np.diff(begin, append=len(copies))
        last = begin + lengths - 1
        # Only a segment at time 0 can begin within an episode: its history lies just before.
        carried = np.minimum(history, steps[begin])
        table = SegmentTable(
            copies[begin].astype(np.int32),
            episodes[begin],
            steps[begin],
            lengths.astype(np.int32),
            carried.astype(np.int32),
            self._endings[times[last], copies[last]],
        )
        counts = carried + lengths + 1
        ends = np.cumsum(counts)
        row = np.arange(ends[-1]) + np.repeat(
            history + times[begin] - carried - (ends - counts), counts
        )
        row[ends - 1] = history + self._capacity + times[last]
        column = np.repeat(copies[begin], counts)
        rows = {name: values[row, column] for name, values in self._rows.items()}
        keys, indices = _frame_table(rows, self._frames)
        entry = Entry(
            table,
            rows | indices,
            self._actions[times, copies],
            self._rewards[times, copies],
            self._frames,
            keys,
            {name: v[times, copies] for name, v in (self._recorded or {}).items()},
            {name: v[times[begin], copies[begin]] for name, v in (self._states or {}).items()},
        )
        return CutEntry(entry, {key: self._payloads[key.encode()] for key in keys})


def _leaf_bytes(leaf: Leaf) -> int:
    return int(np.dtype(leaf.dtype).itemsize * np.prod(leaf.shape, dtype=np.int64))


def _distinct(arrays: Iterable[NDArray]) -> set[bytes]:
    """Frame keys in the arrays; empty ones stand where there was no frame."""
    keys: set[bytes] = set()
    for array in arrays:
        keys.update(array.ravel().tolist())
    keys.discard(b"")
    return keys


def _frame_table(
    rows: Mapping[str, NDArray], frames: tuple[str, ...]
) -> tuple[tuple[str, ...], dict[str, NDArray]]:
    """Distinct keys in order of first use, and each frame leaf's rows as indices into them."""
    if not frames:
        return (), {}
    keys, first, place = np.unique(
        np.concatenate([rows[name] for name in frames]), return_index=True, return_inverse=True
    )
    order = np.argsort(first)
    rank = np.empty(len(keys), np.uint32)
    rank[order] = np.arange(len(keys))
    indices = np.split(rank[place], len(frames))
    return (
        tuple(key.decode() for key in keys[order].tolist()),
        dict(zip(frames, indices, strict=True)),
    )
