"""How this program reaches a server: time limits of its own, and what an error there means.

Guarantees: every call ends within a stated time; no message holds a password; an error of the
server's is told apart as one to wait for, one to mend, or one of this program.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

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

_URL_OPTION = re.compile(r"db|username|password|client_name")
_TLS_OPTION = re.compile(r"ssl_\w+")
_SECRET_OPTION = re.compile(r"(?<=[?&])(password|ssl_password)=[^&]*")


class OutOfMemoryError(UnavailableError):
    """The server is at its `maxmemory` and refuses to write until something is dropped."""


def connect(url: str) -> redis.Redis:
    """A client of `url`; nothing is sent yet. Raises UnsuitableServerError for what is no URL, and
    for options that would change what this program reads or how long it waits."""
    options: dict[str, Any] = {"socket_keepalive": True} if not url.startswith("unix:") else {}
    try:
        _refuse_options(url)
        client = redis.Redis.from_url(
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
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # says now which TLS options do not exist
    except (ValueError, TypeError, redis.RedisError) as error:
        raise UnsuitableServerError(
            f"server URL {shown_url(url)!r}: {_first_line(error)}"
        ) from None
    return client


def _refuse_options(url: str) -> None:
    """Raise ValueError for a URL option that is not the server's address, name or certificate.

    The client takes any of its own settings from a URL, and lets them win over the caller's.
    """
    parts = urlsplit(url)
    behind = "" if parts.scheme == "unix" else parts.path + parts.query + parts.fragment
    if "@" in behind or _has_no_port(parts):  # nothing of it may be quoted: it may be a password
        raise ValueError(
            "its port is not a number of at most 65535; in a password, '/', '#', '?' and '@' are "
            "written %2F, %23, %3F and %40"
        )
    for name in parse_qs(parts.query, keep_blank_values=True):
        if name == "decode_responses":
            raise ValueError(
                "option 'decode_responses' makes text of what is binary here, such as frames; "
                "remove it"
            )
        if not (
            _URL_OPTION.fullmatch(name)
            or (parts.scheme == "rediss" and _TLS_OPTION.fullmatch(name))
        ):
            raise ValueError(
                f"option {name!r} is not settable here; there are: client_name, db, password, "
                "username, and ssl_… for rediss://"
            )
    database = unquote(parts.path).strip("/")
    if parts.scheme != "unix" and database and not database.isdecimal():
        raise ValueError(
            f"database {database!r} should be a number, such as in redis://HOST:6379/0"
        )


def _has_no_port(parts: SplitResult) -> bool:
    """Whether something that is no port stands where one should be."""
    try:
        _ = parts.port
    except ValueError:
        return True
    return False


def shown_url(url: str) -> str:
    """The URL for people: without password, however badly it is written."""
    scheme, separator, rest = _SECRET_OPTION.sub(r"\1=***", url).partition("://")
    credentials, at, place = rest.rpartition("@")
    if not at or rest.startswith("/"):
        return scheme + separator + rest
    return f"{scheme}{separator}{credentials.partition(':')[0]}:***@{place}"


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
