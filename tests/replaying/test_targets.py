"""n-step targets and stacks, worked out by hand: episode ends, final observations, agents."""

from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.acting.frame_stacker import FrameStacker
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
    Segment,
    image,
    make_entry,
    observations,
    payloads,
    stored,
)


def window_of(
    *entries: tuple[str, Sequence[Segment]], stack: int = 1, capacity: int = 1000
) -> ShardWindow:
    """A window without images, of (agent, segments) entries."""
    window = ShardWindow(observations(stack, images=False), ACTIONS, CONFIG, capacity, {})
    for number, (agent, segments) in enumerate(entries, 1):
        entry = make_entry(segments, images=False)
        window.ingest(stored(number, entry, window.total_steps + entry.steps, agent=agent), entry)
    return window


def samples(window: ShardWindow, n_step: int, gamma: float, stack: int = 1) -> dict[str, NDArray]:
    """All steps of a window, oldest first."""
    positions = np.arange(window.steps.first, window.steps.end)
    planned = plan(window, positions, n_step, gamma, stack)
    layout = transitions_layout(observations(stack, images=False), ACTIONS, n_step, len(positions))
    views = {one.name: np.full(one.shape, 99, one.dtype) for one in layout.fields}
    write(window, 0, planned, views)
    if n_step == 1:
        joint = views["joint/id"]
        return views | {"observation/id": joint[:, :-1], "next_observation/id": joint[:, 1:]}
    return views


def segment(ids: Sequence[int], rewards: Sequence[float], ending: Ending, **where: int) -> Segment:
    at = {"copy": 0, "episode": 0, "first_step": 0, "history": 0} | where
    return Segment(
        ids=list(ids), rewards=list(rewards), actions=[0] * len(rewards), ending=ending, **at
    )


# ---------------------------------------------------------------------- sums and discounts


@pytest.mark.parametrize(
    ("ending", "discounts"),
    [
        (Ending.TRUNCATED, [0.125, 0.125, 0.25, 0.5]),
        (Ending.TERMINATED, [0.125, 0.0, 0.0, 0.0]),
        (Ending.CUT, [0.125, 0.125, 0.25, 0.5]),
    ],
)
def test_the_discount_counts_the_rewards_that_were_summed(
    ending: Ending, discounts: list[float]
) -> None:
    # gamma 1/2, n 3, rewards 8 4 2 16: 8+2+.5, 4+1+4, 2+8, 16
    window = window_of(("ada", [segment(range(5), [8, 4, 2, 16], ending)]))
    found = samples(window, 3, 0.5)
    assert found["n_step_return"].tolist() == [10.5, 9.0, 10.0, 16.0]
    assert found["discount"].tolist() == discounts
    assert found["next_observation/id"][:, 0].tolist() == [3, 4, 4, 4]


@pytest.mark.parametrize("ending", [Ending.TRUNCATED, Ending.TERMINATED])
def test_no_sum_goes_on_into_the_next_episode(ending: Ending) -> None:
    first = segment([1, 2, 3], [1, 1], ending)
    second = segment([50, 51, 52], [1000, 1000], Ending.CUT, episode=1)
    for entries in ([("ada", [first, second])], [("ada", [first]), ("ada", [second])]):
        found = samples(window_of(*entries), 4, 1.0)
        assert found["n_step_return"].tolist() == [2.0, 1.0, 2000.0, 1000.0]
        assert found["next_observation/id"][:2, 0].tolist() == [3, 3]


def test_a_time_limit_is_valued_at_its_final_observation() -> None:
    """r 2, gamma 0.8: V(final) 30 gives 26, not 2 + 0.8 * 5 = 6 (before), nor 2 (after the reset)."""
    value = {11: 5.0, 12: 30.0, 90: 0.0}
    first = segment([10, 11, 12], [2, 2], Ending.TRUNCATED)
    second = segment([90, 91], [2], Ending.CUT, episode=1)
    found = samples(window_of(("ada", [first, second])), 1, 0.8)
    last = found["next_observation/id"][1, 0]
    assert last == 12
    target = found["n_step_return"][1] + found["discount"][1] * value[int(last)]
    assert target == pytest.approx(26.0)


def test_the_sum_is_cut_at_a_time_limit_and_bootstraps_there() -> None:
    """Rewards 1 2 4, gamma 1/2, n 5, V(final) 16: 1+1+1+2, 2+2+4, 4+8; never V of another."""
    first = segment([20, 21, 22, 23], [1, 2, 4], Ending.TRUNCATED)
    second = segment([70, 71, 72], [100, 100], Ending.CUT, episode=1)
    found = samples(window_of(("ada", [first, second])), 5, 0.5)
    assert found["next_observation/id"][:3, 0].tolist() == [23, 23, 23]
    targets = found["n_step_return"][:3] + found["discount"][:3] * np.float32(16)
    assert targets.tolist() == [5.0, 8.0, 12.0]


def test_sums_go_on_from_entry_to_entry() -> None:
    parts = [
        segment([0, 1, 2], [1, 2], Ending.CUT),
        segment([2, 3], [4], Ending.CUT, first_step=2),
        segment([3, 4, 5], [8, 16], Ending.TERMINATED, first_step=3),
    ]
    found = samples(window_of(*(("ada", [part]) for part in parts)), 3, 1.0)
    assert found["n_step_return"].tolist() == [7.0, 14.0, 28.0, 24.0, 16.0]
    assert found["discount"].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_step_is_sampled_at_once_and_longer_once_more_is_written() -> None:
    parts = [segment([0, 1], [3], Ending.CUT), segment([1, 2], [5], Ending.CUT, first_step=1)]
    early = samples(window_of(("ada", parts[:1])), 2, 0.5)
    assert (early["n_step_return"][0], early["discount"][0]) == (3.0, 0.5)
    assert early["next_observation/id"][0, 0] == 1
    late = samples(window_of(*(("ada", [part]) for part in parts)), 2, 0.5)
    assert (late["n_step_return"][0], late["discount"][0]) == (5.5, 0.25)
    assert late["next_observation/id"][0, 0] == 2


def test_steps_that_were_never_written_end_a_sum() -> None:
    before = segment([0, 1], [1], Ending.CUT)
    after = segment([5, 6], [64], Ending.CUT, first_step=5)
    found = samples(window_of(("ada", [before]), ("ada", [after])), 9, 1.0)
    assert found["n_step_return"].tolist() == [1.0, 64.0]
    assert found["next_observation/id"][0, 0] == 1


@pytest.mark.parametrize("other", ["agent", "incarnation", "copy"])
def test_sums_of_different_writers_never_mix(other: str) -> None:
    """Rewards 2 of one and 300 of another, entry by entry in turn: 4 x 2 and 4 x 300 only."""
    window = ShardWindow(observations(images=False), ACTIONS, CONFIG, 1000, {})
    for turn in range(5):
        for who, reward in enumerate((2.0, 300.0)):
            begin = 100 * who + turn
            part = segment(
                [begin, begin + 1],
                [reward],
                Ending.CUT,
                first_step=turn,
                copy=who if other == "copy" else 0,
            )
            entry = make_entry([part], images=False)
            told = stored(
                2 * turn + who + 1,
                entry,
                window.total_steps + 1,
                agent=f"agent-{who}" if other == "agent" else "ada",
                incarnation=1 + who if other == "incarnation" else 1,
            )
            window.ingest(told, entry)
    found = samples(window, 4, 1.0)
    assert found["n_step_return"].tolist()[:4] == [8.0, 1200.0, 8.0, 1200.0]
    assert set(found["n_step_return"].tolist()) == {
        float(steps * reward) for steps in (1, 2, 3, 4) for reward in (2, 300)
    }


def test_summing_writes_to_nothing_that_is_kept() -> None:
    window = window_of(("ada", [segment([9, 8, 7, 6, 5, 4], [1, 2, 3, 4, 5], Ending.TERMINATED)]))
    wanted = {"observation/id": [9, 8, 7, 6, 5], "next_observation/id": [5, 4, 4, 4, 4]}
    for _ in range(3):
        found = samples(window, 4, 0.5)
        assert {name: found[name][:, 0].tolist() for name in wanted} == wanted
        found["observation/id"][...] = 0
        found["next_observation/id"] += 1
        found["n_step_return"] *= 7
    assert samples(window, 1, 0.5)["n_step_return"].tolist() == [1, 2, 3, 4, 5]


def test_a_reward_on_the_last_step_only_reaches_exactly_n_samples() -> None:
    window = window_of(("ada", [segment(range(8), [0] * 6 + [1], Ending.TERMINATED)]))
    found = samples(window, 4, 1.0)["n_step_return"]
    assert len(found) == 7, "every step is a sample"
    assert found.tolist() == [0, 0, 0, 1, 1, 1, 1]


# ---------------------------------------------------------------------- observations


@pytest.mark.parametrize("n_step", [1, 2])
def test_an_observation_after_a_reset_is_never_a_successor(n_step: int) -> None:
    first = segment([31, 32, 33], [0, 0], Ending.TRUNCATED)
    second = segment([80, 81], [0], Ending.TRUNCATED, episode=1)
    third = segment([90, 91], [0], Ending.CUT, episode=2)
    found = samples(window_of(("ada", [first, second, third])), n_step, 1.0)
    pairs = list(
        zip(
            found["observation/id"][:, 0].tolist(),
            found["next_observation/id"][:, 0].tolist(),
            strict=True,
        )
    )
    assert pairs == [(31, 33 if n_step == 2 else 32), (32, 33), (80, 81), (90, 91)]


@pytest.mark.parametrize("ending", [Ending.TRUNCATED, Ending.TERMINATED])
@pytest.mark.parametrize("n_step", [1, 3])
def test_a_stack_holds_one_episode_and_its_last_successor_its_own_past(
    ending: Ending, n_step: int
) -> None:
    copy = Copy(0, count(1), history=2)
    parts = [copy.play(2), copy.play(2, ending), copy.play(3)]  # ids 1..5, then 6..9
    found = samples(window_of(*(("ada", [part]) for part in parts), stack=3), n_step, 1.0, stack=3)
    assert found["observation/id"].tolist() == [
        [1, 1, 1],
        [1, 1, 2],
        [1, 2, 3],
        [2, 3, 4],
        [6, 6, 6],
        [6, 6, 7],
        [6, 7, 8],
    ]
    assert found["next_observation/id"][3].tolist() == [3, 4, 5]


@pytest.mark.parametrize("n_step", [1, 2])
def test_stacks_are_those_that_were_acted_on_bit_for_bit(n_step: int) -> None:
    """The same steps through the agent's stacker: episodes of 1, 2, 4 and 7 steps, stack 4."""
    stack = 4
    copy = Copy(0, count(40), history=stack - 1)
    parts, acted = [], []
    stacker = FrameStacker(observations(stack), 1)

    def seen(number: int) -> dict[str, NDArray]:
        return {"id": np.array([number]), "image": image(number)[None]}

    for length in (1, 2, 4, 7):
        begun = copy.episodes[-1].ids[0]
        stacks = [stacker.reset(np.array([True]), seen(begun))]
        for step in range(length):
            ending = Ending.TRUNCATED if step == length - 1 else Ending.CUT
            parts.append(copy.play(1, ending))
            stacks.append(stacker.push(seen(parts[-1].ids[-1])))
        acted += [(stacks[at], stacks[min(at + n_step, length)]) for at in range(length)]

    slab = FrameSlab(np.dtype("uint8"), IMAGE.shape, 200, 64)
    window = ShardWindow(observations(stack), ACTIONS, CONFIG, 1000, {"image": slab})
    for number, part in enumerate(parts, 1):
        entry = make_entry([part])
        window.ingest(stored(number, entry, number), entry)
    planned = plan(window, np.arange(len(parts)), n_step, 0.9, stack)
    frames = frames_of(window, planned)
    held = payloads(parts)
    load({"image": slab}, {"image": slab.want(frames["image"])}, lambda keys: map(held.get, keys))
    views = {
        one.name: np.zeros(one.shape, one.dtype)
        for one in transitions_layout(observations(stack), ACTIONS, n_step, len(parts)).fields
    }
    write(window, 0, planned, views)
    for leaf in ("id", "image"):
        if n_step == 1:
            before, after = views[f"joint/{leaf}"][:, :-1], views[f"joint/{leaf}"][:, 1:]
        else:
            before, after = views[f"observation/{leaf}"], views[f"next_observation/{leaf}"]
        for place, (wanted_before, wanted_after) in enumerate(acted):
            assert before[place].tobytes() == wanted_before[leaf][0].tobytes()
            assert after[place].tobytes() == wanted_after[leaf][0].tobytes()
    assert acted[0][0]["id"].tolist() == [[40, 40, 40, 40]], "the first observation is repeated"
