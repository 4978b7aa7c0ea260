"""Decoded frames of one leaf of one shard, in one preallocated array: from frame key to slot.

Guarantees: at most `slots` frames are held; a frame that no live entry names is forgotten, and its
slot is used before any other; a frame that the current batch needs is never displaced; a frame that
could not be had is not asked for again until an entry names it anew.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.codec import decode_frame
from storage.errors import DamagedError

ABSENT, LOST = -1, -2
"""In place of a slot: not in memory; not to be had."""


class FrameSlab:
    """One leaf's frames. A frame has a number for as long as a live entry names it, and a slot while
    its pixels are in memory."""

    def __init__(self, dtype: np.dtype, shape: tuple[int, ...], slots: int, frames: int) -> None:
        """`frames`: how many different ones to be ready for; more only cost an allocation."""
        self._memory = np.zeros((slots, *shape), dtype)
        self._free_slots = list(range(slots - 1, -1, -1))
        self._number_in = np.full(slots, -1, np.int32)
        self._hand = 0
        self._number_of: dict[str, int] = {}
        self._free_numbers: list[int] = []
        self._used_numbers = 0
        self._key = np.zeros(frames, "S16")
        self._slot = np.full(frames, ABSENT, np.int32)
        self._references = np.zeros(frames, np.int32)
        self._pinned = np.zeros(frames, np.int64)
        self._batch = 1

    def __len__(self) -> int:
        """Frames that live entries name."""
        return len(self._number_of)

    @property
    def slots(self) -> int:
        return len(self._memory)

    @property
    def frames_held(self) -> int:
        return self.slots - len(self._free_slots)

    @property
    def held_bytes(self) -> int:
        """Decoded frames in memory."""
        return self.frames_held * (self._memory.nbytes // max(1, self.slots))

    # ------------------------------------------------------------------ which frames live

    def add(self, keys: Sequence[str]) -> NDArray[np.int32]:
        """An entry names these different frames: their numbers, in order."""
        numbers = np.empty(len(keys), np.int32)
        for place, key in enumerate(keys):
            number = self._number_of.get(key)
            if number is None:
                number = self._new_number()
                self._number_of[key] = number
                self._key[number] = key.encode()
            numbers[place] = number
        self._references[numbers] += 1
        # Whoever wrote the entry was asked for the frames that were missing.
        self._slot[numbers[self._slot[numbers] == LOST]] = ABSENT
        return numbers

    def release(self, numbers: NDArray[np.int32]) -> None:
        """An entry that named these different frames has left the window."""
        self._references[numbers] -= 1
        for number in numbers[self._references[numbers] == 0].tolist():
            del self._number_of[self._key[number].decode()]
            slot = int(self._slot[number])
            if slot >= 0:
                self._number_in[slot] = -1
                self._free_slots.append(slot)
            self._slot[number] = ABSENT
            self._free_numbers.append(number)

    def _new_number(self) -> int:
        if self._free_numbers:
            return self._free_numbers.pop()
        if self._used_numbers == len(self._key):
            more = max(64, len(self._key) // 2)
            self._key = np.concatenate([self._key, np.zeros(more, "S16")])
            self._slot = np.concatenate([self._slot, np.full(more, ABSENT, np.int32)])
            self._references = np.concatenate([self._references, np.zeros(more, np.int32)])
            self._pinned = np.concatenate([self._pinned, np.zeros(more, np.int64)])
        self._used_numbers += 1
        return self._used_numbers - 1

    # ------------------------------------------------------------------ what a batch needs

    def want(self, numbers: NDArray[np.int32]) -> NDArray[np.int32]:
        """A new batch needs these frames (any shape), which stay until the next call; returns the
        different ones that are to be fetched."""
        self._batch += 1
        self._pinned[numbers] = self._batch
        absent = numbers[self._slot[numbers] == ABSENT]
        return np.unique(absent)

    def keys(self, numbers: NDArray[np.int32]) -> list[str]:
        return [key.decode() for key in self._key[numbers].tolist()]

    def put(self, number: int, payload: bytes) -> None:
        """Decode a frame into a slot. Raises DamagedError, and then holds what it held."""
        slot = self._free_slot()
        try:
            decode_frame(payload, self._memory[slot])
        except DamagedError:
            self._free_slots.append(slot)
            raise
        self._number_in[slot] = number
        self._slot[number] = slot

    def lose(self, number: int) -> None:
        self._slot[number] = LOST

    def lost(self, numbers: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of them cannot be had; same shape."""
        missing: NDArray[np.bool_] = self._slot[numbers] == LOST
        return missing

    def take(self, numbers: NDArray[np.int32], out: NDArray) -> None:
        """Copy frames that are in memory: `out` (*numbers.shape, *frame shape), contiguous."""
        np.take(self._memory, self._slot[numbers], axis=0, out=out, mode="clip")

    def _free_slot(self) -> int:
        """A slot for one more frame: a free one, else the next whose frame no batch is using."""
        if self._free_slots:
            return self._free_slots.pop()
        for _ in range(self.slots):
            slot = self._hand
            self._hand = (self._hand + 1) % self.slots
            number = self._number_in[slot]
            if self._pinned[number] != self._batch:
                self._slot[number] = ABSENT
                self._number_in[slot] = -1
                return slot
        raise ValueError(f"{self.slots} slots cannot hold the frames of one batch: more are needed")


@dataclass(frozen=True)
class LostFrame:
    """A frame that a live entry names and that could not be had."""

    key: str
    seen: bytes | None
    """The bytes that do not decode; None where there are none."""
    reason: str


def load(
    slabs: Mapping[str, FrameSlab],
    wanted: Mapping[str, NDArray[np.int32]],
    fetch: Callable[[Sequence[str]], Sequence[bytes | None]],
) -> list[LostFrame]:
    """Bring every leaf's `wanted` frames, as `want` returned them, into memory with one `fetch`;
    returns those that could not be had."""
    numbers = [(slabs[leaf], number) for leaf, many in wanted.items() for number in many.tolist()]
    keys = [key for leaf, many in wanted.items() for key in slabs[leaf].keys(many)]
    if not keys:
        return []
    lost = []
    for (slab, number), key, payload in zip(numbers, keys, fetch(keys), strict=True):
        if payload is None:
            slab.lose(number)
            lost.append(LostFrame(key, None, "not in the store"))
            continue
        try:
            slab.put(number, payload)
        except DamagedError as error:
            slab.lose(number)
            lost.append(LostFrame(key, payload, str(error)))
    return lost
