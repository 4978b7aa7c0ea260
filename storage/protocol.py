"""The seam between the pipeline and whatever keeps its data: every operation, with its meaning.

Guarantees that every backend gives (tests/storage/test_contract.py holds them):
- writing an entry with its frames, and dropping one, each happen whole or not at all;
- a write, a publication, a confirmation may be repeated: the second time changes nothing;
- no call waits longer than the backend's stated limit: it returns, or raises UnavailableError.

Names: `experiment` is a checked DNS label, `shard` counts from 0, `entry` counts from 1 in a shard.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True)
class EntryWrite:
    """One entry on its way into a shard."""

    creation_id: str
    agent: str
    incarnation: int
    sequence: int
    """Counts this incarnation's entries, from 1."""
    nonce: str
    """16 random characters: names this entry beyond its number."""
    learner: str
    """Whose parameters acted."""
    fence: int
    version: int
    """(fence, version) of the parameters that acted; (0, 0) before the first."""
    segments: int
    steps: int
    episodes: int
    """Episodes that ended in this entry."""
    frame_keys: tuple[str, ...]
    data: bytes
    payloads: Mapping[str, bytes]
    """Frame key to encoded frame, for keys that the writer does not know to be there."""
    accept_gap: bool = False
    """The writer no longer holds what `expected` asked for: take this sequence, count the gap."""


class AnswerKind(StrEnum):
    """What the write script says; in the order in which it checks."""

    UNKNOWN_EXPERIMENT = "unknown experiment"
    SUPERSEDED = "superseded"
    ALREADY_WRITTEN = "already written"
    EXPECTED = "expected"
    WAIT = "wait"
    DROP = "drop"
    FULL = "full"
    MISSING = "missing"
    WRITTEN = "written"


@dataclass(frozen=True)
class Answer:
    kind: AnswerKind
    entry: int = 0
    """WRITTEN: its number. ALREADY_WRITTEN: the shard's last entry."""
    sequence: int = 0
    """EXPECTED: send from this sequence on."""
    missing: tuple[str, ...] = ()
    """MISSING: frame keys whose payloads are wanted."""
    reader: str = ""
    """WAIT and FULL: for whom."""
    steps: int = 0
    """WAIT: steps written so far."""
    allowed_steps: int = 0
    """WAIT: steps that the reader allows. FULL: 0."""


@dataclass(frozen=True)
class StoredEntry:
    """One entry as read back. `data` and `frame_keys` are not yet decoded or checked."""

    shard: int
    entry: int
    nonce: str
    previous: str
    """Nonce of the entry before this one; "" for the first."""
    agent: str
    incarnation: int
    sequence: int
    learner: str
    fence: int
    version: int
    segments: int
    steps: int
    episodes: int
    total_steps: int
    """Steps written to the shard so far, this entry included."""
    frame_keys: tuple[str, ...]
    data: bytes


@dataclass(frozen=True)
class Position:
    """Where a shard's stream stands."""

    first_entry: int
    """First live entry; last_entry + 1 when none is live."""
    last_entry: int
    last_nonce: str
    total_steps: int


class ReaderKind(StrEnum):
    WINDOW = "window"
    QUEUE = "queue"


@dataclass(frozen=True)
class ReaderSettings:
    """A named learner's replay over one shard, as retention knows it."""

    name: str
    kind: ReaderKind
    capacity_steps: int = 0
    """WINDOW: this reader's share of the shard, total capacity / shards."""
    queue_steps: int = 0
    """QUEUE: steps that may be written and not yet confirmed."""
    from_start: bool = False
    """QUEUE: begin at the first live entry, not at the end."""


@dataclass(frozen=True)
class Lease:
    """A role that must be single, held. Writes under it carry fence and token."""

    role: str
    fence: int
    token: str


@dataclass(frozen=True)
class ParametersHead:
    """What the parameters hash says: the newest published version."""

    fence: int
    version: int
    entry: int
    """Synchronous mode: the last entry this version has learned from; else 0."""
    iteration: int
    size_bytes: int
    content_hash: str
    value_name: str
    message: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """Newer is greater: a higher fence always wins."""
        return (self.fence, self.version)


class Subscription(Protocol):
    """Notices that new parameters are out. Missed ones are normal: read the head as well."""

    def wait(self, timeout_s: float) -> bool:
        """True as soon as a notice comes, False after the whole `timeout_s`. Reconnects by itself:
        a reconnection counts as a notice, for what was missed meanwhile. Raises UnavailableError
        while the server cannot be reached."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class AuditReport:
    """What `audit` found in one experiment; sound exactly when `problems` is empty."""

    problems: tuple[str, ...]
    written: int
    dropped: int
    live: int
    steps: int
    frames: int
    """Live frames."""
    frames_written: int
    frames_deduplicated: int
    dangling: tuple[str, ...] = ()
    """Frames that a live entry names and that are not there."""
    orphaned: tuple[str, ...] = ()
    """Frames that no live entry names."""
    moving: bool = False
    """Entries were written or dropped meanwhile: sums over what is live were not compared."""
    dropped_by_reason: Mapping[str, int] = field(default_factory=dict)


class Storage(Protocol):
    """Everything the pipeline asks of a backend. One instance belongs to one process; threads may
    share it. A process that was forked opens its own."""

    # ------------------------------------------------------------------ experiments

    def create_experiment(
        self, experiment: str, config: str, creation_id: str, shards: int, capacity_bytes: int
    ) -> str:
        """Write `config` (YAML) once, and complete every shard's state from it.

        Returns the configuration that stands: the caller's, or the one already there. Completing is
        repeated at each call, so a creation that was cut short is mended by the next.
        `capacity_bytes` is the byte limit of one shard; 0 means none.
        """
        ...

    def read_config(self, experiment: str) -> str | None: ...

    def experiments(self) -> list[str]: ...

    def delete_experiment(self, experiment: str) -> int:
        """Remove every key of the experiment, config first, then states; returns keys removed."""
        ...

    def write_learner(self, experiment: str, name: str, config: str, lease: Lease) -> None:
        """Write a learner's configuration (YAML). Raises LostRoleError."""
        ...

    def read_learner(self, experiment: str, name: str) -> str | None: ...

    def learners(self, experiment: str) -> list[str]: ...

    # ------------------------------------------------------------------ writing

    def register_agent(self, experiment: str, agent: str) -> int:
        """Agent index: allotted from 0 at the first call of an id, and kept."""
        ...

    def register_writer(self, experiment: str, shard: int, agent: str, creation_id: str) -> int:
        """New incarnation: the server's time in milliseconds, and at least one more than the last.
        Raises UnknownExperimentError."""
        ...

    def write(self, experiment: str, shard: int, entry: EntryWrite) -> Answer:
        """Write one entry with its frames in one round trip; see `AnswerKind`."""
        ...

    def drop(self, experiment: str, shard: int, creation_id: str, need_bytes: int = 0) -> int:
        """Drop entries that retention lets go, oldest first, a bounded number a call; returns how
        many. Works when the server is out of memory."""
        ...

    def last_sequence(self, experiment: str, shard: int, agent: str) -> tuple[int, int]:
        """(incarnation, sequence) of a writer's last entry; (0, 0) when unknown."""
        ...

    # ------------------------------------------------------------------ reading

    def read(
        self, experiment: str, cursors: Mapping[int, int], count: int, wait_s: float
    ) -> list[StoredEntry]:
        """Entries after the cursors (shard to last entry read), at most `count` a shard, in order
        within a shard. Waits up to `wait_s` for the first; 0 does not wait. Idleness is no error.
        An entry whose fields are damaged comes with empty `data`."""
        ...

    def position(self, experiment: str, shard: int) -> Position: ...

    def nonce(self, experiment: str, shard: int, entry: int) -> str | None:
        """Nonce of a live entry, None when it is not live."""
        ...

    def fetch_frames(self, experiment: str, shard: int, keys: Sequence[str]) -> list[bytes | None]:
        """Encoded frames, header included; None where there is none."""
        ...

    def delete_damaged_frame(self, experiment: str, shard: int, key: str, seen: bytes) -> bool:
        """Delete a frame if its bytes are still those `seen`, header apart; the next write that
        names it is answered MISSING."""
        ...

    def quarantine(self, experiment: str, shard: int, entry: StoredEntry, reason: str) -> None:
        """Keep a copy of an entry that could not be decoded; the entry stays."""
        ...

    def register_reader(self, experiment: str, shard: int, reader: ReaderSettings) -> int:
        """Make a reader known to retention, or update its settings; returns its mark (the last
        entry it has confirmed; entries after it are its to read)."""
        ...

    def forget_reader(self, experiment: str, shard: int, name: str) -> None: ...

    def acquire_reader(
        self, experiment: str, shard: int, name: str, holder: str, duration_s: float
    ) -> Lease | None:
        """Lease on a reader of a shard, held in the shard's state; None while another holds it."""
        ...

    def renew_reader(
        self, experiment: str, shard: int, name: str, lease: Lease, duration_s: float
    ) -> None:
        """Raises LostRoleError when another took over."""
        ...

    def release_reader(self, experiment: str, shard: int, name: str, lease: Lease) -> None: ...

    def confirm(
        self, experiment: str, shard: int, name: str, entry: int, nonce: str, lease: Lease
    ) -> bool:
        """A queue reader has used everything up to `entry`. False when that live entry has another
        nonce; raises LostRoleError when the lease is not current. Never moves a mark back."""
        ...

    def allow_steps(
        self, experiment: str, shard: int, name: str, allowed_steps: int | None, lease: Lease
    ) -> None:
        """Steps that may be written to the shard in all before WAIT is answered; None lifts it."""
        ...

    # ------------------------------------------------------------------ leases of an experiment

    def acquire(
        self, experiment: str, role: str, holder: str, duration_s: float, least_fence: int = 0
    ) -> Lease | None:
        """Take a single role, None while another holds it. The fence only grows: the largest of the
        server's time in milliseconds, the last fence plus one, and `least_fence`."""
        ...

    def renew(self, experiment: str, lease: Lease, duration_s: float) -> None:
        """Raises LostRoleError when another took over."""
        ...

    def release(self, experiment: str, lease: Lease) -> None: ...

    # ------------------------------------------------------------------ parameters

    def claim_parameters(
        self, experiment: str, learner: str, lease: Lease
    ) -> ParametersHead | None:
        """Raise the fence of the parameters hash to the lease's, so that an older holder can no
        longer publish; returns the head as it stood."""
        ...

    def publish(
        self,
        experiment: str,
        learner: str,
        lease: Lease,
        version: int,
        value: bytes,
        *,
        iteration: int = 0,
        entry: int = 0,
        message: str = "",
        keep: int = 4,
    ) -> None:
        """Make a parameter set the newest, drop those beyond `keep`, send the notice. Repeating the
        same version with the same bytes changes nothing. Raises LostRoleError."""
        ...

    def parameters_head(self, experiment: str, learner: str) -> ParametersHead | None: ...

    def parameters(self, experiment: str, learner: str, head: ParametersHead) -> bytes | None:
        """The bytes of a set; None when newer ones have displaced it (read the head again)."""
        ...

    def subscribe(self, experiment: str, learner: str) -> Subscription: ...

    # ------------------------------------------------------------------ members, metrics

    def heartbeat(
        self, experiment: str, member_id: str, fields: Mapping[str, str], expire_s: float
    ) -> None: ...

    def members(self, experiment: str) -> dict[str, dict[str, str]]:
        """Living members; ids whose heartbeat expired are removed from the set."""
        ...

    def leave(self, experiment: str, member_id: str) -> None: ...

    def append_metrics(self, experiment: str, record: bytes) -> None: ...

    def read_metrics(self, experiment: str, after: str, count: int) -> list[tuple[str, bytes]]:
        """(cursor, record) pairs after the cursor; "0" is the beginning."""
        ...

    def append_log(self, experiment: str, line: bytes) -> None: ...

    # ------------------------------------------------------------------ insight

    def account(self, experiment: str, shard: int) -> dict[str, str]:
        """The shard's state hash as text: counters, marks, settings."""
        ...

    def audit(self, experiment: str) -> AuditReport:
        """Recompute the account from what lies in the store; only reads."""
        ...

    def check_server(self) -> list[str]:
        """Warnings about the server, each with its remedy; raises UnsuitableServerError for what
        would lose data (version below 6.2, an eviction policy, a replica, cluster mode)."""
        ...

    def close(self) -> None: ...
