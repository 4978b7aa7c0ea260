"""Experience for tests of the replay: every observation has a number of its own, nothing is random.

A `Copy` plays one environment copy and remembers all it did, so that a test can look up what any
sample should hold without asking the code that it tests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from algorithms.contract import ActionSpec, Leaf, ObservationSpec
from pipeline.configuration import ExperimentConfig
from storage.codec import encode_frame, frame_key
from storage.protocol import StoredEntry
from storage.segment import Ending, Entry, SegmentTable

ID = Leaf("id", "int64", ())
IMAGE = Leaf("image", "uint8", (4, 6))
ACTIONS = ActionSpec("discrete", choices=(1000,))
CONFIG = ExperimentConfig(copies=2, segment_steps=3, frame_min_bytes=16)
"""`image` is stored as frames, `id` as values."""


def observations(stack: int = 1, *, images: bool = True) -> ObservationSpec:
    return ObservationSpec((ID, IMAGE) if images else (ID,), stack)


def image(number: int) -> NDArray[np.uint8]:
    """The picture of observation `number`: no other has it."""
    picture = np.zeros(IMAGE.shape, np.uint8)
    picture[0, :2] = number % 256, number // 256
    picture[1:] = np.arange(18, dtype=np.uint8).reshape(3, 6) + number % 7
    return picture


@dataclass
class Episode:
    """All that happened in it: step t acts on `ids[t]` and leads to `ids[t + 1]`."""

    ids: list[int]
    rewards: list[float] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)


@dataclass
class Segment:
    copy: int
    episode: int
    first_step: int
    history: int
    ids: list[int]
    """history + steps + 1 of them."""
    rewards: list[float]
    actions: list[int]
    ending: Ending


class Copy:
    """One environment copy: `play` makes the next segment."""

    def __init__(
        self, number: int, ids: Iterator[int], history: int = 0, rewards: Iterator[float] = ()
    ) -> None:
        self._number = number
        self._ids = ids
        self._history = history
        self._rewards = iter(rewards)
        self._step = 0
        self.episodes = [Episode([next(ids)])]

    def play(self, steps: int, ending: Ending = Ending.CUT) -> Segment:
        now = self.episodes[-1]
        first = self._step
        for _ in range(steps):
            now.ids.append(next(self._ids))
            now.rewards.append(float(next(self._rewards, now.ids[-1])))
            now.actions.append(now.ids[-2] % 1000)
        self._step += steps
        history = min(self._history, first)
        segment = Segment(
            self._number,
            len(self.episodes) - 1,
            first,
            history,
            now.ids[first - history :],
            now.rewards[first:],
            now.actions[first:],
            ending,
        )
        if ending != Ending.CUT:
            self.episodes.append(Episode([next(self._ids)]))
            self._step = 0
        return segment


def copies(number: int, history: int = 0, start: int = 0) -> list[Copy]:
    """Copies that never share an observation."""
    ids = count(start)
    return [Copy(index, ids, history) for index in range(number)]


def make_entry(segments: Sequence[Segment], *, images: bool = True) -> Entry:
    ids = np.array([one for segment in segments for one in segment.ids], np.int64)
    columns: dict[str, NDArray] = {"id": ids}
    keys: tuple[str, ...] = ()
    if images:
        named = [frame_key(image(number)) for number in ids.tolist()]
        keys = tuple(dict.fromkeys(named))
        columns["image"] = np.array([keys.index(key) for key in named], np.uint32)
    return Entry(
        SegmentTable(
            np.array([one.copy for one in segments], np.int32),
            np.array([one.episode for one in segments], np.int64),
            np.array([one.first_step for one in segments], np.int64),
            np.array([len(one.rewards) for one in segments], np.int32),
            np.array([one.history for one in segments], np.int32),
            np.array([one.ending for one in segments], np.int8),
        ),
        columns,
        np.array([action for one in segments for action in one.actions], np.int64),
        np.array([reward for one in segments for reward in one.rewards], np.float32),
        ("image",) if images else (),
        keys,
    )


def payloads(segments: Sequence[Segment]) -> dict[str, bytes]:
    pictures = [image(number) for segment in segments for number in segment.ids]
    return {frame_key(picture): encode_frame(picture) for picture in pictures}


def stored(
    number: int,
    entry: Entry,
    total_steps: int,
    *,
    agent: str = "ada",
    incarnation: int = 1,
    version: int = 0,
) -> StoredEntry:
    """What a window is told of an entry; its data is not needed there."""
    return StoredEntry(
        shard=0,
        entry=number,
        nonce=f"nonce-{number}",
        previous=f"nonce-{number - 1}" if number > 1 else "",
        agent=agent,
        incarnation=incarnation,
        sequence=number,
        learner="main",
        fence=3,
        version=version,
        segments=len(entry.segments),
        steps=entry.steps,
        episodes=entry.episodes_ended,
        total_steps=total_steps,
        frame_keys=entry.frame_keys,
        data=b"data",
    )
