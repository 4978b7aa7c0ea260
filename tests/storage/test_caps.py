"""Streams that could grow for ever hold exactly what they may, on a real server."""

import pytest

from storage import keys, redis_store
from storage.protocol import StoredEntry
from storage.redis_store import MOST_QUARANTINED, RedisStore
from tests.storage.entries import CREATION, EXPERIMENT, create, entry

SMALL = 37
"""Far below the size of one node of a stream, which is what a rounded cap is rounded to."""


@pytest.fixture(autouse=True)
def caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "MOST_METRICS", SMALL)
    monkeypatch.setattr(redis_store, "MOST_LOG_LINES", SMALL)


def test_metrics_keep_the_newest_and_no_more(real_storage: RedisStore) -> None:
    create(real_storage)
    for number in range(500):
        real_storage.append_metrics(EXPERIMENT, b"%d" % number)
        if number in (35, 36, 37, 38):
            length = real_storage.client.xlen(keys.metrics(EXPERIMENT))
            assert length == min(number + 1, SMALL)
    records = [record for _, record in real_storage.read_metrics(EXPERIMENT, "0", 10_000)]
    assert records == [b"%d" % number for number in range(500 - SMALL, 500)]


def test_log_lines_keep_the_newest_and_no_more(real_storage: RedisStore) -> None:
    create(real_storage)
    for number in range(300):
        real_storage.append_log(EXPERIMENT, b"line %d" % number)
    lines = [fields[b"line"] for _, fields in real_storage.client.xrange(keys.logs(EXPERIMENT))]
    assert lines == [b"line %d" % number for number in range(300 - SMALL, 300)]


def test_quarantine_keeps_the_newest_and_no_more(real_storage: RedisStore) -> None:
    create(real_storage)
    incarnation = real_storage.register_writer(EXPERIMENT, 0, "ada", CREATION)
    real_storage.write(EXPERIMENT, 0, entry(1, incarnation))
    stored: StoredEntry = real_storage.read(EXPERIMENT, {0: 0}, 1, 0)[0]
    for number in range(MOST_QUARANTINED + 60):
        real_storage.quarantine(EXPERIMENT, 0, stored, f"reason {number}")
    kept = real_storage.client.xrange(keys.quarantine(EXPERIMENT, 0))
    assert [fields[b"reason"].decode() for _, fields in kept] == [
        f"reason {number}" for number in range(60, MOST_QUARANTINED + 60)
    ]
    assert len(real_storage.read(EXPERIMENT, {0: 0}, 10, 0)) == 1
