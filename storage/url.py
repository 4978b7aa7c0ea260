"""A storage by its URL: the one thing that a process is told about where data lies.

Guarantees: an unknown scheme is refused in one line that names those there are. Other packages add
schemes by the entry-point group `redreel.storage`: a function from URL to `Storage`.
"""

from importlib.metadata import entry_points
from pathlib import Path

from storage.connection import connect, shown_url
from storage.errors import UnsuitableServerError
from storage.protocol import Storage
from storage.redis_store import RedisStore

SERVERS = ("redis", "rediss", "unix")
ENTRY_POINTS = "redreel.storage"


def open_storage(url: str) -> Storage:
    """Open `url`: redis://HOST:PORT/DB, rediss://… (TLS), unix://PATH, embedded://DIRECTORY (starts
    a redis-server there that ends with this process), fake:// (inside this process).

    Raises UnsuitableServerError for any other URL; the server itself is not asked yet.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme in SERVERS:
        return RedisStore(connect(url), shown_url(url))
    if scheme == "embedded":
        return _open_embedded(url.removeprefix("embedded://"))
    if scheme == "fake":
        from storage.fake import fake_storage  # loads a Lua interpreter, for tests only

        return fake_storage()
    for point in entry_points(group=ENTRY_POINTS, name=scheme):
        storage: Storage = point.load()(url)
        return storage
    known = sorted({*SERVERS, "embedded", "fake", *entry_points(group=ENTRY_POINTS).names})
    raise UnsuitableServerError(
        f"server URL {shown_url(url)!r}: its scheme must be one of {', '.join(known)}, "
        "such as redis://localhost:6379"
    )


def _open_embedded(directory: str) -> Storage:
    from storage.embedded import start_embedded

    if not directory:
        raise UnsuitableServerError(
            "server URL 'embedded://': names no directory, such as embedded:///tmp/redreel"
        )
    server = start_embedded(Path(directory))
    return RedisStore(connect(server.url), server.url, on_close=server.stop)
