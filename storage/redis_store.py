"""The storage protocol over one Redis server: each operation is one command, pipeline or script.

Guarantees: those of storage/protocol.py; the scripts in storage/lua decide, this file only speaks.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import redis
import xxhash

from storage import keys
from storage.audit import audit
from storage.codec import FRAME_ENTRY_DIGITS
from storage.connection import OutOfMemoryError, storage_errors
from storage.errors import LostRoleError, StorageError, UnknownExperimentError
from storage.protocol import (
    Answer,
    AnswerKind,
    AuditReport,
    EntryWrite,
    Lease,
    ParametersHead,
    Position,
    ReaderSettings,
    StoredEntry,
    Subscription,
)
from storage.scripts import Scripts
from storage.server_check import check_server
from storage.stream_entry import FRAME_OVERHEAD_BYTES, to_stored_entry
from storage.subscription import ChannelSubscription

BLOCK_S = 2.0
"""One blocking read; longer waits are several, so that no call outlasts the answer's time limit."""
DROPS_A_CALL = 64
OOM_FREE_BYTES = 1 << 20
"""Freed at least when the server is out of memory, so that the next write finds room."""
FRAMES_A_REPLY = 256
KEYS_A_DELETE = 500
READER_TIMEOUT_S = 30.0
"""A reader holds others back this long after its lease ran out."""
UNPUBLISHED_EXPIRES_S = 60
"""A parameter set whose publisher died before it told anyone goes by itself."""
MOST_METRICS = 20_000
MOST_LOG_LINES = 10_000
MOST_QUARANTINED = 100


class RedisStore:
    """`storage.protocol.Storage` on a client with decode_responses off. Threads may share it."""

    def __init__(
        self, client: redis.Redis, where: str, on_close: Callable[[], None] | None = None
    ) -> None:
        self._client: Any = client  # its replies are bytes, which its types do not know
        self._where = where
        self._on_close = on_close
        self._scripts = Scripts(client)
        self._refused_for_memory: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    @property
    def client(self) -> redis.Redis:
        """For tests and tools that look at the keys themselves."""
        return self._client

    def close(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            self._client.close()
        if self._on_close is not None:
            self._on_close()

    def check_server(self) -> list[str]:
        with self._errors():
            return check_server(self._client)

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return storage_errors(self._where)

    def _run(self, script: str, script_keys: list[str], arguments: list[Any]) -> Any:
        with self._errors():
            return self._scripts.run(script, script_keys, arguments)

    # ------------------------------------------------------------------ experiments

    def create_experiment(
        self, experiment: str, config: str, creation_id: str, shards: int, capacity_bytes: int
    ) -> str:
        keys.checked_experiment(experiment)
        with self._errors():
            self._client.set(keys.config(experiment), config, nx=True)
            standing = _text(self._client.get(keys.config(experiment)))
            self._client.sadd(keys.EXPERIMENTS, experiment)
        if creation_id not in standing:
            return standing  # another's: the caller completes it under the other's id
        for shard in range(shards):
            self._create_shard(experiment, shard, creation_id, capacity_bytes)
        return standing

    def _create_shard(
        self, experiment: str, shard: int, creation_id: str, capacity_bytes: int
    ) -> None:
        arguments = [creation_id, capacity_bytes, round(READER_TIMEOUT_S * 1000)]
        state = [keys.state(experiment, shard)]
        if _text(self._run("create_shard", state, arguments)) != creation_id:
            # Left from an experiment of the same name whose deletion was cut short.
            self._delete_matching(f"{keys.shard_tag(experiment, shard)}:*")
            self._run("create_shard", state, arguments)

    def read_config(self, experiment: str) -> str | None:
        return self._get_text(keys.config(keys.checked_experiment(experiment)))

    def experiments(self) -> list[str]:
        with self._errors():
            return sorted(_text(name) for name in self._client.smembers(keys.EXPERIMENTS))

    def delete_experiment(self, experiment: str) -> int:
        keys.checked_experiment(experiment)
        with self._errors():
            removed = int(self._client.unlink(keys.config(experiment)))
            states = list(self._client.scan_iter(f"{{{experiment}:*}}:state", count=1000))
            removed += self._unlink(states)
        removed += self._delete_matching(f"{{{experiment}:*}}:*")
        removed += self._delete_matching(f"{keys.experiment_tag(experiment)}:*")
        with self._errors():
            self._client.srem(keys.EXPERIMENTS, experiment)
        return removed

    def _delete_matching(self, pattern: str) -> int:
        with self._errors():
            return self._unlink(self._client.scan_iter(pattern, count=1000))

    def _unlink(self, names: Iterable[bytes]) -> int:
        removed, batch = 0, list[bytes]()
        for name in names:
            batch.append(name)
            if len(batch) == KEYS_A_DELETE:
                removed += int(self._client.unlink(*batch))
                batch = []
        return removed + (int(self._client.unlink(*batch)) if batch else 0)

    def write_learner(self, experiment: str, name: str, config: str, lease: Lease) -> None:
        names = [keys.lease(experiment, lease.role), keys.learner(experiment, name)]
        answer = self._run("write_learner", names, [lease.fence, lease.token, config])
        _check_lease(answer, lease)

    def read_learner(self, experiment: str, name: str) -> str | None:
        return self._get_text(keys.learner(experiment, keys.checked_member("learner", name)))

    def learners(self, experiment: str) -> list[str]:
        prefix = keys.learner(keys.checked_experiment(experiment), "")
        with self._errors():
            found = self._client.scan_iter(f"{prefix}*", count=1000)
            return sorted(_text(name).removeprefix(prefix) for name in found)

    def _get_text(self, name: str) -> str | None:
        with self._errors():
            value = self._client.get(name)
        return None if value is None else _text(value)

    # ------------------------------------------------------------------ writing

    def register_agent(self, experiment: str, agent: str) -> int:
        keys.checked_member("agent", agent)
        return int(self._run("register_agent", [keys.agents(experiment)], [agent]))

    def register_writer(self, experiment: str, shard: int, agent: str, creation_id: str) -> int:
        keys.checked_member("agent", agent)
        names = [keys.state(experiment, shard), keys.writer(experiment, shard, agent)]
        answer = self._run("register_writer", names, [creation_id])
        _check_known(answer, experiment)
        return int(answer[1])

    def write(self, experiment: str, shard: int, entry: EntryWrite) -> Answer:
        names = [
            keys.state(experiment, shard),
            keys.segments(experiment, shard),
            keys.writer(experiment, shard, entry.agent),
        ]
        arguments: list[Any] = [
            entry.creation_id,
            keys.frame_prefix(experiment, shard),
            entry.agent,
            entry.incarnation,
            entry.sequence,
            entry.nonce,
            entry.learner,
            entry.fence,
            entry.version,
            entry.segments,
            entry.steps,
            entry.episodes,
            "".join(entry.frame_keys),
            entry.data,
            "1" if entry.accept_gap else "",
        ]
        for key, payload in entry.payloads.items():
            arguments += (key, payload)
        try:
            return _to_answer(self._run("write", names, arguments))
        except OutOfMemoryError:
            with self._lock:
                self._refused_for_memory.add((experiment, shard))
            return Answer(AnswerKind.DROP)

    def drop(self, experiment: str, shard: int, creation_id: str, need_bytes: int = 0) -> int:
        with self._lock:
            refused = (experiment, shard) in self._refused_for_memory
            self._refused_for_memory.discard((experiment, shard))
        names = [keys.state(experiment, shard), keys.segments(experiment, shard)]
        free_bytes = max(2 * need_bytes, OOM_FREE_BYTES) if refused else 0
        arguments = [
            creation_id,
            keys.frame_prefix(experiment, shard),
            need_bytes,
            DROPS_A_CALL,
            free_bytes,
        ]
        answer = self._run("drop", names, arguments)
        _check_known(answer, experiment)
        return int(answer[1])

    def last_sequence(self, experiment: str, shard: int, agent: str) -> tuple[int, int]:
        with self._errors():
            found = self._client.hmget(
                keys.writer(experiment, shard, agent), "incarnation", "sequence"
            )
        return int(found[0] or 0), int(found[1] or 0)

    # ------------------------------------------------------------------ reading

    def read(
        self, experiment: str, cursors: Mapping[int, int], count: int, wait_s: float
    ) -> list[StoredEntry]:
        shards = {keys.segments(experiment, shard): shard for shard in cursors}
        streams = {name: f"{cursors[shard]}-0" for name, shard in shards.items()}
        limit = time.monotonic() + wait_s
        while True:
            left_s = limit - time.monotonic()
            block_ms = max(1, round(min(left_s, BLOCK_S) * 1000)) if left_s > 0 else None
            with self._errors():
                reply = self._client.xread(streams, count=count, block=block_ms)
            if reply or left_s <= BLOCK_S:
                return [
                    to_stored_entry(shards[_text(name)], entry_id, fields)
                    for name, entries in reply
                    for entry_id, fields in entries
                ]

    def position(self, experiment: str, shard: int) -> Position:
        with self._errors():
            dropped, entry, nonce, steps = self._client.hmget(
                keys.state(experiment, shard), "dropped_entries", "entry", "nonce", "steps"
            )
        return Position(
            int(dropped or 0) + 1,
            int(entry or 0),
            "" if nonce is None else _text(nonce),
            int(steps or 0),
        )

    def nonce(self, experiment: str, shard: int, entry: int) -> str | None:
        with self._errors():
            found = self._client.xrange(
                keys.segments(experiment, shard), f"{entry}-0", f"{entry}-0"
            )
        return _text(found[0][1].get(b"nonce", b"")) if found else None

    def fetch_frames(
        self, experiment: str, shard: int, frame_keys: Sequence[str]
    ) -> list[bytes | None]:
        prefix = keys.frame_prefix(experiment, shard)
        payloads: list[bytes | None] = []
        with self._errors():
            for at in range(0, len(frame_keys), FRAMES_A_REPLY):
                names = [prefix + key for key in frame_keys[at : at + FRAMES_A_REPLY]]
                payloads += self._client.mget(names)
        return payloads

    def delete_damaged_frame(self, experiment: str, shard: int, key: str, seen: bytes) -> bool:
        names = [keys.state(experiment, shard), keys.frame(experiment, shard, key)]
        return bool(
            self._run("delete_damaged", names, [seen, FRAME_ENTRY_DIGITS, FRAME_OVERHEAD_BYTES])
        )

    def quarantine(self, experiment: str, shard: int, entry: StoredEntry, reason: str) -> None:
        fields: dict[Any, Any] = {
            "entry": entry.entry,
            "nonce": entry.nonce,
            "agent": entry.agent,
            "incarnation": entry.incarnation,
            "sequence": entry.sequence,
            "reason": reason,
            "frames": "".join(entry.frame_keys),
            "data": entry.data,
        }
        with self._errors():
            self._client.xadd(
                keys.quarantine(experiment, shard),
                fields,
                maxlen=MOST_QUARANTINED,
                approximate=False,
            )

    # ------------------------------------------------------------------ readers of a shard

    def register_reader(self, experiment: str, shard: int, reader: ReaderSettings) -> int:
        keys.checked_member("reader", reader.name)
        arguments = [
            reader.name,
            str(reader.kind),
            reader.capacity_steps,
            reader.queue_steps,
            "1" if reader.from_start else "",
        ]
        answer = self._run("register_reader", [keys.state(experiment, shard)], arguments)
        _check_known(answer, experiment)
        return int(answer[1])

    def forget_reader(self, experiment: str, shard: int, name: str) -> None:
        self._run("forget_reader", [keys.state(experiment, shard)], [name])

    def acquire_reader(
        self, experiment: str, shard: int, name: str, holder: str, duration_s: float
    ) -> Lease | None:
        state = keys.state(experiment, shard)
        return self._acquire(state, _reader_prefix(name), name, holder, duration_s, 0)

    def renew_reader(
        self, experiment: str, shard: int, name: str, lease: Lease, duration_s: float
    ) -> None:
        self._lease("renew", keys.state(experiment, shard), _reader_prefix(name), lease, duration_s)

    def release_reader(self, experiment: str, shard: int, name: str, lease: Lease) -> None:
        with contextlib.suppress(LostRoleError, UnknownExperimentError):  # gone already
            self._lease("release", keys.state(experiment, shard), _reader_prefix(name), lease, 0)

    def confirm(
        self, experiment: str, shard: int, name: str, entry: int, nonce: str, lease: Lease
    ) -> bool:
        return self._confirm(experiment, shard, name, lease, str(entry), nonce, "")

    def allow_steps(
        self, experiment: str, shard: int, name: str, allowed_steps: int | None, lease: Lease
    ) -> None:
        allowed = "" if allowed_steps is None else str(allowed_steps)
        self._confirm(experiment, shard, name, lease, "", "", allowed)

    def _confirm(
        self, experiment: str, shard: int, name: str, lease: Lease, *arguments: str
    ) -> bool:
        names = [keys.state(experiment, shard), keys.segments(experiment, shard)]
        answer = self._run("confirm", names, [name, lease.fence, lease.token, *arguments])
        _check_lease(answer[0], lease)
        return bool(answer[0] == b"done")

    # ------------------------------------------------------------------ leases of an experiment

    def acquire(
        self, experiment: str, role: str, holder: str, duration_s: float, least_fence: int = 0
    ) -> Lease | None:
        keys.checked_member("role", role)
        name = keys.lease(experiment, role)
        return self._acquire(name, "", role, holder, duration_s, least_fence)

    def renew(self, experiment: str, lease: Lease, duration_s: float) -> None:
        self._lease("renew", keys.lease(experiment, lease.role), "", lease, duration_s)

    def release(self, experiment: str, lease: Lease) -> None:
        with contextlib.suppress(LostRoleError):  # gone already
            self._lease("release", keys.lease(experiment, lease.role), "", lease, 0)

    def _acquire(
        self,
        name: str,
        prefix: str,
        role: str,
        holder: str,
        duration_s: float,
        least_fence: int,
    ) -> Lease | None:
        # Made here, so that a call that comes twice finds its own token and takes the same lease.
        token = secrets.token_hex(8)
        arguments = ["acquire", prefix, token, holder, round(duration_s * 1000), least_fence]
        answer = self._run("lease", [name], arguments)
        _check_known(answer, name)
        return None if answer[0] == b"held" else Lease(role, int(answer[1]), token)

    def _lease(self, what: str, name: str, prefix: str, lease: Lease, duration_s: float) -> None:
        arguments = [what, prefix, lease.token, "", round(duration_s * 1000), lease.fence]
        answer = self._run("lease", [name], arguments)
        _check_known(answer, name)
        _check_lease(answer[0], lease)

    # ------------------------------------------------------------------ parameters

    def claim_parameters(
        self, experiment: str, learner: str, lease: Lease
    ) -> ParametersHead | None:
        name = keys.parameters(experiment, learner)
        answer = self._run("claim_parameters", [name], [lease.fence, lease.token])
        _check_lease(answer[0], lease)
        return _to_head(dict(zip(answer[1::2], answer[2::2], strict=True)))

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
        value_name = keys.parameters_value(experiment, learner, lease.fence, version)
        arguments = [
            lease.fence,
            lease.token,
            version,
            iteration,
            entry,
            len(value),
            content_hash(value),
            message,
            keep,
        ]
        names = [keys.parameters(experiment, learner), value_name]
        for _ in range(
            2
        ):  # a value may expire between the two calls of a publisher that was paused
            with self._errors():
                self._client.set(value_name, value, ex=UNPUBLISHED_EXPIRES_S)
            answer = self._run("publish", names, arguments)
            if answer != b"absent":
                break
        _check_lease(answer, lease)
        if answer != b"done":
            raise StorageError(
                f"parameters of learner {learner!r}: version {version} is {_text(answer)}: "
                "versions only grow under one fence"
            )

    def parameters_head(self, experiment: str, learner: str) -> ParametersHead | None:
        with self._errors():
            return _to_head(self._client.hgetall(keys.parameters(experiment, learner)))

    def parameters(self, experiment: str, learner: str, head: ParametersHead) -> bytes | None:
        with self._errors():
            value = self._client.get(
                keys.parameters_value(experiment, learner, head.fence, head.version)
            )
        return None if value is None else bytes(value)

    def subscribe(self, experiment: str, learner: str) -> Subscription:
        return ChannelSubscription(self._client, keys.parameters(experiment, learner), self._where)

    # ------------------------------------------------------------------ members, metrics

    def heartbeat(
        self, experiment: str, member_id: str, fields: Mapping[str, str], expire_s: float
    ) -> None:
        name = keys.member(experiment, member_id)
        with self._errors(), self._client.pipeline() as pipeline:
            pipeline.delete(name)
            pipeline.hset(name, mapping=dict(fields))
            pipeline.pexpire(name, round(expire_s * 1000))
            pipeline.sadd(keys.members(experiment), member_id)
            pipeline.execute()

    def members(self, experiment: str) -> dict[str, dict[str, str]]:
        with self._errors():
            ids = sorted(_text(name) for name in self._client.smembers(keys.members(experiment)))
            if not ids:
                return {}
            with self._client.pipeline(transaction=False) as pipeline:
                for member_id in ids:
                    pipeline.hgetall(keys.member(experiment, member_id))
                living = dict(zip(ids, pipeline.execute(), strict=True))
            if gone := [member_id for member_id, fields in living.items() if not fields]:
                self._client.srem(keys.members(experiment), *gone)
        return {member_id: _texts(fields) for member_id, fields in living.items() if fields}

    def leave(self, experiment: str, member_id: str) -> None:
        with self._errors(), self._client.pipeline() as pipeline:
            pipeline.delete(keys.member(experiment, member_id))
            pipeline.srem(keys.members(experiment), member_id)
            pipeline.execute()

    def append_metrics(self, experiment: str, record: bytes) -> None:
        self._append(keys.metrics(experiment), "record", record, MOST_METRICS)

    def read_metrics(self, experiment: str, after: str, count: int) -> list[tuple[str, bytes]]:
        with self._errors():
            found = self._client.xrange(keys.metrics(experiment), f"({after}", "+", count=count)
        return [(_text(cursor), fields.get(b"record", b"")) for cursor, fields in found]

    def append_log(self, experiment: str, line: bytes) -> None:
        self._append(keys.logs(experiment), "line", line, MOST_LOG_LINES)

    def _append(self, name: str, field: str, value: bytes, most: int) -> None:
        with self._errors():
            self._client.xadd(name, {field: value}, maxlen=most, approximate=False)

    # ------------------------------------------------------------------ insight

    def account(self, experiment: str, shard: int) -> dict[str, str]:
        with self._errors():
            return _texts(self._client.hgetall(keys.state(experiment, shard)))

    def audit(self, experiment: str) -> AuditReport:
        with self._errors():
            return audit(self._client, self._scripts, experiment)


def content_hash(value: bytes) -> str:
    """16 hex digits that tell one parameter set's bytes from another's."""
    return xxhash.xxh3_64_hexdigest(value)


def _reader_prefix(name: str) -> str:
    return f"reader:{keys.checked_member('reader', name)}:"


def _check_known(answer: Sequence[bytes], experiment: str) -> None:
    if answer[0] == b"unknown experiment":
        raise UnknownExperimentError(f"no experiment {experiment!r}, or another of its name")


def _check_lease(answer: bytes, lease: Lease) -> None:
    if answer == b"lost":
        raise LostRoleError(
            f"role {lease.role!r}: fence {lease.fence} is no longer the current one"
        )


def _to_answer(reply: Sequence[bytes]) -> Answer:
    kind = AnswerKind(_text(reply[0]))
    rest = [_text(part) for part in reply[1:]]
    match kind:
        case AnswerKind.WRITTEN | AnswerKind.ALREADY_WRITTEN:
            return Answer(kind, entry=int(rest[0]))
        case AnswerKind.EXPECTED:
            return Answer(kind, sequence=int(rest[0]))
        case AnswerKind.MISSING:
            return Answer(kind, missing=tuple(rest))
        case AnswerKind.WAIT:
            return Answer(kind, reader=rest[0], steps=int(rest[1]), allowed_steps=int(rest[2]))
        case AnswerKind.FULL:
            return Answer(kind, reader=rest[0])
    return Answer(kind)


def _to_head(fields: Mapping[bytes, bytes]) -> ParametersHead | None:
    if b"version" not in fields:
        return None  # claimed, and nothing published yet
    head = _texts(fields)
    fence, version = int(head["fence"]), int(head["version"])
    return ParametersHead(
        fence,
        version,
        int(head["entry"]),
        int(head["iteration"]),
        int(head["bytes"]),
        head["content_hash"],
        f"{fence}.{version}",
        head.get("message", ""),
    )


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _texts(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in fields.items()}
