"""What a server's version and settings will do to a run, said before it begins.

Guarantees: a server that would lose data or cannot work is refused in one line; everything else
that will hurt is a warning that ends in its remedy; what the server does not tell is not guessed.
"""

from collections.abc import Mapping
from typing import Any

import redis

from storage.errors import UnsuitableServerError

LEAST_VERSION = (6, 2)
LEAST_MEMORY_BYTES = 64 * 2**20
MEMORY_USED_SHARE = 0.9
LEAST_IDLE_TIMEOUT_S = 60
"""Processes speak every few seconds; below this a slow simulator is cut off between entries."""
LEAST_PUBSUB_BYTES = 2**20
"""Notices are tens of bytes; a smaller buffer cuts a subscriber at the first hiccup."""
LEAST_REPLY_BYTES = 64 * 2**20
"""A reader's largest reply: entries and frames of one read."""


def check_server(client: redis.Redis) -> list[str]:
    """Warnings, each with its remedy. Raises UnsuitableServerError for a version below 6.2, cluster
    mode, a replica, or an eviction policy under a memory limit."""
    try:
        info: dict[str, Any] = client.info()
    except redis.exceptions.NoPermissionError:
        return ["this account may not call INFO, so the server is not checked: allow +info"]
    except redis.exceptions.ResponseError as error:
        if "unknown command" in str(error):  # fakeredis
            return []
        raise
    settings = _settings(client)
    _refuse(info, settings)
    return _memory(info, settings) + _disk(info, settings) + _connections(settings)


def _settings(client: redis.Redis) -> Mapping[str, str]:
    """CONFIG GET *, or nothing where the server keeps it to itself (managed services, ACL)."""
    try:
        return {_text(name): _text(value) for name, value in client.config_get("*").items()}
    except redis.exceptions.ResponseError:
        return {}


def _refuse(info: Mapping[str, Any], settings: Mapping[str, str]) -> None:
    version = str(info.get("redis_version", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < LEAST_VERSION:
        raise UnsuitableServerError(
            f"redis_version is {version}: 6.2 is the least that works; update the server"
        )
    if int(info.get("cluster_enabled", 0)):
        raise UnsuitableServerError(
            "cluster_enabled is 1: Redis Cluster is not supported yet; name a single server"
        )
    if info.get("role", "master") != "master":
        master = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
        raise UnsuitableServerError(
            f"role is {info['role']}: writes to a replica fail; name its master, {master}"
        )
    policy = _policy(info, settings)
    if _limit(info, settings) and policy != "noeviction":
        raise UnsuitableServerError(
            f"maxmemory-policy is {policy}: the server would drop entries and frames that are "
            "still needed; CONFIG SET maxmemory-policy noeviction"
        )


def _policy(info: Mapping[str, Any], settings: Mapping[str, str]) -> str:
    return str(settings.get("maxmemory-policy", info.get("maxmemory_policy", "noeviction")))


def _limit(info: Mapping[str, Any], settings: Mapping[str, str]) -> int:
    """maxmemory in bytes, 0 for none."""
    return int(settings.get("maxmemory", info.get("maxmemory", 0)))


def _memory(info: Mapping[str, Any], settings: Mapping[str, str]) -> list[str]:
    limit = _limit(info, settings)
    used = int(info.get("used_memory", 0))
    if not limit:
        return [
            "maxmemory is 0, so a run may take all of the machine's memory: "
            "CONFIG SET maxmemory to what this server may have, such as 4gb"
        ]
    if limit < LEAST_MEMORY_BYTES:
        return [
            f"maxmemory is {limit} bytes, below {LEAST_MEMORY_BYTES}: hardly a window fits; "
            "CONFIG SET maxmemory to more"
        ]
    if used > MEMORY_USED_SHARE * limit:
        return [
            f"used_memory is {used} of maxmemory {limit} bytes, so writes will soon be refused: "
            "delete experiments that are done, or CONFIG SET maxmemory to more"
        ]
    return []


def _disk(info: Mapping[str, Any], settings: Mapping[str, str]) -> list[str]:
    warnings = []
    if not int(info.get("aof_enabled", 1)):
        warnings.append(
            "appendonly is no, so a server that is killed loses answered entries: "
            "CONFIG SET appendonly yes"
        )
    elif settings.get("appendfsync") == "no":
        warnings.append(
            "appendfsync is no, so a crash of the machine loses more than the last two seconds: "
            "CONFIG SET appendfsync everysec"
        )
    if info.get("aof_last_write_status", "ok") != "ok":
        warnings.append(
            "aof_last_write_status is err, so every write is refused (MISCONF): make room on the "
            "server's disk; it goes on by itself"
        )
    stops = settings.get("stop-writes-on-bgsave-error", "yes") == "yes"
    saves = settings.get("save", "?") != ""
    if info.get("rdb_last_bgsave_status", "ok") != "ok" and stops and saves:
        warnings.append(
            "rdb_last_bgsave_status is err and stop-writes-on-bgsave-error is yes, so every write "
            f"is refused (MISCONF): make {settings.get('dir', 'the directory')} writable and BGSAVE"
            ', or CONFIG SET save ""'
        )
    return warnings


def _connections(settings: Mapping[str, str]) -> list[str]:
    warnings = []
    idle_s = int(settings.get("timeout", 0))
    if 0 < idle_s < LEAST_IDLE_TIMEOUT_S:
        warnings.append(
            f"timeout is {idle_s}, so connections idle for {idle_s} s are cut: CONFIG SET timeout 0"
        )
    least = {"normal": LEAST_REPLY_BYTES, "pubsub": LEAST_PUBSUB_BYTES}
    for kind, limits in _buffer_limits(settings).items():
        smallest = min((limit for limit in limits[:2] if limit), default=None)
        if kind in least and smallest is not None and smallest < least[kind]:
            warnings.append(
                f"client-output-buffer-limit {kind} is {smallest} bytes, so readers are cut off: "
                f'CONFIG SET client-output-buffer-limit "{kind} {least[kind]} {least[kind]} 60"'
            )
    return warnings


def _buffer_limits(settings: Mapping[str, str]) -> dict[str, tuple[int, int, int]]:
    """Kind of client to (hard bytes, soft bytes, seconds); a 0 is no limit."""
    words = settings.get("client-output-buffer-limit", "").split()
    return {
        words[at]: (int(words[at + 1]), int(words[at + 2]), int(words[at + 3]))
        for at in range(0, len(words) - 3, 4)
    }


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
