"""The window against lists: whatever comes, goes and is lost, every sample equals a plain loop."""

from dataclasses import dataclass, field
from itertools import count

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.replaying.assembling import frames_of, plan, write
from pipeline.replaying.frame_slab import FrameSlab, load
from pipeline.replaying.window import ShardWindow
from pipeline.transport import transitions_layout
from storage.segment import Ending
from tests.replaying.streams import (
    ACTIONS,
    CONFIG,
    IMAGE,
    Copy,
    Episode,
    Segment,
    image,
    make_entry,
    observations,
    payloads,
    stored,
)

CAPACITY = 11
GAMMA = 0.75
BATCH = 4


@dataclass
class LiveStep:
    """One step as the stream told it."""

    episode: Episode
    step: int
    ending: Ending
    entry: int
    offset: int
    """Place in its entry."""
    version: int


@dataclass
class ModelEntry:
    number: int
    total_steps: int
    agent: int
    segments: list[Segment]
    episodes: list[Episode]
    version: int
    steps: dict[tuple[int, int, int, int], LiveStep] = field(default_factory=dict)


class Model:
    """The same stream as lists of what happened, beside the window that is tested."""

    def __init__(self, stack: int, n_step: int, more_history: int) -> None:
        self.stack, self.n_step = stack, n_step
        self.slots = BATCH * 2 * (stack + 1)
        self.slab = FrameSlab(np.dtype("uint8"), IMAGE.shape, self.slots, 8)
        self.window = ShardWindow(
            observations(stack), ACTIONS, CONFIG, CAPACITY, {"image": self.slab}
        )
        ids = count()
        self.agents = [
            [Copy(copy, ids, stack - 1 + more_history) for copy in range(2)] for _ in range(2)
        ]
        self.payloads: dict[str, bytes] = {}
        self.entries: list[ModelEntry] = []
        self.last, self.total = 0, 0

    def ingest(self, agent: int, segments: list[Segment]) -> None:
        entry = make_entry(segments)
        self.payloads |= payloads(segments)
        self.last += 1
        self.total += entry.steps
        version = 7 * self.last
        told = stored(self.last, entry, self.total, agent=f"agent-{agent}", version=version)
        self.window.ingest(told, entry)
        episodes = [self.agents[agent][one.copy].episodes[one.episode] for one in segments]
        live = ModelEntry(self.last, self.total, agent, segments, episodes, version)
        offset = 0
        for segment, episode in zip(segments, episodes, strict=True):
            for place in range(len(segment.rewards)):
                at_end = place == len(segment.rewards) - 1
                step = segment.first_step + place
                live.steps[agent, segment.copy, segment.episode, step] = LiveStep(
                    episode,
                    step,
                    segment.ending if at_end else Ending.CUT,
                    self.last,
                    offset,
                    version,
                )
                offset += 1
        self.entries.append(live)
        self._retain()

    def skip(self) -> None:
        self.last += 1
        entry = make_entry([Segment(0, 0, 0, 0, [0, 1], [0.0], [0], Ending.CUT)])
        self.window.skip(stored(self.last, entry, self.total))
        self.entries.append(ModelEntry(self.last, self.total, 0, [], [], 0))
        self._retain()

    def _retain(self) -> None:
        """Live is what has fewer than CAPACITY newer steps."""
        self.entries = [
            one
            for place, one in enumerate(self.entries)
            if sum(len(newer.steps) for newer in self.entries[place + 1 :]) < CAPACITY
        ]

    def evict_before(self, number: int) -> None:
        self.window.evict_before(number)
        self.entries = [one for one in self.entries if one.number >= number]

    def cut_after(self, number: int, *, again: bool) -> None:
        """Lose the entries above `number`; their writers may send them `again`."""
        lost = [one for one in self.entries if one.number > number]
        self.entries = [one for one in self.entries if one.number <= number]
        self.window.cut_after(number)
        self.last = min(self.last, number)
        self.total = self.entries[-1].total_steps if self.entries else 0
        for one in lost if again else []:
            if one.segments:
                self.ingest(one.agent, one.segments)

    # ------------------------------------------------------------------ what should be there

    def expected(self, key: tuple[int, int, int, int]) -> dict[str, object]:
        """One sample, by the equation of an n-step return."""
        live = {name: step for one in self.entries for name, step in one.steps.items()}
        agent, copy, episode_number, first = key
        begin = live[key]
        episode = begin.episode
        total, discount, summed = 0.0, 1.0, 0
        step = first
        while True:
            total += discount * episode.rewards[step]
            discount *= GAMMA
            summed += 1
            after = live.get((agent, copy, episode_number, step + 1))
            here = live[agent, copy, episode_number, step]
            if here.ending != Ending.CUT or summed == self.n_step or after is None:
                break
            step += 1
        return {
            "n_step_return": np.float32(total),
            "discount": np.float32(0.0 if here.ending == Ending.TERMINATED else discount),
            "observation": self._stack(episode, first),
            "next_observation": self._stack(episode, step + 1),
            "action": episode.actions[first],
            "entry": begin.entry,
            "step": begin.offset,
            "version": begin.version,
        }

    def _stack(self, episode: Episode, row: int) -> list[int]:
        return [episode.ids[max(0, row - back)] for back in range(self.stack - 1, -1, -1)]

    # ------------------------------------------------------------------ what is there

    def check(self) -> None:
        assert [one.entry for one in self.window.entries] == [one.number for one in self.entries]
        keys = [key for one in self.entries for key in one.steps]
        assert len(self.window.steps) == len(keys)
        live_ids = {
            number
            for one in self.entries
            for segment in one.segments
            for number in segment.ids[max(0, segment.history - self.stack + 1) :]
        }
        assert len(self.slab) == len(live_ids), "a frame lives exactly as long as its entries"
        for at in range(0, len(keys), BATCH):
            chosen = keys[at : at + BATCH]
            samples = self._samples(self.window.steps.first + at + np.arange(len(chosen)))
            for place, key in enumerate(chosen):
                for name, wanted in self.expected(key).items():
                    found = samples[name][place]
                    assert np.array_equal(found, np.array(wanted)), (key, name, found, wanted)

    def _samples(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        planned = plan(self.window, positions, self.n_step, GAMMA, self.stack)
        wanted = {
            leaf: self.slab.want(many) for leaf, many in frames_of(self.window, planned).items()
        }
        lost = load(
            self.window.slabs, wanted, lambda keys: [self.payloads.get(key) for key in keys]
        )
        assert lost == []
        layout = transitions_layout(observations(self.stack), ACTIONS, self.n_step, len(positions))
        views = {one.name: np.full(one.shape, 77, one.dtype) for one in layout.fields}
        write(self.window, 0, planned, views)
        if self.n_step == 1:
            for leaf in ("id", "image"):
                joint = views.pop(f"joint/{leaf}")
                views[f"observation/{leaf}"] = joint[:, :-1]
                views[f"next_observation/{leaf}"] = joint[:, 1:]
        for part in ("observation", "next_observation"):
            views[part] = views[f"{part}/id"]
            pictures = [[image(number) for number in row] for row in views[part].tolist()]
            assert np.array_equal(views[f"{part}/image"], np.array(pictures)), "image of its id"
        return views


PLAYED = st.tuples(
    st.integers(0, 1), st.integers(1, 5), st.sampled_from([Ending.CUT, Ending.CUT, *Ending])
)
OPERATION = st.one_of(
    st.tuples(st.just("ingest"), st.integers(0, 1), st.lists(PLAYED, min_size=1, max_size=4)),
    st.tuples(st.just("ingest"), st.integers(0, 1), st.lists(PLAYED, min_size=1, max_size=2)),
    st.tuples(st.just("evict"), st.integers(0, 3)),
    st.tuples(st.just("cut"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("lose"), st.integers(0, 1), st.lists(PLAYED, min_size=1, max_size=2)),
    st.tuples(st.just("skip")),
)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.lists(OPERATION, max_size=14))
def test_every_sample_equals_a_loop_over_lists(
    stack: int, n_step: int, more_history: int, operations: list[tuple]
) -> None:
    model = Model(stack, n_step, more_history)
    for operation in operations:
        match operation:
            case ("ingest", agent, played):
                copies = model.agents[agent]
                segments = [copies[copy].play(steps, ending) for copy, steps, ending in played]
                model.ingest(agent, segments)
            case ("lose", agent, played):  # acted and never written
                for copy, steps, ending in played:
                    model.agents[agent][copy].play(steps, ending)
            case ("evict", places):
                first = model.entries[0].number if model.entries else 1
                model.evict_before(first + places)
            case ("cut", places, again):
                model.cut_after(max(0, model.last - places), again=again)
            case ("skip",):
                model.skip()
        model.check()
