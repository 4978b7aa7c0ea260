"""Recomputes an experiment's account from what lies in the store.

Guarantees: only reads, in pages, so that a living experiment is not held up; what looks wrong
because the store went on meanwhile is looked at again in one script before it is called a problem.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from storage import keys
from storage.codec import FRAME_ENTRY_DIGITS
from storage.protocol import AuditReport
from storage.scripts import Scripts
from storage.stream_entry import (
    FRAME_OVERHEAD_BYTES,
    entry_bytes,
    entry_number,
    split_frame_keys,
)

PAGE = 500
MOST_NAMED = 20
"""Problems of one kind that are written out; the rest are counted."""


@dataclass
class ShardAudit:
    """What one pass over a shard found."""

    shard: int
    problems: list[str] = field(default_factory=list)
    account: Counter[str] = field(default_factory=Counter)
    live: int = 0
    moving: bool = False
    frames: int = 0
    dangling: list[str] = field(default_factory=list)
    orphaned: list[str] = field(default_factory=list)


def audit(client: Any, scripts: Scripts, experiment: str) -> AuditReport:
    """Check every shard of `experiment`, a name that stands in the store or not."""
    pattern = f"{{{keys.checked_experiment(experiment)}:*}}:state"
    shards = sorted(
        int(name.decode().partition(":")[2].partition("}")[0])
        for name in client.scan_iter(pattern, count=1000)
    )
    problems = [] if shards else [f"experiment {experiment!r}: no shard has a state"]
    found = [_audit_shard(client, scripts, experiment, shard) for shard in shards]
    account = Counter[str]()
    for one in found:
        problems += one.problems
        account.update(one.account)
    return AuditReport(
        tuple(problems),
        written=account["entry"],
        dropped=account["dropped_entries"],
        live=sum(one.live for one in found),
        steps=account["steps"],
        moving=any(one.moving for one in found),
        frames=sum(one.frames for one in found),
        frames_written=account["frames_written"],
        frames_deduplicated=account["frames_deduplicated"],
        dangling=tuple(key for one in found for key in one.dangling),
        orphaned=tuple(key for one in found for key in one.orphaned),
        dropped_by_reason={
            name.partition(":")[2]: account[name] for name in ("dropped:retention", "dropped:bytes")
        },
    )


def _audit_shard(client: Any, scripts: Scripts, experiment: str, shard: int) -> ShardAudit:
    found = ShardAudit(shard)
    before = _state(client, experiment, shard)
    named, chain_problems, stream = _read_stream(client, experiment, shard)
    frames = _read_frames(client, experiment, shard)
    after = _state(client, experiment, shard)
    still = before == after
    _check_frames(scripts, experiment, found, named, frames)
    found.account.update({name: _integer(after, name) for name in COUNTERS})
    found.frames = len(frames)
    found.live = _integer(after, "length")
    found.moving = not still
    found.problems += [f"shard {shard}: {problem}" for problem in chain_problems]
    if still:  # else the sums belong to different moments
        found.problems += [f"shard {shard}: {line}" for line in _sums(after, stream, frames)]
    elif _integer(after, "entry") - _integer(after, "dropped_entries") != found.live:
        found.problems.append(
            f"shard {shard}: {_integer(after, 'entry')} entries written, "
            f"{_integer(after, 'dropped_entries')} dropped, but {found.live} are live"
        )
    for broken, meaning in (
        (found.dangling, "named by a live entry and not there"),
        (found.orphaned, "there and named by no live entry"),
    ):
        if broken:
            some = ", ".join(broken[:MOST_NAMED])
            found.problems.append(f"shard {shard}: frames {meaning}, {len(broken)}: {some}")
    return found


COUNTERS = (
    "entry",
    "segments",
    "steps",
    "episodes",
    "bytes",
    "frames_written",
    "frames_deduplicated",
    "dropped_entries",
    "dropped_segments",
    "dropped_steps",
    "dropped_frames",
    "dropped:retention",
    "dropped:bytes",
    "gaps",
)


def _state(client: Any, experiment: str, shard: int) -> dict[str, str]:
    """The account and, of the same moment, how many entries the stream holds."""
    moment = client.pipeline(transaction=True)
    moment.hmget(keys.state(experiment, shard), *COUNTERS, "nonce")
    moment.xlen(keys.segments(experiment, shard))
    values, length = moment.execute()
    state = {
        name: (value or b"").decode()
        for name, value in zip((*COUNTERS, "nonce"), values, strict=True)
    }
    return state | {"length": str(length)}


def _integer(state: dict[str, str], name: str) -> int:
    return int(state[name]) if state[name].lstrip("-").isdigit() else 0


def _read_stream(
    client: Any, experiment: str, shard: int
) -> tuple[dict[str, int], list[str], Counter[str]]:
    """Frame key to the last live entry that names it; breaks of the chain; sums."""
    named: dict[str, int] = {}
    problems: list[str] = []
    sums = Counter[str]()
    previous: tuple[int, bytes, int] | None = None
    cursor = "-"
    name = keys.segments(experiment, shard)
    while page := client.xrange(name, cursor, "+", count=PAGE):
        for entry_id, fields in page:
            entry = entry_number(entry_id)
            try:
                for key in split_frame_keys(fields.get(b"frames", b"")):
                    named[key] = entry
                steps, total = int(fields[b"steps"]), int(fields[b"total_steps"])
                segments = int(fields[b"segments"])
            except (KeyError, ValueError) as error:
                problems.append(f"entry {entry}: its fields do not read ({error})")
                previous = None
                continue
            if previous is not None:
                problems += _chain(previous, entry, fields, total - steps)
            else:
                sums["steps_before"] = total - steps
                sums["first_entry"] = entry
            previous = (entry, fields.get(b"nonce", b""), total)
            sums["entries"] += 1
            sums["steps"] += steps
            sums["segments"] += segments
            sums["bytes"] += entry_bytes(fields)
            sums["last_entry"], sums["total_steps"] = entry, total
        cursor = f"({page[-1][0].decode()}"
    return named, problems, sums


def _chain(
    previous: tuple[int, bytes, int], entry: int, fields: dict[bytes, bytes], steps_before: int
) -> list[str]:
    last, nonce, total = previous
    problems = []
    if entry != last + 1:
        problems.append(f"entry {entry} follows entry {last}")
    if fields.get(b"previous") != nonce:
        problems.append(f"entry {entry}: `previous` is not the nonce of entry {last}")
    if steps_before != total:
        problems.append(f"entry {entry}: {steps_before} steps before it, entry {last} says {total}")
    return problems


def _read_frames(client: Any, experiment: str, shard: int) -> dict[str, tuple[bytes, int]]:
    """Frame key to (header digits, payload bytes)."""
    prefix = keys.frame_prefix(experiment, shard)
    found: dict[str, tuple[bytes, int]] = {}
    names: list[bytes] = []

    def look() -> None:
        with client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.getrange(name, 0, FRAME_ENTRY_DIGITS - 1)
                pipeline.strlen(name)
            replies = pipeline.execute()
        for name, digits, length in zip(names, replies[::2], replies[1::2], strict=True):
            if length:
                found[name.decode()[len(prefix) :]] = (digits, length)
        names.clear()

    for name in client.scan_iter(f"{prefix}*", count=1000):
        names.append(name)
        if len(names) == PAGE:
            look()
    look()
    return found


def _check_frames(
    scripts: Scripts,
    experiment: str,
    found: ShardAudit,
    named: dict[str, int],
    frames: dict[str, tuple[bytes, int]],
) -> None:
    """Sort suspects into dangling and orphaned, each seen again at one moment."""
    segments = keys.segments(experiment, found.shard)

    def again(key: str, entry: int) -> list[Any]:
        frame = keys.frame(experiment, found.shard, key)
        arguments = [key, entry, FRAME_ENTRY_DIGITS]
        reply: list[Any] = scripts.run("recheck_frame", [segments, frame], arguments)
        return reply

    for key, entry in named.items():
        if key in frames and frames[key][0].isdigit() and int(frames[key][0]) >= entry:
            continue
        digits, _, still_named = again(key, entry)
        if still_named == b"1" and not digits:
            found.dangling.append(key)
        elif still_named == b"1" and not (digits.isdigit() and int(digits) >= entry):
            found.problems.append(
                f"shard {found.shard}: frame {key}: its header says {digits!r}, entry {entry} "
                "names it"
            )
    for key in frames.keys() - named.keys():
        digits, header_names_it, _ = again(key, 0)
        if digits and header_names_it == b"0":
            found.orphaned.append(key)


def _sums(
    state: dict[str, str], stream: Counter[str], frames: dict[str, tuple[bytes, int]]
) -> list[str]:
    """What the account says against what lies there; "NAME: the account says A, there are B"."""
    frame_bytes = sum(length + FRAME_OVERHEAD_BYTES for _, length in frames.values())
    live = {
        "live entries": (
            _integer(state, "entry") - _integer(state, "dropped_entries"),
            stream["entries"],
        ),
        "live segments": (
            _integer(state, "segments") - _integer(state, "dropped_segments"),
            stream["segments"],
        ),
        "live steps": (
            _integer(state, "steps") - _integer(state, "dropped_steps"),
            stream["steps"],
        ),
        "live frames": (
            _integer(state, "frames_written") - _integer(state, "dropped_frames"),
            len(frames),
        ),
        "bytes": (_integer(state, "bytes"), stream["bytes"] + frame_bytes),
        "dropped entries": (
            _integer(state, "dropped_entries"),
            _integer(state, "dropped:retention") + _integer(state, "dropped:bytes"),
        ),
    }
    if stream["entries"]:
        live["last entry"] = (_integer(state, "entry"), stream["last_entry"])
        live["total steps"] = (_integer(state, "steps"), stream["total_steps"])
        live["dropped steps"] = (_integer(state, "dropped_steps"), stream["steps_before"])
    return [
        f"{name}: the account says {said}, there are {there}"
        for name, (said, there) in live.items()
        if said != there
    ]
