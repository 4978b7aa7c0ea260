"""Brings an agent's entries into its shard, in order and each once, whatever the server does.

Guarantees: an entry is held until the server has answered for it and some seconds longer, so that
what a killed server lost is sent again; memory is bounded by `agent.buffer_bytes` and one entry; a
server that is gone or full is waited for and that is said once.
"""

import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

import structlog
import tenacity

from pipeline.acting.segmenter import CutEntry
from pipeline.configuration import AgentConfig
from pipeline.experiment import Experiment
from storage.codec import encode_entry
from storage.errors import UnavailableError
from storage.protocol import Answer, AnswerKind, EntryWrite, Storage

logger = structlog.get_logger()

KNOWN_FRAMES = 100_000
"""Frame keys remembered as being in the shard; forgetting one costs sending its payload again."""
SHORTEST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
"""Between two tries of a write that was answered `wait`, `full` or not at all."""
LOOK_S = 0.2
"""A thread that waits looks this often whether it should stop."""

SUPERSEDED = "superseded"
UNKNOWN_EXPERIMENT = "unknown experiment"


@dataclass
class Held:
    """One entry on its way, or answered not long ago."""

    write: EntryWrite
    payloads: dict[str, bytes]
    size_bytes: int
    answered_at: float | None = None
    """Monotonic time of the answer."""
    wanted: set[str] = field(default_factory=set)
    """Frame keys that the server asked for."""
    everything: bool = False
    """The server asked twice: send all payloads."""


class Sender:
    """One incarnation's writer: `send` is the agent's side, a thread does the rest."""

    def __init__(
        self,
        storage: Storage,
        experiment: Experiment,
        shard: int,
        agent_id: str,
        incarnation: int,
        config: AgentConfig,
    ) -> None:
        self._storage = storage
        self._experiment = experiment
        self._shard = shard
        self._agent = agent_id
        self._incarnation = incarnation
        self._config = config
        self._changed = threading.Condition()
        self._held: deque[Held] = deque()
        """In order of sequence, without holes: answered ones, then those to send."""
        self._last_sequence = 0
        self._next_sequence = 1
        """The first that the server has not answered for."""
        self._held_bytes = 0
        self._known: OrderedDict[str, None] = OrderedDict()
        self._accept_gap = False
        self._waiting = ""
        self._counts: Counter[str] = Counter()
        self._last_answer_at = time.monotonic()
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self.written_entry = 0
        """Number of the last entry that this writer's shard gave it."""
        self.ended = ""
        """Why nothing can be written any more: "superseded", "unknown experiment", or ""."""
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the agent's side

    @property
    def full(self) -> bool:
        """At the bound of its memory: unanswered entries alone fill `agent.buffer_bytes`."""
        with self._changed:
            return self._unanswered_bytes() >= self._config.buffer_bytes

    def send(self, cut: CutEntry, *, learner: str, fence: int, version: int) -> bool:
        """Take an entry over; never blocks. False where it was dropped: the sender is full and
        `agent.when_full` is "drop", or it has ended. Raises what its thread met, and
        InvalidEntryError."""
        self.raise_error()
        entry = cut.entry
        data = encode_entry(entry)
        size_bytes = len(data) + sum(len(payload) + 64 for payload in cut.payloads.values())
        with self._changed:
            drops = self._config.when_full == "drop"
            if self.ended or (drops and self._unanswered_bytes() >= self._config.buffer_bytes):
                self._counts["entries_dropped"] += 1
                self._counts["steps_dropped"] += entry.steps
                return False
            self._last_sequence += 1
            write = EntryWrite(
                creation_id=self._experiment.creation_id,
                agent=self._agent,
                incarnation=self._incarnation,
                sequence=self._last_sequence,
                nonce=secrets.token_urlsafe(12),
                learner=learner,
                fence=fence,
                version=version,
                segments=len(entry.segments),
                steps=entry.steps,
                episodes=entry.episodes_ended,
                frame_keys=entry.frame_keys,
                data=data,
                payloads={},
            )
            self._held.append(Held(write, cut.payloads, size_bytes))
            self._held_bytes += size_bytes
            self._forget_answered()
            self._changed.notify_all()
        return True

    def wait_written(self, timeout_s: float) -> int | None:
        """Number of the last entry once the server has answered for all; None after `timeout_s`."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._next_sequence > self._last_sequence or self.ended or self._error,
                timeout_s,
            )
        self.raise_error()
        return self.written_entry if done and not self.ended else None

    def flush(self, timeout_s: float) -> bool:
        """Before leaving: wait until all is answered and a killed server would have synced it, and
        ask; send again what was lost. False where `timeout_s` was too short for that."""
        limit = time.monotonic() + timeout_s
        while (left := limit - time.monotonic()) > 0 and not self.ended:
            if self.wait_written(min(left, LOOK_S)) is None:
                continue
            with self._changed:
                quiet_s = time.monotonic() - self._last_answer_at
                if self._last_sequence == 0:
                    return True
            if quiet_s < self._config.keep_answered_s:
                time.sleep(min(LOOK_S, self._config.keep_answered_s - quiet_s, max(left, 0)))
            elif self._all_there():
                return True
        return False

    def _all_there(self) -> bool:
        """Ask the server; where it lost something, begin again from there."""
        try:
            incarnation, sequence = self._storage.last_sequence(
                self._experiment.name, self._shard, self._agent
            )
        except UnavailableError:
            return False
        if incarnation > self._incarnation:
            return True  # a newer one of this agent answers for itself
        there = sequence if incarnation == self._incarnation else 0
        with self._changed:
            if there >= self._last_sequence:
                return True
            self._send_again_from(there + 1)
            self._changed.notify_all()
            return self._next_sequence > self._last_sequence  # nothing left that could be sent

    def close(self) -> None:
        """Stop at once; what is not answered yet is lost."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(15.0)

    def raise_error(self) -> None:
        """Raise what ended the thread, if something did."""
        if self._error is not None:
            raise self._error

    def status(self) -> dict[str, str]:
        """ "waiting": for whom, with numbers; "" while entries flow."""
        return {"waiting": self._waiting}

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        with self._changed:
            return {
                **{name: float(self._counts[name]) for name in COUNTED},
                "buffer_bytes": float(self._held_bytes),
            }

    # ------------------------------------------------------------------ the thread's side

    def _run(self) -> None:
        try:
            while (held := self._next()) is not None:
                self._take(held, self._write(held))
        except BaseException as error:
            if not self._stopping.is_set():
                self._error = error
        with self._changed:
            self._changed.notify_all()

    def _next(self) -> Held | None:
        """The next entry to send; None when there will be none."""
        with self._changed:
            while not self._stopping.is_set() and not self.ended:
                self._forget_answered()
                if self._next_sequence <= self._last_sequence:
                    first = self._held[0].write.sequence
                    return self._held[self._next_sequence - first]
                self._changed.wait(LOOK_S)
        return None

    def _write(self, held: Held) -> Answer:
        """One write, repeated while the server cannot be reached."""
        payloads = {
            key: payload
            for key, payload in held.payloads.items()
            if held.everything or key in held.wanted or key not in self._known
        }
        write = EntryWrite(
            **{**held.write.__dict__, "payloads": payloads, "accept_gap": self._accept_gap}
        )
        repeat = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(UnavailableError),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=LONGEST_PAUSE_S),
            stop=tenacity.stop_when_event_set(self._stopping),
            sleep=self._pause,
            before_sleep=self._say_unreachable,
            reraise=True,
        )
        answer: Answer = repeat(self._storage.write, self._experiment.name, self._shard, write)
        self._counts["frames_sent"] += len(payloads)
        self._counts["bytes_sent"] += len(write.data) + sum(map(len, payloads.values()))
        return answer

    def _pause(self, duration_s: float) -> None:
        self._stopping.wait(duration_s)

    def _say_unreachable(self, state: tenacity.RetryCallState) -> None:
        with self._changed:
            held = self._last_sequence - self._next_sequence + 1
        self._wait_for(f"server unreachable: {held} entries held")

    def _take(self, held: Held, answer: Answer) -> None:
        with self._changed:
            match answer.kind:
                case AnswerKind.WRITTEN | AnswerKind.ALREADY_WRITTEN:
                    self._answered(held, answer)
                    self._changed.notify_all()
                    return
                case AnswerKind.MISSING:
                    held.everything = bool(held.wanted)
                    held.wanted |= set(answer.missing)
                    for key in answer.missing:
                        self._known.pop(key, None)
                    return
                case AnswerKind.EXPECTED:
                    self._send_again_from(answer.sequence)
                    return
                case AnswerKind.SUPERSEDED:
                    self._end(SUPERSEDED)
                    return
                case AnswerKind.UNKNOWN_EXPERIMENT:
                    self._end(UNKNOWN_EXPERIMENT)
                    return
        self._make_room(held, answer)

    def _answered(self, held: Held, answer: Answer) -> None:
        self._accept_gap = False
        self._next_sequence = held.write.sequence + 1
        self._last_answer_at = held.answered_at = time.monotonic()
        self.written_entry = answer.entry
        held.wanted, held.everything = set(), False
        for key in held.write.frame_keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > KNOWN_FRAMES:
            self._known.popitem(last=False)
        if answer.kind is AnswerKind.WRITTEN:
            self._counts["entries_written"] += 1
            self._counts["segments_written"] += held.write.segments
            self._counts["steps_written"] += held.write.steps
        if self._waiting:
            logger.info("no longer waiting", was=self._waiting)
            self._waiting = ""

    def _send_again_from(self, sequence: int) -> None:
        """The server has forgotten entries, or never had them."""
        first = self._held[0].write.sequence if self._held else self._last_sequence + 1
        if sequence < first:
            # What it asks for is gone: say so, and it counts the gap.
            logger.warning("entries lost by the server", entries=first - sequence)
            self._counts["entries_lost"] += first - sequence
            sequence, self._accept_gap = first, True
        elif sequence < self._next_sequence:
            logger.warning("the server lost entries: sending again", from_sequence=sequence)
        self._next_sequence = sequence
        self._known.clear()
        for held in self._held:
            if held.write.sequence >= sequence:
                held.answered_at = None

    def _end(self, why: str) -> None:
        """Nothing more will be written: let go of what is held."""
        self.ended = why
        unanswered = [held for held in self._held if held.answered_at is None]
        self._counts["entries_dropped"] += len(unanswered)
        self._counts["steps_dropped"] += sum(held.write.steps for held in unanswered)
        self._held.clear()
        self._held_bytes = 0
        logger.warning("writing has ended", reason=why, entries_dropped=len(unanswered))
        self._changed.notify_all()

    def _make_room(self, held: Held, answer: Answer) -> None:
        """`wait`, `full` and `drop`: let go what may go, or wait a moment."""
        if answer.kind is AnswerKind.DROP:
            try:
                dropped = self._storage.drop(
                    self._experiment.name,
                    self._shard,
                    self._experiment.creation_id,
                    held.size_bytes,
                )
            except UnavailableError:
                dropped = 0
            if dropped:
                return
            self._wait_for("room on the server: it is out of memory and nothing may be dropped")
        elif answer.kind is AnswerKind.WAIT:
            self._wait_for(
                f"reader {answer.reader}: {answer.steps} of {answer.allowed_steps} allowed steps "
                "are written"
            )
        else:
            self._wait_for(
                f"reader {answer.reader}: the shard is at its byte limit and it has not confirmed"
            )
        self._stopping.wait(SHORTEST_PAUSE_S)

    def _wait_for(self, whom: str) -> None:
        if not self._waiting:
            logger.info("waiting", waits_for=whom)
        self._waiting = whom

    def _unanswered_bytes(self) -> int:
        answered = sum(held.size_bytes for held in self._held if held.answered_at is not None)
        return self._held_bytes - answered

    def _forget_answered(self) -> None:
        """Let go of answered entries that are old enough, or whose memory is needed."""
        now = time.monotonic()
        while self._held and (answered_at := self._held[0].answered_at) is not None:
            old = now - answered_at > self._config.keep_answered_s
            if not old and self._held_bytes <= self._config.buffer_bytes:
                return
            self._held_bytes -= self._held.popleft().size_bytes


COUNTED = (
    "entries_written",
    "segments_written",
    "steps_written",
    "frames_sent",
    "bytes_sent",
    "entries_dropped",
    "steps_dropped",
    "entries_lost",
)
