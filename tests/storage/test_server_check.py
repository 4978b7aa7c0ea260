"""The check of a server at start: what it refuses, what it warns of, and with which remedy."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import redis

from storage.embedded import find_server, start_embedded
from storage.errors import UnsuitableServerError
from storage.server_check import check_server


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_embedded(tmp_path_factory.mktemp("check"), max_memory_bytes=256 << 20) as server:
        yield server.url


@pytest.fixture
def client(server_url: str) -> Iterator[redis.Redis]:
    """A server as the project starts it; what a test sets is put back."""
    with redis.Redis.from_url(server_url) as client:
        changeable = ["maxmemory", "maxmemory-policy", "appendonly", "appendfsync", "timeout"]
        changeable += ["client-output-buffer-limit", "save", "stop-writes-on-bgsave-error"]
        before = {name: client.config_get(name)[name] for name in changeable}
        yield client
        client.replicaof("NO", "ONE")
        for name, value in before.items():
            client.config_set(name, value)


class ServerThatSays:
    """Stands for a server that cannot be had here; `settings` None keeps CONFIG to itself."""

    def __init__(self, info: dict[str, Any], settings: dict[str, str] | None = None) -> None:
        self._info, self._settings = info, settings

    def info(self) -> dict[str, Any]:
        return self._info

    def config_get(self, pattern: str) -> dict[str, str]:
        if self._settings is None:
            raise redis.exceptions.ResponseError("unknown command 'CONFIG'")
        return self._settings


def refusal(client: Any) -> str:
    with pytest.raises(UnsuitableServerError) as error:
        check_server(client)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_embedded_server_has_nothing_to_warn_of(client: redis.Redis) -> None:
    assert check_server(client) == []


def test_client_that_decodes_sees_the_same(server_url: str) -> None:
    with redis.Redis.from_url(server_url, decode_responses=True) as client:
        assert check_server(client) == []


def test_fakeredis_tells_nothing_and_is_let_through() -> None:
    assert check_server(fakeredis.FakeRedis()) == []


@pytest.mark.parametrize("version", ["6.0.16", "5.0.7", "2.8.0"])
def test_version_below_6_2_is_refused(version: str) -> None:
    assert f"redis_version is {version}" in refusal(ServerThatSays({"redis_version": version}))


@pytest.mark.parametrize("version", ["6.2.0", "7.0.15", "8.2.1-rc1"])
def test_version_from_6_2_on_is_taken(version: str) -> None:
    check_server(ServerThatSays({"redis_version": version}))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "allkeys-random"])
def test_eviction_under_a_memory_limit_is_refused_with_the_setting(
    client: redis.Redis, policy: str
) -> None:
    client.config_set("maxmemory-policy", policy)
    said = refusal(client)
    assert f"maxmemory-policy is {policy}" in said
    assert "CONFIG SET maxmemory-policy noeviction" in said


def test_eviction_policy_is_seen_where_config_is_forbidden() -> None:
    info = {"redis_version": "7.2.4", "maxmemory": 1 << 30, "maxmemory_policy": "allkeys-lfu"}
    assert "maxmemory-policy is allkeys-lfu" in refusal(ServerThatSays(info))


def test_eviction_policy_without_a_memory_limit_is_only_the_limits_warning(
    client: redis.Redis,
) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory", 0)
    (warning,) = check_server(client)
    assert "maxmemory is 0" in warning
    assert "CONFIG SET maxmemory" in warning


def test_replica_is_refused_and_its_master_named(client: redis.Redis) -> None:
    client.replicaof("127.0.0.1", "7")
    said = refusal(client)
    assert "role is slave" in said
    assert "127.0.0.1:7" in said


def test_cluster_mode_is_refused(tmp_path: Path) -> None:
    socket = tmp_path / "cluster.sock"
    words = f"--cluster-enabled yes --port 0 --unixsocket {socket} --dir {tmp_path}".split()
    server = subprocess.Popen([find_server().path, *words], stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis(unix_socket_path=str(socket))
        limit = time.monotonic() + 10
        while not socket.exists() and time.monotonic() < limit:
            time.sleep(0.02)
        assert "cluster_enabled is 1" in refusal(client)
    finally:
        server.terminate()
        server.wait()


def test_too_little_memory_is_warned_of(client: redis.Redis) -> None:
    client.config_set("maxmemory", 20 << 20)  # 20971520 bytes
    (warning,) = check_server(client)
    assert "maxmemory is 20971520 bytes" in warning


def test_nearly_full_server_is_warned_of() -> None:
    # 950 MiB of 1000 MiB is 95 %, above 90 %; 850 MiB is not.
    info = {"redis_version": "7.0.0", "maxmemory": 1000 << 20, "maxmemory_policy": "noeviction"}
    (warning,) = check_server(ServerThatSays(info | {"used_memory": 950 << 20}))  # type: ignore[arg-type]
    assert f"used_memory is {950 << 20} of maxmemory {1000 << 20} bytes" in warning
    assert check_server(ServerThatSays(info | {"used_memory": 850 << 20})) == []  # type: ignore[arg-type]


def test_missing_append_only_file_is_warned_of(client: redis.Redis) -> None:
    client.config_set("appendonly", "no")
    (warning,) = check_server(client)
    assert "appendonly is no" in warning
    assert "CONFIG SET appendonly yes" in warning


def test_append_only_file_that_is_never_synced_is_warned_of(client: redis.Redis) -> None:
    client.config_set("appendfsync", "no")
    (warning,) = check_server(client)
    assert "CONFIG SET appendfsync everysec" in warning


def test_idle_timeout_is_warned_of_when_short(client: redis.Redis) -> None:
    client.config_set("timeout", 5)
    (warning,) = check_server(client)
    assert "timeout is 5" in warning
    client.config_set("timeout", 600)
    assert check_server(client) == []


@pytest.mark.parametrize(("kind", "limits"), [("pubsub", "8192 0 0"), ("normal", "0 65536 10")])
def test_small_output_buffers_are_warned_of(client: redis.Redis, kind: str, limits: str) -> None:
    client.config_set("client-output-buffer-limit", f"{kind} {limits}")
    (warning,) = check_server(client)
    # The smaller of hard and soft that is not 0: 8192 and 65536.
    smallest = {"pubsub": 8192, "normal": 65536}[kind]
    assert f"client-output-buffer-limit {kind} is {smallest} bytes" in warning


def test_failed_save_that_stops_writes_is_told_with_cause_and_remedy(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    with (
        start_embedded(directory, append_only=False) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        client.config_set("save", "3600 1")
        client.config_set("stop-writes-on-bgsave-error", "yes")
        shutil.rmtree(directory)  # now no temporary file can be made
        client.set("unsaved", 1)
        client.bgsave()
        limit = time.monotonic() + 10
        while client.info()["rdb_bgsave_in_progress"] and time.monotonic() < limit:
            time.sleep(0.02)
        with pytest.raises(redis.exceptions.ResponseError, match="MISCONF"):
            client.set("refused", 1)
        told = [warning for warning in check_server(client) if "MISCONF" in warning]
        assert len(told) == 1
        assert "stop-writes-on-bgsave-error is yes" in told[0]
        assert 'CONFIG SET save ""' in told[0]
        client.config_set("save", "")  # the remedy; with it the server can end by itself, too
        client.set("accepted", 1)
