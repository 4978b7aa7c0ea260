"""What every storage keeps: entries and frames whole or not at all, each once, and an account."""

import threading
import time

import pytest

from storage import keys
from storage.errors import (
    InvalidNameError,
    LostRoleError,
    StorageError,
    UnknownExperimentError,
)
from storage.protocol import AnswerKind, ReaderKind, ReaderSettings
from storage.redis_store import RedisStore
from tests.storage.entries import CREATION, EXPERIMENT, create, entry, key, nonce, payload

WINDOW_20 = ReaderSettings("main", ReaderKind.WINDOW, capacity_steps=20)


@pytest.fixture
def incarnation(storage: RedisStore) -> int:
    create(storage)
    return storage.register_writer(EXPERIMENT, 0, "ada", CREATION)


# ---------------------------------------------------------------------- experiments


def test_first_creator_wins_and_all_others_get_its_configuration(storage: RedisStore) -> None:
    first = storage.create_experiment(EXPERIMENT, "creation_id: aaaa\n", "aaaa", 2, 0)
    second = storage.create_experiment(EXPERIMENT, "creation_id: bbbb\n", "bbbb", 2, 0)
    assert first == second == storage.read_config(EXPERIMENT) == "creation_id: aaaa\n"
    assert storage.experiments() == [EXPERIMENT]
    assert [storage.account(EXPERIMENT, shard)["creation_id"] for shard in (0, 1)] == ["aaaa"] * 2


def test_creation_that_was_cut_short_is_completed_by_the_next(storage: RedisStore) -> None:
    storage.client.set(keys.config(EXPERIMENT), f"creation_id: {CREATION}\n")
    storage.create_experiment(EXPERIMENT, "creation_id: other\n", "other", 2, 0)  # not its own
    create(storage, shards=2)
    assert storage.account(EXPERIMENT, 1)["creation_id"] == CREATION


def test_deleted_experiment_leaves_no_key_and_takes_nothing_old(storage: RedisStore) -> None:
    create(storage, shards=2)
    old = storage.register_writer(EXPERIMENT, 1, "ada", CREATION)
    assert storage.write(EXPERIMENT, 1, entry(1, old, frames=[1, 2])).kind is AnswerKind.WRITTEN
    storage.register_agent(EXPERIMENT, "ada")
    storage.append_metrics(EXPERIMENT, b"{}")
    storage.create_experiment("maze-2", "creation_id: other\n", "other", 1, 0)
    storage.delete_experiment(EXPERIMENT)
    assert storage.experiments() == ["maze-2"]
    # config, state and nothing else of the other experiment; the set of experiments
    assert sorted(storage.client.keys("*")) == [
        b"experiments",
        b"{maze-2:0}:state",
        b"{maze-2}:config",
    ]
    assert storage.write(EXPERIMENT, 1, entry(2, old)).kind is AnswerKind.UNKNOWN_EXPERIMENT
    with pytest.raises(UnknownExperimentError):
        storage.register_writer(EXPERIMENT, 1, "ada", CREATION)


def test_what_an_earlier_experiment_of_the_name_left_is_swept_at_creation(
    storage: RedisStore,
) -> None:
    create(storage)
    old = storage.register_writer(EXPERIMENT, 0, "ada", CREATION)
    storage.write(EXPERIMENT, 0, entry(1, old, frames=[1]))
    storage.client.delete(keys.config(EXPERIMENT))  # a deletion that was cut short here
    storage.create_experiment(EXPERIMENT, "creation_id: renewed\n", "renewed", 1, 0)
    assert storage.position(EXPERIMENT, 0).last_entry == 0
    assert storage.fetch_frames(EXPERIMENT, 0, [key(1)]) == [None]
    assert storage.write(EXPERIMENT, 0, entry(2, old)).kind is AnswerKind.UNKNOWN_EXPERIMENT


@pytest.mark.parametrize("name", ["Maze", "a b", "", "-a", "a{1}", "a*", "a" * 64])
def test_experiment_names_are_dns_labels(storage: RedisStore, name: str) -> None:
    with pytest.raises(InvalidNameError, match="use 1 to 63 of a-z"):
        storage.create_experiment(name, "", "x", 1, 0)


def test_agent_indices_count_from_zero_and_stay(storage: RedisStore) -> None:
    assert [storage.register_agent(EXPERIMENT, name) for name in ("b", "a", "b")] == [0, 1, 0]


# ---------------------------------------------------------------------- writing


def test_an_entry_comes_back_as_it_was_written(storage: RedisStore, incarnation: int) -> None:
    storage.write(EXPERIMENT, 0, entry(1, incarnation, frames=[4, 2], data=b"\x00\xff"))
    storage.write(EXPERIMENT, 0, entry(2, incarnation, frames=[2], steps=7))
    first, second = storage.read(EXPERIMENT, {0: 0}, 10, 0)
    assert (first.entry, first.nonce, first.previous) == (1, nonce(1), "")
    assert (second.entry, second.nonce, second.previous) == (2, nonce(2), nonce(1))
    assert (first.agent, first.incarnation, first.sequence) == ("ada", incarnation, 1)
    assert (first.learner, first.fence, first.version) == ("main", 3, 7)
    assert (first.segments, first.episodes) == (2, 1)
    assert (first.total_steps, second.total_steps) == (10, 17)
    assert first.frame_keys == (key(4), key(2))
    assert first.data == b"\x00\xff"
    # the frame's header names the last entry that names it: 1 for frame 4, 2 for frame 2
    four, two = storage.fetch_frames(EXPERIMENT, 0, [key(4), key(2)])
    assert (four[:12], two[:12]) == (b"000000000001", b"000000000002")
    assert four[12:] == two[12:] == payload()[12:]


def test_a_frame_that_is_there_is_not_written_again(storage: RedisStore, incarnation: int) -> None:
    storage.write(EXPERIMENT, 0, entry(1, incarnation, frames=[1, 2]))
    written = storage.write(
        EXPERIMENT, 0, entry(2, incarnation, frames=[2, 3], payloads={3: payload()})
    )
    assert written.kind is AnswerKind.WRITTEN
    account = storage.account(EXPERIMENT, 0)
    assert (account["frames_written"], account["frames_deduplicated"]) == ("3", "1")


def test_repeated_write_changes_nothing(storage: RedisStore, incarnation: int) -> None:
    storage.write(EXPERIMENT, 0, entry(1, incarnation, frames=[1]))
    before = storage.account(EXPERIMENT, 0)
    again = storage.write(EXPERIMENT, 0, entry(1, incarnation, frames=[1]))
    assert (again.kind, again.entry) == (AnswerKind.ALREADY_WRITTEN, 1)
    assert storage.account(EXPERIMENT, 0) == before


def test_a_hole_in_the_sequence_is_refused_until_it_is_accepted(
    storage: RedisStore, incarnation: int
) -> None:
    storage.write(EXPERIMENT, 0, entry(1, incarnation))
    refused = storage.write(EXPERIMENT, 0, entry(4, incarnation))
    assert (refused.kind, refused.sequence) == (AnswerKind.EXPECTED, 2)
    accepted = storage.write(EXPERIMENT, 0, entry(4, incarnation, accept_gap=True))
    assert (accepted.kind, accepted.entry) == (AnswerKind.WRITTEN, 2)
    assert storage.account(EXPERIMENT, 0)["gaps"] == "2"  # sequences 2 and 3


def test_a_lost_writer_hash_asks_for_everything_again(
    storage: RedisStore, incarnation: int
) -> None:
    storage.write(EXPERIMENT, 0, entry(1, incarnation))
    storage.client.delete(keys.writer(EXPERIMENT, 0, "ada"))
    answer = storage.write(EXPERIMENT, 0, entry(2, incarnation))
    assert (answer.kind, answer.sequence) == (AnswerKind.EXPECTED, 1)


def test_missing_payloads_are_asked_for_and_nothing_is_written(
    storage: RedisStore, incarnation: int
) -> None:
    storage.write(EXPERIMENT, 0, entry(1, incarnation, frames=[1]))
    answer = storage.write(
        EXPERIMENT, 0, entry(2, incarnation, frames=[1, 2, 3], payloads={3: payload()})
    )
    assert (answer.kind, answer.missing) == (AnswerKind.MISSING, (key(2),))
    assert storage.position(EXPERIMENT, 0).last_entry == 1
    assert storage.fetch_frames(EXPERIMENT, 0, [key(3)]) == [None]


def test_an_older_incarnation_is_superseded(storage: RedisStore, incarnation: int) -> None:
    newer = storage.register_writer(EXPERIMENT, 0, "ada", CREATION)
    assert newer > incarnation
    assert storage.write(EXPERIMENT, 0, entry(1, incarnation)).kind is AnswerKind.SUPERSEDED
    assert storage.write(EXPERIMENT, 0, entry(1, newer)).kind is AnswerKind.WRITTEN
    assert storage.last_sequence(EXPERIMENT, 0, "ada") == (newer, 1)
    assert storage.last_sequence(EXPERIMENT, 0, "nobody") == (0, 0)


def test_answers_come_in_the_order_of_their_checks(storage: RedisStore) -> None:
    """One write that deserves every answer; each obstacle is taken away in turn."""
    create(storage, capacity_bytes=1000)  # 4 + 400 bytes an entry: room for two
    old = storage.register_writer(EXPERIMENT, 0, "ada", CREATION)
    queue = ReaderSettings("main", ReaderKind.QUEUE, queue_steps=100)
    storage.register_reader(EXPERIMENT, 0, queue)
    lease = storage.acquire_reader(EXPERIMENT, 0, "main", "me", 60)
    assert lease is not None
    storage.write(EXPERIMENT, 0, entry(1, old))
    storage.write(EXPERIMENT, 0, entry(2, old))
    new = storage.register_writer(EXPERIMENT, 0, "ada", CREATION)
    storage.allow_steps(EXPERIMENT, 0, "main", 20, lease)

    def kind(sequence: int, incarnation: int = new, creation_id: str = CREATION) -> AnswerKind:
        write = entry(sequence, incarnation, frames=[9], payloads={}, creation_id=creation_id)
        return storage.write(EXPERIMENT, 0, write).kind

    assert kind(5, old, "another") is AnswerKind.UNKNOWN_EXPERIMENT
    assert kind(5, old) is AnswerKind.SUPERSEDED
    assert kind(0) is AnswerKind.ALREADY_WRITTEN
    assert kind(5) is AnswerKind.EXPECTED
    assert kind(1) is AnswerKind.WAIT
    storage.allow_steps(EXPERIMENT, 0, "main", None, lease)
    assert kind(1) is AnswerKind.FULL  # both entries are not confirmed
    assert storage.confirm(EXPERIMENT, 0, "main", 2, nonce(2), lease)
    assert kind(1) is AnswerKind.MISSING  # they may go now
    assert storage.position(EXPERIMENT, 0).first_entry == 1  # but nothing is dropped for a refusal


# ---------------------------------------------------------------------- retention


def test_a_window_keeps_its_steps_and_lets_the_rest_go(
    storage: RedisStore, incarnation: int
) -> None:
    storage.register_reader(EXPERIMENT, 0, WINDOW_20)
    for sequence in range(1, 6):
        storage.write(EXPERIMENT, 0, entry(sequence, incarnation, frames=[sequence, 100]))
    # 10 steps an entry, 20 kept: entries 4 and 5 live
    position = storage.position(EXPERIMENT, 0)
    assert (position.first_entry, position.last_entry, position.total_steps) == (4, 5, 50)
    account = storage.account(EXPERIMENT, 0)
    assert account["dropped:retention"] == account["dropped_entries"] == "3"
    assert (account["dropped_steps"], account["dropped_frames"]) == ("30", "3")
    frames = storage.fetch_frames(EXPERIMENT, 0, [key(3), key(4), key(100)])
    assert [frame is not None for frame in frames] == [False, True, True]


def test_every_reader_keeps_what_it_wants(storage: RedisStore, incarnation: int) -> None:
    storage.register_reader(EXPERIMENT, 0, WINDOW_20)
    storage.register_reader(EXPERIMENT, 0, ReaderSettings("wide", ReaderKind.WINDOW, 40))
    for sequence in range(1, 8):
        storage.write(EXPERIMENT, 0, entry(sequence, incarnation))
    assert storage.position(EXPERIMENT, 0).first_entry == 4  # 40 steps: entries 4 to 7
    storage.forget_reader(EXPERIMENT, 0, "wide")
    storage.write(EXPERIMENT, 0, entry(8, incarnation))
    assert storage.position(EXPERIMENT, 0).first_entry == 7


def test_the_byte_limit_drops_what_windows_want_and_counts_it(storage: RedisStore) -> None:
    create(storage, capacity_bytes=3000)
    incarnation = storage.register_writer(EXPERIMENT, 0, "ada", CREATION)
    storage.register_reader(EXPERIMENT, 0, ReaderSettings("main", ReaderKind.WINDOW, 10_000))
    for sequence in range(1, 11):  # 600 + 400 bytes each: three fit
        write = entry(sequence, incarnation, data=b"d" * 600)
        assert storage.write(EXPERIMENT, 0, write).kind is AnswerKind.WRITTEN
        assert int(storage.account(EXPERIMENT, 0)["bytes"]) <= 3000
    account = storage.account(EXPERIMENT, 0)
    assert (account["dropped:bytes"], account["dropped:retention"]) == ("7", "0")


def test_without_readers_everything_is_kept_up_to_the_byte_limit(storage: RedisStore) -> None:
    create(storage, capacity_bytes=3000)
    incarnation = storage.register_writer(EXPERIMENT, 0, "ada", CREATION)
    for sequence in range(1, 5):
        storage.write(EXPERIMENT, 0, entry(sequence, incarnation, data=b"d" * 600))
    position = storage.position(EXPERIMENT, 0)
    assert (position.first_entry, position.last_entry) == (2, 4)


def test_an_entry_too_big_for_one_write_to_make_room_asks_for_the_drop_script(
    storage: RedisStore,
) -> None:
    create(storage, capacity_bytes=20_000)
    incarnation = storage.register_writer(EXPERIMENT, 0, "ada", CREATION)
    for sequence in range(1, 11):  # 1000 + 400 bytes each
        storage.write(EXPERIMENT, 0, entry(sequence, incarnation, data=b"d" * 1000))
    # 18,000 + 400 bytes need 12,400 freed: nine entries, and a write drops four
    big = entry(11, incarnation, data=b"d" * 18_000)
    assert storage.write(EXPERIMENT, 0, big).kind is AnswerKind.DROP
    assert storage.drop(EXPERIMENT, 0, CREATION, 18_400) == 9
    assert storage.write(EXPERIMENT, 0, big).kind is AnswerKind.WRITTEN


def test_an_entry_larger_than_the_limit_is_taken_when_nothing_else_lives(
    storage: RedisStore,
) -> None:
    create(storage, capacity_bytes=1000)
    incarnation = storage.register_writer(EXPERIMENT, 0, "ada", CREATION)
    big = entry(1, incarnation, data=b"d" * 5000)
    assert storage.write(EXPERIMENT, 0, big).kind is AnswerKind.WRITTEN


def test_a_queue_reader_holds_the_limit_until_it_confirms(storage: RedisStore) -> None:
    create(storage, capacity_bytes=2500)
    incarnation = storage.register_writer(EXPERIMENT, 0, "ada", CREATION)
    storage.register_reader(EXPERIMENT, 0, ReaderSettings("ppo", ReaderKind.QUEUE, queue_steps=30))
    lease = storage.acquire_reader(EXPERIMENT, 0, "ppo", "me", 60)
    assert lease is not None
    for sequence in (1, 2):
        storage.write(EXPERIMENT, 0, entry(sequence, incarnation, data=b"d" * 800))
    third = entry(3, incarnation, data=b"d" * 800)
    refused = storage.write(EXPERIMENT, 0, third)
    assert (refused.kind, refused.reader) == (AnswerKind.FULL, "ppo")
    assert not storage.confirm(EXPERIMENT, 0, "ppo", 1, "another-nonce", lease)
    assert storage.confirm(EXPERIMENT, 0, "ppo", 1, nonce(1), lease)
    assert storage.write(EXPERIMENT, 0, third).kind is AnswerKind.WRITTEN


def test_a_waiting_write_says_for_whom_with_numbers(storage: RedisStore, incarnation: int) -> None:
    storage.register_reader(EXPERIMENT, 0, WINDOW_20)
    lease = storage.acquire_reader(EXPERIMENT, 0, "main", "me", 60)
    assert lease is not None
    storage.allow_steps(EXPERIMENT, 0, "main", 15, lease)
    storage.write(EXPERIMENT, 0, entry(1, incarnation))
    answer = storage.write(EXPERIMENT, 0, entry(2, incarnation))
    assert (answer.kind, answer.reader) == (AnswerKind.WAIT, "main")
    assert (answer.steps, answer.allowed_steps) == (10, 15)


# ---------------------------------------------------------------------- reading


def test_reading_follows_the_cursors_of_all_shards(storage: RedisStore) -> None:
    create(storage, shards=2)
    for shard in (0, 1):
        incarnation = storage.register_writer(EXPERIMENT, shard, "ada", CREATION)
        for sequence in (1, 2, 3):
            storage.write(EXPERIMENT, shard, entry(sequence, incarnation))
    found = storage.read(EXPERIMENT, {0: 1, 1: 2}, 10, 0)
    assert [(one.shard, one.entry) for one in found] == [(0, 2), (0, 3), (1, 3)]
    assert len(storage.read(EXPERIMENT, {0: 0, 1: 0}, 2, 0)) == 4  # two a shard
    assert storage.read(EXPERIMENT, {0: 3, 1: 3}, 10, 0.05) == []


def test_a_blocked_reader_wakes_when_an_entry_comes(storage: RedisStore, incarnation: int) -> None:
    def write_later() -> None:
        time.sleep(0.3)
        storage.write(EXPERIMENT, 0, entry(1, incarnation))

    writer = threading.Thread(target=write_later)
    writer.start()
    found = storage.read(EXPERIMENT, {0: 0}, 10, 10)
    writer.join()
    assert [one.entry for one in found] == [1]


@pytest.mark.damages
def test_an_entry_with_damaged_fields_comes_without_data(
    storage: RedisStore, incarnation: int
) -> None:
    storage.write(EXPERIMENT, 0, entry(1, incarnation))
    storage.client.xadd(keys.segments(EXPERIMENT, 0), {"steps": "many", "data": "x"}, id="2-0")
    first, second = storage.read(EXPERIMENT, {0: 0}, 10, 0)
    assert (first.data, second.data) == (b"data", b"")
    assert second.entry == 2


def test_nonce_of_a_live_entry_only(storage: RedisStore, incarnation: int) -> None:
    storage.register_reader(EXPERIMENT, 0, ReaderSettings("main", ReaderKind.WINDOW, 10))
    for sequence in (1, 2):
        storage.write(EXPERIMENT, 0, entry(sequence, incarnation))
    assert storage.nonce(EXPERIMENT, 0, 1) is None
    assert storage.nonce(EXPERIMENT, 0, 2) == nonce(2)


def test_a_damaged_frame_is_deleted_once_and_asked_for_again(
    storage: RedisStore, incarnation: int
) -> None:
    storage.write(EXPERIMENT, 0, entry(1, incarnation, frames=[1]))
    (seen,) = storage.fetch_frames(EXPERIMENT, 0, [key(1)])
    assert not storage.delete_damaged_frame(EXPERIMENT, 0, key(1), seen[:-1] + b"x")
    assert storage.delete_damaged_frame(EXPERIMENT, 0, key(1), b"9" * 12 + seen[12:])
    assert not storage.delete_damaged_frame(EXPERIMENT, 0, key(1), seen)
    again = entry(2, incarnation, frames=[1], payloads={})
    assert storage.write(EXPERIMENT, 0, again).missing == (key(1),)
    storage.write(EXPERIMENT, 0, entry(2, incarnation, frames=[1]))
    assert storage.audit(EXPERIMENT).problems == ()


def test_a_quarantined_entry_stays_in_the_stream(storage: RedisStore, incarnation: int) -> None:
    storage.write(EXPERIMENT, 0, entry(1, incarnation))
    (one,) = storage.read(EXPERIMENT, {0: 0}, 1, 0)
    storage.quarantine(EXPERIMENT, 0, one, "checksum does not match")
    ((_, copy),) = storage.client.xrange(keys.quarantine(EXPERIMENT, 0))
    assert copy[b"reason"] == b"checksum does not match"
    assert copy[b"data"] == b"data"
    assert storage.nonce(EXPERIMENT, 0, 1) == nonce(1)


def test_a_queue_reader_begins_at_the_end_or_the_start(
    storage: RedisStore, incarnation: int
) -> None:
    for sequence in (1, 2):
        storage.write(EXPERIMENT, 0, entry(sequence, incarnation))
    late = ReaderSettings("late", ReaderKind.QUEUE, queue_steps=50)
    whole = ReaderSettings("whole", ReaderKind.QUEUE, queue_steps=50, from_start=True)
    assert storage.register_reader(EXPERIMENT, 0, late) == 2
    assert storage.register_reader(EXPERIMENT, 0, whole) == 0
    storage.write(EXPERIMENT, 0, entry(3, incarnation))
    assert storage.register_reader(EXPERIMENT, 0, late) == 2  # its mark is kept


# ---------------------------------------------------------------------- roles


def test_a_role_has_one_holder_and_a_fence_that_grows(storage: RedisStore) -> None:
    first = storage.acquire(EXPERIMENT, "learner-main", "a", 0.2)
    assert first is not None
    assert storage.acquire(EXPERIMENT, "learner-main", "b", 60) is None
    storage.renew(EXPERIMENT, first, 0.2)
    time.sleep(0.3)
    second = storage.acquire(EXPERIMENT, "learner-main", "b", 60)
    assert second is not None
    assert second.fence > first.fence
    with pytest.raises(LostRoleError):
        storage.renew(EXPERIMENT, first, 60)
    storage.release(EXPERIMENT, first)  # no longer its own: changes nothing
    storage.renew(EXPERIMENT, second, 60)
    storage.release(EXPERIMENT, second)
    third = storage.acquire(EXPERIMENT, "learner-main", "c", 60, least_fence=second.fence + 10**9)
    assert third is not None
    assert third.fence == second.fence + 10**9


def test_a_reader_of_a_shard_has_one_holder(storage: RedisStore, incarnation: int) -> None:
    with pytest.raises(UnknownExperimentError):
        storage.acquire_reader(EXPERIMENT, 0, "main", "a", 60)  # not registered
    storage.register_reader(EXPERIMENT, 0, WINDOW_20)
    lease = storage.acquire_reader(EXPERIMENT, 0, "main", "a", 60)
    assert lease is not None
    assert storage.acquire_reader(EXPERIMENT, 0, "main", "b", 60) is None
    storage.release_reader(EXPERIMENT, 0, "main", lease)
    other = storage.acquire_reader(EXPERIMENT, 0, "main", "b", 60)
    assert other is not None
    for refused in (
        lambda: storage.renew_reader(EXPERIMENT, 0, "main", lease, 60),
        lambda: storage.confirm(EXPERIMENT, 0, "main", 1, nonce(1), lease),
        lambda: storage.allow_steps(EXPERIMENT, 0, "main", 5, lease),
    ):
        with pytest.raises(LostRoleError):
            refused()


def test_only_the_lease_holder_writes_the_learner(storage: RedisStore) -> None:
    create(storage)
    old = storage.acquire(EXPERIMENT, "learner-main", "a", 0.05)
    time.sleep(0.1)
    new = storage.acquire(EXPERIMENT, "learner-main", "b", 60)
    assert old is not None
    assert new is not None
    storage.write_learner(EXPERIMENT, "main", "a: 1\n", new)
    with pytest.raises(LostRoleError):
        storage.write_learner(EXPERIMENT, "main", "a: 2\n", old)
    assert storage.read_learner(EXPERIMENT, "main") == "a: 1\n"
    assert storage.learners(EXPERIMENT) == ["main"]


# ---------------------------------------------------------------------- parameters


def test_parameters_go_forward_only_and_the_newest_are_kept(storage: RedisStore) -> None:
    lease = storage.acquire(EXPERIMENT, "learner-main", "a", 60)
    assert lease is not None
    assert storage.claim_parameters(EXPERIMENT, "main", lease) is None
    assert storage.parameters_head(EXPERIMENT, "main") is None
    for version in (1, 2, 3):
        value = b"weights %d" % version
        storage.publish(EXPERIMENT, "main", lease, version, value, iteration=version * 10, keep=2)
    head = storage.parameters_head(EXPERIMENT, "main")
    assert head is not None
    assert (head.fence, head.version, head.iteration) == (lease.fence, 3, 30)
    assert storage.parameters(EXPERIMENT, "main", head) == b"weights 3"
    assert len(storage.client.keys("{maze}:parameters:main:*")) == 2  # versions 2 and 3
    assert storage.client.ttl(keys.parameters_value(EXPERIMENT, "main", lease.fence, 3)) == -1
    storage.publish(EXPERIMENT, "main", lease, 3, b"weights 3", keep=2)  # repeated: nothing changes
    assert storage.parameters_head(EXPERIMENT, "main") == head
    with pytest.raises(StorageError, match="version 2"):
        storage.publish(EXPERIMENT, "main", lease, 2, b"other")


def test_an_older_learner_cannot_publish(storage: RedisStore) -> None:
    old = storage.acquire(EXPERIMENT, "learner-main", "a", 0.05)
    assert old is not None
    storage.claim_parameters(EXPERIMENT, "main", old)
    storage.publish(EXPERIMENT, "main", old, 9, b"nine")
    time.sleep(0.1)
    new = storage.acquire(EXPERIMENT, "learner-main", "b", 60)
    assert new is not None
    head = storage.claim_parameters(EXPERIMENT, "main", new)
    assert head is not None
    assert head.version == 9
    with pytest.raises(LostRoleError):
        storage.publish(EXPERIMENT, "main", old, 10, b"ten")
    with pytest.raises(LostRoleError):
        storage.claim_parameters(EXPERIMENT, "main", old)
    storage.publish(EXPERIMENT, "main", new, 10, b"ten again")
    newest = storage.parameters_head(EXPERIMENT, "main")
    assert newest is not None
    assert newest.order == (new.fence, 10)


def test_a_subscriber_is_told(storage: RedisStore) -> None:
    lease = storage.acquire(EXPERIMENT, "learner-main", "a", 60)
    assert lease is not None
    storage.claim_parameters(EXPERIMENT, "main", lease)
    subscription = storage.subscribe(EXPERIMENT, "main")
    assert subscription.wait(5)  # subscribed: look what is there
    assert not subscription.wait(0.05)
    storage.publish(EXPERIMENT, "main", lease, 1, b"weights")
    assert subscription.wait(5)
    assert not subscription.wait(0.05)
    subscription.close()


# ---------------------------------------------------------------------- members, metrics


def test_a_member_lives_as_long_as_its_heartbeat(storage: RedisStore) -> None:
    storage.heartbeat(EXPERIMENT, "agent-a", {"role": "agent", "waiting": "x"}, 60)
    storage.heartbeat(EXPERIMENT, "agent-b", {"role": "agent"}, 0.1)
    storage.heartbeat(EXPERIMENT, "agent-a", {"role": "agent"}, 60)  # replaces all fields
    time.sleep(0.2)
    assert storage.members(EXPERIMENT) == {"agent-a": {"role": "agent"}}
    assert storage.client.smembers(keys.members(EXPERIMENT)) == {b"agent-a"}
    storage.leave(EXPERIMENT, "agent-a")
    assert storage.members(EXPERIMENT) == {}


def test_metrics_are_read_on_from_a_cursor(storage: RedisStore) -> None:
    for number in range(5):
        storage.append_metrics(EXPERIMENT, b"%d" % number)
    first = storage.read_metrics(EXPERIMENT, "0", 3)
    rest = storage.read_metrics(EXPERIMENT, first[-1][0], 10)
    assert [record for _, record in first + rest] == [b"0", b"1", b"2", b"3", b"4"]
    storage.append_log(EXPERIMENT, b"a line")


# ---------------------------------------------------------------------- the audit


@pytest.mark.damages
def test_the_audit_finds_each_kind_of_damage(storage: RedisStore, incarnation: int) -> None:
    for sequence in (1, 2, 3):
        storage.write(EXPERIMENT, 0, entry(sequence, incarnation, frames=[sequence]))
    assert storage.audit(EXPERIMENT).problems == ()
    storage.client.delete(keys.frame(EXPERIMENT, 0, key(2)))
    storage.client.set(keys.frame(EXPERIMENT, 0, key(77)), payload())
    report = storage.audit(EXPERIMENT)
    assert report.dangling == (key(2),)
    assert report.orphaned == (key(77),)
    storage.client.xdel(keys.segments(EXPERIMENT, 0), "2-0")
    problems = " | ".join(storage.audit(EXPERIMENT).problems)
    assert "entry 3 follows entry 1" in problems
    assert "live entries: the account says 3, there are 2" in problems
    storage.client.hset(keys.state(EXPERIMENT, 0), "dropped:bytes", "1")
    assert "dropped entries" in " | ".join(storage.audit(EXPERIMENT).problems)


def test_the_audit_of_nothing_says_so(storage: RedisStore) -> None:
    assert storage.audit("nowhere").problems == ("experiment 'nowhere': no shard has a state",)
