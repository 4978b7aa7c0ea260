"""Console messages of every process: one line each, on stderr, and the same to Redis.

Guarantees: lines that the server cannot take in time are forgotten, oldest first; logging never
waits for the network.
"""

import contextlib
import sys
from collections import deque
from collections.abc import MutableMapping
from typing import Any, TextIO, cast

import structlog

KEPT_LINES = 1_000
"""Lines that wait for the next heartbeat to carry them to Redis, at most."""


class PendingLines:
    """A structlog processor that keeps a plain copy of each line for `storage.append_log`."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)

    def __call__(
        self, logger: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        fields = " ".join(
            f"{key}={value}"
            for key, value in event.items()
            if key not in ("event", "timestamp", "level", "exc_info")
        )
        line = f"{event.get('timestamp')} {self._process} {method} {event.get('event')} {fields}"
        self._lines.append(line.strip().encode()[:4_000])
        return event

    def take(self) -> list[bytes]:
        taken = []
        while self._lines:
            taken.append(self._lines.popleft())
        return taken


class Console:
    """stderr, whatever it is at the moment (a live display replaces it). A full disk loses lines of
    a log, not the process that wrote them."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure(process: str) -> PendingLines:
    """Send this process's messages to stderr; `process` names it in the lines that go to Redis."""
    pending = PendingLines(process)
    structlog.configure(
        processors=[
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            pending,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                pad_event_to=0,
                pad_level=False,
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(20),  # info and worse
        logger_factory=structlog.PrintLoggerFactory(file=cast(TextIO, Console())),
    )
    return pending
