"""Any order of writes, repeats, confirmations and drops leaves a store that adds up."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage.fake import fake_storage
from storage.protocol import AnswerKind, Lease, ReaderKind, ReaderSettings
from tests.storage.entries import CREATION, EXPERIMENT, create, entry, key, nonce

FRAMES = st.lists(st.integers(0, 6), max_size=4, unique=True)
ENTRY_BYTES = 400 + 4
FRAME_BYTES = 200 + 40


class Shard(RuleBasedStateMachine):
    """The model: every entry ever written, as (steps, frames), and who wants what."""

    def __init__(self) -> None:
        super().__init__()
        self.store = fake_storage()
        self.written: list[tuple[int, list[int]]] = []
        self.sequence = 0
        self.windows: dict[str, int] = {}
        self.confirmed: dict[str, int] = {}
        self.leases: dict[str, Lease] = {}

    @initialize(capacity_bytes=st.sampled_from([0, 2000, 5000]))
    def begin(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        create(self.store, capacity_bytes=capacity_bytes)
        self.incarnation = self.store.register_writer(EXPERIMENT, 0, "ada", CREATION)

    # ------------------------------------------------------------------ what may happen

    @rule(frames=FRAMES, steps=st.integers(1, 20), payloads=st.booleans())
    def write(self, frames: list[int], steps: int, payloads: bool) -> None:
        one = entry(
            self.sequence + 1,
            self.incarnation,
            frames=frames,
            steps=steps,
            payloads=None if payloads else {},
        )
        answer = self.store.write(EXPERIMENT, 0, one)
        if answer.kind is AnswerKind.MISSING:
            assert not payloads
            assert set(answer.missing) <= {key(number) for number in frames}
        elif answer.kind is AnswerKind.WRITTEN:
            self.sequence += 1
            self.written.append((steps, frames))
            assert answer.entry == len(self.written)
        elif answer.kind is AnswerKind.FULL:
            assert self.capacity_bytes
            assert answer.reader in self.confirmed or not self.windows
        else:
            assert answer.kind is AnswerKind.DROP

    @precondition(lambda self: self.sequence)
    @rule()
    def repeat(self) -> None:
        again = entry(self.sequence, self.incarnation, frames=[99])
        assert self.store.write(EXPERIMENT, 0, again).kind is AnswerKind.ALREADY_WRITTEN

    @rule(ahead=st.integers(2, 5))
    def skip(self, ahead: int) -> None:
        answer = self.store.write(EXPERIMENT, 0, entry(self.sequence + ahead, self.incarnation))
        assert (answer.kind, answer.sequence) == (AnswerKind.EXPECTED, self.sequence + 1)

    @rule()
    def restart_writer(self) -> None:
        self.incarnation = self.store.register_writer(EXPERIMENT, 0, "ada", CREATION)
        self.sequence = 0

    @rule(name=st.sampled_from(["a", "b"]), capacity=st.integers(1, 60))
    def register_window(self, name: str, capacity: int) -> None:
        self.store.register_reader(
            EXPERIMENT, 0, ReaderSettings(name, ReaderKind.WINDOW, capacity_steps=capacity)
        )
        self.windows[name] = capacity

    @rule(name=st.sampled_from(["q", "r"]))
    def register_queue(self, name: str) -> None:
        settings_ = ReaderSettings(name, ReaderKind.QUEUE, queue_steps=100)
        mark = self.store.register_reader(EXPERIMENT, 0, settings_)
        assert mark == self.confirmed.setdefault(name, len(self.written))
        if name not in self.leases:
            lease = self.store.acquire_reader(EXPERIMENT, 0, name, "me", 1000)
            assert lease is not None
            self.leases[name] = lease

    @precondition(lambda self: self.confirmed and self.written)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.confirmed)))
        first = self.store.position(EXPERIMENT, 0).first_entry
        number = data.draw(st.integers(1, len(self.written)))
        live = self.store.nonce(EXPERIMENT, 0, number)
        done = self.store.confirm(EXPERIMENT, 0, name, number, live or nonce(1), self.leases[name])
        assert done == (number >= first)
        if done:
            self.confirmed[name] = max(self.confirmed[name], number)

    @rule(name=st.sampled_from(["a", "b", "q", "r"]))
    def forget_reader(self, name: str) -> None:
        self.store.forget_reader(EXPERIMENT, 0, name)
        self.windows.pop(name, None)
        self.confirmed.pop(name, None)
        self.leases.pop(name, None)

    @rule(need_bytes=st.sampled_from([0, 1500]))
    def drop(self, need_bytes: int) -> None:
        self.store.drop(EXPERIMENT, 0, CREATION, need_bytes)

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def the_account_adds_up(self) -> None:
        if self.written:
            assert self.store.audit(EXPERIMENT).problems == ()

    @invariant()
    def live_entries_are_the_newest_and_have_their_frames(self) -> None:
        if not self.written:
            return
        live = self.store.read(EXPERIMENT, {0: 0}, 1000, 0)
        assert [one.entry for one in live] == list(
            range(len(self.written) - len(live) + 1, len(self.written) + 1)
        )
        for one in live:
            steps, frames = self.written[one.entry - 1]
            assert (one.steps, one.frame_keys) == (steps, tuple(key(number) for number in frames))
        named = {number for one in live for number in self.written[one.entry - 1][1]}
        there = {name.decode().rpartition(":")[2] for name in self.store.client.keys("*:frame:*")}
        assert there == {key(number) for number in named}

    @invariant()
    def what_a_reader_wants_is_there(self) -> None:
        first = self.store.position(EXPERIMENT, 0).first_entry
        for mark in self.confirmed.values():
            assert first <= mark + 1

    @invariant()
    def the_byte_limit_holds(self) -> None:
        if self.capacity_bytes and len(self.written) > 1:
            account = self.store.account(EXPERIMENT, 0)
            used = int(account["bytes"])
            counted = sum(
                ENTRY_BYTES + 16 * len(self.written[one.entry - 1][1])
                for one in self.store.read(EXPERIMENT, {0: 0}, 1000, 0)
            ) + FRAME_BYTES * len(self.store.client.keys("*:frame:*"))
            assert used == counted
            assert used <= self.capacity_bytes

    def teardown(self) -> None:
        self.store.close()


Shard.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestShard = Shard.TestCase
