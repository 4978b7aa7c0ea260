"""Several processes with one server: forked children, and clocks that do not agree."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage.connection import connect
from storage.protocol import AnswerKind
from storage.redis_store import RedisStore
from tests.storage.entries import CREATION, EXPERIMENT, create, entry

ROOT = Path(__file__).parents[2]
FORKS = """
import os, sys
from storage.url import open_storage
url, how = sys.argv[1:]
inherited = open_storage(url)
inherited.append_metrics("maze", b"parent")  # its connection is open when the children are made
children = []
for child in range(4):
    pid = os.fork()
    if pid == 0:
        store = open_storage(url) if how == "own" else inherited
        wrong = 0
        for turn in range(450):
            store.client.incr("turns")
            # each child asks for something of its own: a swapped reply would be another's
            wrong += store.client.echo(b"%d-%d" % (child, turn)) != b"%d-%d" % (child, turn)
            if turn % 50 == 0:
                wrong += store.register_agent("maze", f"agent-{child}") != int(
                    store.client.hget("{maze}:agents", f"agent-{child}")
                )
        os._exit(min(wrong, 255))
    children.append(pid)
for _ in range(100):
    assert inherited.client.echo(b"parent") == b"parent"
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert codes == [0, 0, 0, 0], codes
inherited.append_metrics("maze", b"parent again")
"""


@pytest.mark.parametrize("how", ["own", "inherited"])
def test_four_forked_children_and_their_parent_get_their_own_replies(
    redis_url: str, how: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, redis_url, how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    client = connect(redis_url)
    assert client.get("turns") == b"1800"
    assert client.hlen("{maze}:agents") == 4
    client.flushall()


def test_writers_whose_clocks_are_hours_apart_are_numbered_by_the_server(
    real_storage: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(real_storage)
    right = time.time()
    clocks = {"slow": right - 7 * 3600, "exact": right, "fast": right + 7 * 3600}
    incarnations = {}
    for agent, now in clocks.items():
        monkeypatch.setattr(time, "time", lambda now=now: now)
        monkeypatch.setattr(time, "time_ns", lambda now=now: int(now * 1e9))
        incarnations[agent] = real_storage.register_writer(EXPERIMENT, 0, agent, CREATION)
    for incarnation in incarnations.values():
        assert abs(incarnation / 1000 - right) < 60
    numbers = []
    for sequence in range(1, 5):
        for agent in ("fast", "slow", "exact"):
            monkeypatch.setattr(time, "time", lambda agent=agent: clocks[agent])
            write = entry(sequence, incarnations[agent], agent=agent, frames=[sequence])
            answer = real_storage.write(EXPERIMENT, 0, write)
            assert answer.kind is AnswerKind.WRITTEN
            numbers.append(answer.entry)
    assert numbers == list(range(1, 13))
    stored = real_storage.read(EXPERIMENT, {0: 0}, 100, 0)
    assert [one.entry for one in stored] == numbers
    assert [(one.agent, one.sequence) for one in stored] == [
        (agent, sequence) for sequence in range(1, 5) for agent in ("fast", "slow", "exact")
    ]


def test_a_writer_that_begins_again_on_a_slow_clock_still_follows_its_former_self(
    real_storage: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(real_storage)
    first = real_storage.register_writer(EXPERIMENT, 0, "ada", CREATION)
    monkeypatch.setattr(time, "time", lambda: 1_000.0)
    second = real_storage.register_writer(EXPERIMENT, 0, "ada", CREATION)
    assert second > first
    assert real_storage.write(EXPERIMENT, 0, entry(1, second)).kind is AnswerKind.WRITTEN
    assert real_storage.write(EXPERIMENT, 0, entry(1, first)).kind is AnswerKind.SUPERSEDED


def test_roles_change_hands_by_the_servers_clock(
    real_storage: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(real_storage)
    lease = real_storage.acquire(EXPERIMENT, "learner-main", "one", 30.0)
    assert lease is not None
    monkeypatch.setattr(time, "time", lambda: 4e9)  # for this process the lease ran out long ago
    assert real_storage.acquire(EXPERIMENT, "learner-main", "two", 30.0) is None
    real_storage.renew(EXPERIMENT, lease, 30.0)
