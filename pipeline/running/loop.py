"""Runs a role until it is told to stop: step after step, with a heartbeat beside it.

Guarantees: a signal only sets a flag, so a step is never cut in two; an unreachable server is
waited for, and that is said once; a process whose parent is gone ends within a few seconds,
whatever it is doing.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import structlog

from pipeline.metrics import MetricsSink
from pipeline.running.logging_setup import PendingLines
from storage.errors import LostRoleError, StorageError, UnavailableError
from storage.protocol import Storage

logger = structlog.get_logger()

HEARTBEAT_S = 1.0
HEARTBEAT_EXPIRES_S = 10.0
"""A member that was killed is forgotten after this; many times a heartbeat, so that a busy machine
does not make living members disappear."""
IDLE_S = 0.005
"""Pause after a step that found nothing to do."""
RETRY_S = 0.25
"""Pause before a step is tried again on an unreachable server."""
ORPHAN_S = 5.0
"""Time that a process whose parent is gone has for its clean stop."""
PR_SET_PDEATHSIG = 1


class Role(Protocol):
    """What the loop needs of an agent, a replay, a learner, an evaluator."""

    def step(self) -> bool: ...

    def status(self) -> dict[str, str]: ...

    def metrics(self) -> dict[str, float]: ...

    def drain(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Member:
    """This process, as the experiment's members see it."""

    experiment: str
    member_id: str
    role: str


class Stop:
    """The flag that SIGTERM and SIGINT set. A second signal ends the process at once."""

    def __init__(self) -> None:
        self.signal_number = 0
        """The signal that asked to stop; 0 while none has."""

    def __bool__(self) -> bool:
        return self.signal_number != 0

    def install(self) -> "Stop":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self:
            os._exit(128 + number)
        self.signal_number = number

    def sleep(self, duration_s: float) -> None:
        """Sleep, but not much longer than until a signal. (Event.wait may deadlock when its own
        thread's signal handler sets it.)"""
        limit = time.monotonic() + duration_s
        while not self and (left := limit - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))


def run(role: Role, member: Member, storage: Storage, stop: Stop, lines: PendingLines) -> bool:
    """Step `role` until it is finished, has lost its place to another, or `stop` says so.

    Returns whether its place was lost.
    """
    heartbeat = Heartbeat(role, member, storage, lines)
    heartbeat.start()
    try:
        waiting_since = 0.0
        while not stop and not getattr(role, "finished", False):
            try:
                worked = role.step()
            except UnavailableError as error:
                if not waiting_since:
                    waiting_since = time.monotonic()
                    logger.warning("server unreachable: waiting for it", error=str(error))
                stop.sleep(RETRY_S)
                continue
            if waiting_since:
                waited_s = round(time.monotonic() - waiting_since, 1)
                logger.info("server reached again", waited_s=waited_s)
                waiting_since = 0.0
            if not worked:
                stop.sleep(IDLE_S)
        role.drain()
        return False
    except LostRoleError as error:
        logger.warning("another process took over: leaving", error=str(error))
        return True
    finally:
        heartbeat.stop()
        role.close()


class Heartbeat:
    """Tells the experiment every second that this member lives, what it does and what it measured.

    It has a thread of its own, so that a long step does not look like a death.
    """

    def __init__(self, role: Role, member: Member, storage: Storage, lines: PendingLines) -> None:
        self._role = role
        self._member = member
        self._storage = storage
        self._lines = lines
        self._sink = MetricsSink(storage, member.experiment, member.member_id, member.role)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send what was measured last, and leave."""
        self._stopped.set()
        self._thread.join(HEARTBEAT_EXPIRES_S)

    def _run(self) -> None:
        self._beat()  # at once: others find this member by it
        while not self._stopped.wait(HEARTBEAT_S):
            self._beat()
        self._beat()
        with contextlib.suppress(StorageError):  # else the heartbeat expires by itself
            self._storage.leave(self._member.experiment, self._member.member_id)

    def _beat(self) -> None:
        try:
            fields = member_fields(self._member) | self._role.status()
            self._storage.heartbeat(
                self._member.experiment, self._member.member_id, fields, HEARTBEAT_EXPIRES_S
            )
            self._sink.write(self._role.metrics())
            for line in self._lines.take():
                self._storage.append_log(self._member.experiment, line)
        except StorageError:
            pass  # the loop has said so; the next heartbeat says the rest
        except Exception:
            # A role's numbers must not end its heartbeat, or it would be taken for dead.
            logger.exception("heartbeat failed")


def member_fields(member: Member) -> dict[str, str]:
    return {"role": member.role, "hostname": socket.gethostname(), "pid": str(os.getpid())}


def end_with_parent(parent: int) -> None:
    """Make this process end soon after process `parent`, its parent, however that ends.

    Linux sends SIGTERM at that moment; a thread looks as well, for other systems and for a process
    that cannot stop cleanly any more (its server died too).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    threading.Thread(target=_watch_parent, args=(parent,), name="watch-parent", daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_S)
    os._exit(1)
