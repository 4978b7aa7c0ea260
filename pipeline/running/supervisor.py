"""Starts the processes of a run on this machine, starts again what died, and stops them in order.

Guarantees: a child that cannot live ends the run with its own last words, after a bounded number of
restarts; `stop` returns with every child gone; what children print stays below a bound on disk.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

logger = structlog.get_logger()

USAGE_ERROR = 2
"""Exit code of a child for what no restart mends: a wrong option, a server that is refused."""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0
STOP_LIMIT_S = 10.0
"""Between SIGTERM and SIGKILL: an agent that leaves waits two seconds for its server's disk."""
LOG_BYTES = 2 << 20
"""A child's log is moved to NAME.log.1 beyond this."""
LAST_LINES = 15


class RunFailedError(Exception):
    """The run cannot go on; the message says which process failed and with which words."""


@dataclass(frozen=True)
class Spec:
    """A process to keep alive."""

    name: str
    command: tuple[str, ...]
    stop_order: int
    """Processes of the lowest number are stopped first, all of one number together."""
    may_leave: bool = False
    """Exit code 0 means that it left on purpose: it is not started again, see `Supervisor.left`."""


@dataclass
class _Child:
    spec: Spec
    log: Path
    process: subprocess.Popen | None = None
    restarts: int = 0
    start_at: float = field(default=0.0)
    """Monotonic time of the next start, while there is no process."""
    left: bool = False


class Supervisor:
    """Owns the children. Call it from one thread, the main one: where Linux is asked to end a child
    with its parent, it does so when the thread that started the child ends."""

    def __init__(
        self, log_folder: Path, restarts: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log_folder = log_folder
        self._restarts_allowed = restarts
        self._environment = {
            **os.environ,
            **(environment or {}),
            "REDREEL_PARENT_PID": str(os.getpid()),
        }
        self._children: list[_Child] = []
        log_folder.mkdir(parents=True, exist_ok=True)

    @property
    def restarts(self) -> int:
        """Restarts so far, of all children together."""
        return sum(child.restarts for child in self._children)

    @property
    def left(self) -> set[str]:
        """Processes that left on purpose."""
        return {child.spec.name for child in self._children if child.left}

    def last_words(self, name: str) -> str:
        """How a process's log ends, as the end of an error message."""
        return "".join(_said(child) for child in self._children if child.spec.name == name)

    def start(self, spec: Spec) -> None:
        child = _Child(spec, self._log_folder / f"{spec.name}.log")
        self._children.append(child)
        self._launch(child)

    def pids(self) -> dict[str, int]:
        """Living children."""
        return {
            child.spec.name: child.process.pid
            for child in self._children
            if child.process is not None and child.process.poll() is None
        }

    def poll(self) -> None:
        """See who died, start again who is due. Raises RunFailedError."""
        for child in self._children:
            if child.left:
                continue
            if child.process is None:
                if time.monotonic() >= child.start_at:
                    self._launch(child)
            elif (code := child.process.poll()) is not None:
                self._ended(child, code)
            else:
                _keep_small(child.log)

    def stop(
        self, limit_s: float = STOP_LIMIT_S, hurry: Callable[[], bool] = lambda: False
    ) -> None:
        """Stop all, in order: SIGTERM, and SIGKILL after `limit_s` or as soon as `hurry()`."""
        for order in sorted({child.spec.stop_order for child in self._children}):
            processes = [
                child.process
                for child in self._children
                if child.spec.stop_order == order and child.process is not None
            ]
            _stop_together(processes, limit_s, hurry)
        for child in self._children:
            child.process = None
            child.left = True

    def _launch(self, child: _Child) -> None:
        # Appending, so that the file may be emptied under a child that goes on writing.
        with child.log.open("ab") as log:
            child.process = subprocess.Popen(
                child.spec.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # Ctrl-C in the terminal is for the supervisor alone
            )

    def _ended(self, child: _Child, code: int) -> None:
        child.process = None
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == 0 and child.spec.may_leave:
            child.left = True
            logger.info("process left the run", process=child.spec.name)
            return
        if code == USAGE_ERROR:
            raise RunFailedError(f"{child.spec.name} cannot run ({how}){_said(child)}")
        if child.restarts >= self._restarts_allowed:
            raise RunFailedError(
                f"{child.spec.name} ended ({how}) after {child.restarts} restarts, "
                f"run.restarts allows no more{_said(child)}"
            )
        pause_s = min(FIRST_BACKOFF_S * 2**child.restarts, LONGEST_BACKOFF_S)
        child.restarts += 1
        child.start_at = time.monotonic() + pause_s
        logger.warning(
            "process ended: starting it again",
            process=child.spec.name,
            how=how,
            restart=f"{child.restarts} of {self._restarts_allowed}",
            in_s=pause_s,
        )


def _stop_together(
    processes: list[subprocess.Popen], limit_s: float, hurry: Callable[[], bool]
) -> None:
    for process in processes:
        process.terminate()  # does nothing once the process has been waited for
    limit = time.monotonic() + limit_s
    while any(process.poll() is None for process in processes):
        if hurry() or time.monotonic() > limit:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return
        time.sleep(0.02)


def _keep_small(log: Path) -> None:
    if log.stat().st_size > LOG_BYTES:
        shutil.copyfile(log, f"{log}.1")
        os.truncate(log, 0)


def _said(child: _Child) -> str:
    """The end of a child's log, to end an error message with."""
    with child.log.open("rb") as log:
        log.seek(max(0, child.log.stat().st_size - 20_000))
        lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        return f"; it said nothing in {child.log}"
    said = "\n  ".join(lines[-LAST_LINES:])
    return f"; its last words in {child.log}:\n  {said}"
