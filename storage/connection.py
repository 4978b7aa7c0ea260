"""How this program reaches a server: time limits of its own, and what an error there means.

Guarantees: every call ends within a stated time; no message holds a password; an error of the
server's is told apart as one to wait for, one to mend, or one of this program.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from storage.errors import StorageError, UnavailableError, UnsuitableServerError

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
"""A script over thousands of frames takes milliseconds; a server with a slow disk, seconds."""
IDLE_CHECK_S = 15.0
"""A connection idle for this long is tested before use: its peer may be gone silently."""

# What passes by itself: the server starts, cannot save, is a replica for a moment, runs a script.
_PASSING = ("LOADING", "MISCONF", "READONLY", "MASTERDOWN", "BUSY ", "NOREPLICAS", "TRYAGAIN")
_REFUSED = ("NOAUTH", "WRONGPASS", "NOPERM", "DENIED")


class OutOfMemoryError(UnavailableError):
    """The server is at its `maxmemory` and refuses to write until something is dropped."""


def connect(url: str) -> redis.Redis:
    """A client of `url`; nothing is sent yet. Raises UnsuitableServerError for what is no URL."""
    options: dict[str, Any] = {"socket_keepalive": True} if not url.startswith("unix:") else {}
    try:
        return redis.Redis.from_url(
            url,
            protocol=2,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=ANSWER_TIMEOUT_S,
            health_check_interval=IDLE_CHECK_S,
            # One repetition, at once: a restarted server leaves a dead connection in the pool.
            # What was sent may have been carried out, so every command here may come twice.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            **options,
        )
    except ValueError as error:
        raise UnsuitableServerError(f"server URL {shown_url(url)!r}: {error}") from None


def shown_url(url: str) -> str:
    """The URL for people: without password."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    user, _, host = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{name}:***@{host}"))


@contextlib.contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """Turn the client's errors into this package's; `where` is the shown URL."""
    try:
        yield
    except redis.exceptions.AuthenticationError as error:
        raise UnsuitableServerError(f"{where}: {_first_line(error)}; give it in the URL") from error
    except (redis.ConnectionError, redis.TimeoutError, ConnectionError) as error:
        raise UnavailableError(f"{where}: {_first_line(error)}") from error
    except redis.ResponseError as error:
        text = str(error)
        if "OOM " in text or isinstance(error, redis.exceptions.OutOfMemoryError):
            raise OutOfMemoryError(f"{where}: out of memory: raise maxmemory") from error
        if any(word in text for word in _REFUSED):
            raise UnsuitableServerError(f"{where}: {_first_line(error)}") from error
        if any(word in text for word in _PASSING) or isinstance(
            error, redis.exceptions.ReadOnlyError
        ):
            raise UnavailableError(f"{where}: {_first_line(error)}") from error
        raise StorageError(f"{where}: {_first_line(error)}") from error
    except redis.RedisError as error:
        raise StorageError(f"{where}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    return text[:300] or type(error).__name__
