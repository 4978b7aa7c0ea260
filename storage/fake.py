"""A storage inside this process, for tests and first tries: fakeredis behind the same scripts."""

import fakeredis

from storage.redis_store import RedisStore


def fake_storage(server: fakeredis.FakeServer | None = None) -> RedisStore:
    """A store on `server`, by default a fresh one; stores on one server share its data."""
    client = fakeredis.FakeRedis(server=server or fakeredis.FakeServer(server_type="redis"))
    return RedisStore(client, "fake://")
