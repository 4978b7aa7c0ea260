"""Every Redis key and channel of the project, in one table (docs/keys.md shows it to people).

Guarantees: keys of one shard share one hash tag, so a shard lives on one Redis Cluster node; no
experiment can name another's keys, because the names are checked here.
"""

import re

from storage.errors import InvalidNameError

EXPERIMENT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
MEMBER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

EXPERIMENTS = "experiments"
"""Set of experiment names."""


def checked_experiment(name: str) -> str:
    """Return `name`, or raise InvalidNameError: a DNS label, so it stands in any key or host."""
    if not EXPERIMENT_NAME.fullmatch(name):
        raise InvalidNameError(
            f"experiment name {name!r}: use 1 to 63 of a-z, 0-9 and '-', "
            "beginning and ending with a letter or digit"
        )
    return name


def checked_member(role: str, name: str) -> str:
    """Return an agent's, learner's or reader's `name`, or raise InvalidNameError."""
    if not MEMBER_NAME.fullmatch(name):
        raise InvalidNameError(f"{role} name {name!r}: use 1 to 64 of A-Z, a-z, 0-9, '.', '_', '-'")
    return name


# One shard: everything under the hash tag {EXPERIMENT:SHARD}.


def shard_tag(experiment: str, shard: int) -> str:
    return f"{{{experiment}:{shard}}}"


def segments(experiment: str, shard: int) -> str:
    """Stream of entries, ids ENTRY-0."""
    return f"{shard_tag(experiment, shard)}:segments"


def frame_prefix(experiment: str, shard: int) -> str:
    return f"{shard_tag(experiment, shard)}:frame:"


def frame(experiment: str, shard: int, key: str) -> str:
    """String: header (last entry that names it, codec, dtype, shape) and compressed bytes."""
    return frame_prefix(experiment, shard) + key


def state(experiment: str, shard: int) -> str:
    """Hash: creation id, the account, readers' settings and marks."""
    return f"{shard_tag(experiment, shard)}:state"


def writer(experiment: str, shard: int, agent: str) -> str:
    """Hash: incarnation and sequence of an agent's last entry. Never expires."""
    return f"{shard_tag(experiment, shard)}:writer:{agent}"


def priorities(experiment: str, shard: int, reader: str) -> str:
    """String: a reader's saved priorities."""
    return f"{shard_tag(experiment, shard)}:priorities:{reader}"


def quarantine(experiment: str, shard: int) -> str:
    """Capped stream: copies of entries that nobody could decode."""
    return f"{shard_tag(experiment, shard)}:quarantine"


# One experiment: everything under the hash tag {EXPERIMENT}.


def experiment_tag(experiment: str) -> str:
    return f"{{{experiment}}}"


def config(experiment: str) -> str:
    """String: YAML, written once."""
    return f"{experiment_tag(experiment)}:config"


def learner(experiment: str, name: str) -> str:
    """String: YAML, one learner's configuration."""
    return f"{experiment_tag(experiment)}:learner:{name}"


def agents(experiment: str) -> str:
    """Hash: agent id to agent index, allotted once."""
    return f"{experiment_tag(experiment)}:agents"


def parameters(experiment: str, name: str) -> str:
    """Hash: fence, version, entry, bytes, content hash, live values. Also the notice channel."""
    return f"{experiment_tag(experiment)}:parameters:{name}"


def parameters_value(experiment: str, name: str, fence: int, version: int) -> str:
    """String: one parameter set."""
    return f"{parameters(experiment, name)}:{fence}.{version}"


def lease(experiment: str, role: str) -> str:
    """Hash without expiry: token, fence, until when (server time, milliseconds)."""
    return f"{experiment_tag(experiment)}:lease:{role}"


def members(experiment: str) -> str:
    """Set of member ids."""
    return f"{experiment_tag(experiment)}:members"


def member(experiment: str, member_id: str) -> str:
    """Hash with expiry: one process's heartbeat."""
    return f"{experiment_tag(experiment)}:member:{member_id}"


def metrics(experiment: str) -> str:
    """Capped stream of measurements from every process."""
    return f"{experiment_tag(experiment)}:metrics"


def logs(experiment: str) -> str:
    """Capped stream of log lines from every process."""
    return f"{experiment_tag(experiment)}:logs"
