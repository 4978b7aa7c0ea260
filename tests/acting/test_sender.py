"""Entries reach the shard in order and each once, whatever the server does meanwhile."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from algorithms.contract import ActionSpec, Leaf, ObservationSpec
from pipeline.acting.segmenter import CutEntry
from pipeline.acting.sender import SUPERSEDED, UNKNOWN_EXPERIMENT, Sender
from pipeline.configuration import AgentConfig, Configuration, ExperimentConfig
from pipeline.experiment import Experiment, create
from storage.codec import decode_entry, encode_frame, frame_key
from storage.errors import UnavailableError
from storage.protocol import Answer, EntryWrite, ReaderKind, ReaderSettings, StoredEntry
from storage.redis_store import RedisStore
from storage.segment import Entry, SegmentTable

NAME = "maze"
QUICK = AgentConfig(keep_answered_s=0.2)


def until(true: Callable[[], Any], within_s: float = 10.0) -> None:
    limit = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < limit, "not in time"
        time.sleep(0.005)


def cut(number: int, frames: tuple[int, ...] = ()) -> CutEntry:
    """One step of one copy whose reward is `number`; `frames` are two images by their grey."""
    images = [np.full((8, 8), grey, np.uint8) for grey in frames or (0, 1)]
    keys = [frame_key(image) for image in images]
    distinct = tuple(dict.fromkeys(keys))
    table = SegmentTable(
        copy=np.zeros(1, np.int32),
        episode=np.zeros(1, np.int64),
        first_step=np.array([number], np.int64),
        steps=np.ones(1, np.int32),
        history=np.zeros(1, np.int32),
        ending=np.zeros(1, np.int8),
    )
    entry = Entry(
        table,
        {"image": np.array([distinct.index(key) for key in keys], np.uint32)},
        np.zeros(1, np.int64),
        np.array([number], np.float32),
        ("image",),
        distinct,
    )
    payloads = {key: encode_frame(image) for key, image in zip(keys, images, strict=True)}
    return CutEntry(entry, payloads)


class Link:
    """A storage behind a link that fails as told: `before` loses the call, `after` its answer."""

    def __init__(self, store: RedisStore) -> None:
        self.store = store
        self.before = 0
        self.after = 0
        self.writes: list[EntryWrite] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def write(self, experiment: str, shard: int, entry: EntryWrite) -> Answer:
        if self.before:
            self.before -= 1
            raise UnavailableError("cut")
        answer = self.store.write(experiment, shard, entry)
        self.writes.append(entry)
        if self.after:
            self.after -= 1
            raise UnavailableError("cut")
        return answer


def made(store: RedisStore) -> Experiment:
    observations = ObservationSpec((Leaf("image", "uint8", (8, 8)),))
    return create(
        store,
        NAME,
        Configuration(experiment=ExperimentConfig()),
        observations,
        ActionSpec("discrete"),
    )


@contextmanager
def sending(store: Any, experiment: Experiment, config: AgentConfig = QUICK) -> Iterator[Sender]:
    incarnation = store.register_writer(NAME, 0, "ada", experiment.creation_id)
    sender = Sender(store, experiment, 0, "ada", incarnation, config)
    yield sender
    sender.close()


def send(sender: Sender, *entries: CutEntry) -> list[bool]:
    return [sender.send(entry, learner="main", fence=1, version=2) for entry in entries]


def rewards(store: RedisStore) -> list[int]:
    return [int(content(one).rewards[0]) for one in store.read(NAME, {0: 0}, 1000, 0)]


def content(stored: StoredEntry) -> Entry:
    return decode_entry(stored.data, stored.frame_keys)


def test_entries_arrive_in_order_with_what_acted(fake_storage: RedisStore) -> None:
    with sending(fake_storage, made(fake_storage)) as sender:
        send(sender, cut(1), cut(2), cut(3))
        assert sender.wait_written(10) == 3
    first = fake_storage.read(NAME, {0: 0}, 1, 0)[0]
    assert rewards(fake_storage) == [1, 2, 3]
    assert (first.learner, first.fence, first.version, first.steps) == ("main", 1, 2, 1)


def test_a_frame_is_sent_once(fake_storage: RedisStore) -> None:
    link = Link(fake_storage)
    with sending(link, made(fake_storage)) as sender:
        for entry in (cut(1, (5, 6)), cut(2, (6, 7)), cut(3, (5, 7))):
            send(sender, entry)
            sender.wait_written(10)
        assert [len(write.payloads) for write in link.writes] == [2, 1, 0]
        assert sender.metrics()["frames_sent"] == 3


def test_frames_that_went_meanwhile_are_sent_again(fake_storage: RedisStore) -> None:
    experiment = made(fake_storage)
    window = ReaderSettings("main", ReaderKind.WINDOW, capacity_steps=1)
    fake_storage.register_reader(NAME, 0, window)
    link = Link(fake_storage)
    with sending(link, experiment) as sender:
        for entry in (cut(1, (5, 6)), cut(2, (8, 9)), cut(3, (8, 9)), cut(4, (5, 6))):
            send(sender, entry)
            assert sender.wait_written(10)
    # frames 5 and 6 went with entry 1: the fourth write is asked for them
    assert [len(write.payloads) for write in link.writes] == [2, 2, 0, 0, 2]
    assert rewards(fake_storage) == [4]


@pytest.mark.parametrize("lost", ["before", "after"])
def test_a_link_that_fails_neither_loses_nor_doubles(fake_storage: RedisStore, lost: str) -> None:
    link = Link(fake_storage)
    with sending(link, made(fake_storage)) as sender:
        for number in range(1, 6):
            setattr(link, lost, number % 3)
            send(sender, cut(number))
        assert sender.wait_written(20)
    assert rewards(fake_storage) == [1, 2, 3, 4, 5]
    assert fake_storage.account(NAME, 0)["gaps"] == "0"


def test_what_a_killed_server_lost_is_sent_again(real_storage: RedisStore) -> None:
    experiment = made(real_storage)
    client = real_storage.client
    with sending(real_storage, experiment, AgentConfig(keep_answered_s=60)) as sender:
        send(sender, cut(1, (1, 2)), cut(2, (2, 3)))
        sender.wait_written(10)
        saved = {name: client.dump(name) for name in client.keys("*")}
        send(sender, cut(3, (3, 4)), cut(4, (4, 5)))
        sender.wait_written(10)
        client.flushall()
        for name, dumped in saved.items():
            client.restore(name, 0, dumped)
        send(sender, cut(5, (5, 6)))
        until(lambda: rewards(real_storage) == [1, 2, 3, 4, 5])
    assert real_storage.audit(NAME).problems == ()


def test_a_leaving_writer_asks_and_sends_again_what_was_lost(real_storage: RedisStore) -> None:
    experiment = made(real_storage)
    client = real_storage.client
    with sending(real_storage, experiment, AgentConfig(keep_answered_s=1)) as sender:
        send(sender, cut(1))
        sender.wait_written(10)
        saved = {name: client.dump(name) for name in client.keys("*")}
        send(sender, cut(2))
        sender.wait_written(10)
        client.flushall()
        for name, dumped in saved.items():
            client.restore(name, 0, dumped)
        assert sender.flush(20)
    assert rewards(real_storage) == [1, 2]


def test_what_is_no_longer_held_is_counted_as_a_gap(real_storage: RedisStore) -> None:
    experiment = made(real_storage)
    client = real_storage.client
    with sending(real_storage, experiment, AgentConfig(keep_answered_s=0)) as sender:
        saved = {name: client.dump(name) for name in client.keys("*")}
        for number in (1, 2):
            send(sender, cut(number))
            sender.wait_written(10)
        time.sleep(0.3)
        client.flushall()
        for name, dumped in saved.items():
            client.restore(name, 0, dumped)
        send(sender, cut(3))
        assert sender.wait_written(10) == 1
        assert sender.metrics()["entries_lost"] == 2
    assert real_storage.account(NAME, 0)["gaps"] == "2"
    assert rewards(real_storage) == [3]


def test_a_newer_incarnation_ends_the_older(fake_storage: RedisStore) -> None:
    experiment = made(fake_storage)
    with sending(fake_storage, experiment) as old:
        send(old, cut(1))
        old.wait_written(10)
        with sending(fake_storage, experiment) as new:
            send(old, cut(2))
            until(lambda: old.ended)
            assert old.ended == SUPERSEDED
            assert send(old, cut(3)) == [False]
            assert old.metrics()["entries_dropped"] == 2
            send(new, cut(7))
            new.wait_written(10)
    assert rewards(fake_storage) == [1, 7]


def test_a_deleted_experiment_ends_the_writer_and_counts_what_it_held(
    fake_storage: RedisStore,
) -> None:
    experiment = made(fake_storage)
    with sending(fake_storage, experiment) as sender:
        fake_storage.delete_experiment(NAME)
        send(sender, cut(1))
        until(lambda: sender.ended)
        assert sender.ended == UNKNOWN_EXPERIMENT
        assert sender.metrics()["steps_dropped"] == 1
    assert fake_storage.client.keys("*") == []


@pytest.mark.parametrize(("when_full", "kept"), [("wait", 5), ("drop", 2)])
def test_at_its_bound_it_is_full_and_waits_or_drops(
    fake_storage: RedisStore, when_full: Any, kept: int
) -> None:
    experiment = made(fake_storage)
    size_bytes = 700  # one entry is about 500 bytes with its frames: two reach the bound
    config = AgentConfig(buffer_bytes=size_bytes, when_full=when_full, keep_answered_s=0)
    link = Link(fake_storage)
    link.before = 10_000
    with sending(link, experiment, config) as sender:
        assert not sender.full
        sent = send(sender, *(cut(number) for number in range(1, 6)))
        assert sender.full
        assert sum(sent) == kept
        assert sender.metrics()["entries_dropped"] == 5 - kept
        assert sender.status()["waiting"].startswith("server unreachable") or link.before > 9_990
        link.before = 0
        assert sender.wait_written(20) == kept
        assert not sender.full
    assert rewards(fake_storage) == list(range(1, kept + 1))


def test_a_reader_that_holds_back_is_named_with_numbers(fake_storage: RedisStore) -> None:
    experiment = made(fake_storage)
    fake_storage.register_reader(NAME, 0, ReaderSettings("main", ReaderKind.WINDOW, 100))
    lease = fake_storage.acquire_reader(NAME, 0, "main", "me", 60)
    assert lease is not None
    fake_storage.allow_steps(NAME, 0, "main", 2, lease)
    with sending(fake_storage, experiment) as sender:
        send(sender, cut(1), cut(2), cut(3))
        until(lambda: sender.status()["waiting"])
        assert sender.status()["waiting"] == "reader main: 2 of 2 allowed steps are written"
        fake_storage.allow_steps(NAME, 0, "main", None, lease)
        assert sender.wait_written(10) == 3
        assert sender.status()["waiting"] == ""


def test_closing_while_the_server_is_away_is_quick(fake_storage: RedisStore) -> None:
    link = Link(fake_storage)
    link.before = 10**9
    with sending(link, made(fake_storage)) as sender:
        send(sender, cut(1))
        time.sleep(0.3)
        assert not sender.flush(0.2)
        began = time.monotonic()
        sender.close()
        assert time.monotonic() - began < 2
    assert not any(
        thread.name == "sender" and thread.is_alive() for thread in threading.enumerate()
    )
