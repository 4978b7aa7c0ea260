"""What errors of a server mean, and that messages hold no password."""

import time
from pathlib import Path

import pytest
import redis

from storage import keys
from storage.connection import connect, shown_url, storage_errors
from storage.embedded import start_embedded
from storage.errors import StorageError, UnavailableError, UnsuitableServerError
from storage.protocol import AnswerKind
from storage.redis_store import RedisStore
from storage.url import open_storage
from tests.storage.entries import CREATION, EXPERIMENT, create, entry, key


def store(server_url: str) -> RedisStore:
    return RedisStore(connect(server_url), shown_url(server_url))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:hunter2@box:6379/0", "redis://:***@box:6379/0"),
        ("rediss://ada:hunter2@box", "rediss://ada:***@box"),
        ("redis://box:6379", "redis://box:6379"),
        ("unix:///tmp/a.sock", "unix:///tmp/a.sock"),
    ],
)
def test_a_shown_url_has_no_password(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize("url", ["http://box", "box:6379", "", "redis//box"])
def test_an_unknown_scheme_names_those_there_are(url: str) -> None:
    with pytest.raises(UnsuitableServerError, match="embedded, fake, redis, rediss, unix"):
        open_storage(url)


def test_a_server_that_is_not_there_is_unavailable_and_quickly_so() -> None:
    began = time.monotonic()
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1"):
        store("redis://:hunter2@127.0.0.1:1").experiments()
    assert time.monotonic() - began < 5


def test_a_wrong_password_is_refused_without_showing_it(tmp_path: Path) -> None:
    with start_embedded(tmp_path / "data", append_only=False) as server:
        connect(server.url).config_set("requirepass", "right")
        with pytest.raises(UnsuitableServerError) as refused:
            store(server.url).experiments()
        assert "Authentication required" in str(refused.value)
        wrong = server.url.replace("unix://", "unix://:hunter2@")
        with pytest.raises(UnsuitableServerError) as refused:
            store(wrong).experiments()
        assert "hunter2" not in str(refused.value)


def test_a_key_of_another_type_is_an_error_of_the_store(real_storage: RedisStore) -> None:
    real_storage.client.set(keys.EXPERIMENTS, "text")
    with pytest.raises(StorageError, match="WRONGTYPE"):
        real_storage.experiments()
    real_storage.client.delete(keys.EXPERIMENTS)


def test_a_restarted_server_is_reached_again_and_its_scripts_loaded(tmp_path: Path) -> None:
    with start_embedded(tmp_path / "data") as server:
        one = store(server.url)
        create(one)
        incarnation = one.register_writer(EXPERIMENT, 0, "ada", CREATION)
        one.write(EXPERIMENT, 0, entry(1, incarnation))
    with pytest.raises(UnavailableError):
        one.write(EXPERIMENT, 0, entry(2, incarnation))
    with start_embedded(tmp_path / "data") as server:
        assert one.write(EXPERIMENT, 0, entry(2, incarnation)).entry == 2
        assert one.audit(EXPERIMENT).problems == ()


def test_a_server_out_of_memory_has_the_oldest_dropped_and_goes_on(tmp_path: Path) -> None:
    """No reader, no byte limit of its own: only the server's maxmemory says stop."""
    with start_embedded(tmp_path / "data", append_only=False) as server:
        one = store(server.url)
        create(one)
        incarnation = one.register_writer(EXPERIMENT, 0, "ada", CREATION)
        client = one.client
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory", used + (6 << 20))
        written = dropped = 0
        for sequence in range(1, 101):  # 100 entries of 200 kB: three times what fits
            write = entry(sequence, incarnation, frames=[sequence], data=b"d" * 200_000)
            while (answer := one.write(EXPERIMENT, 0, write)).kind is AnswerKind.DROP:
                dropped += one.drop(EXPERIMENT, 0, CREATION, 200_000)
            assert answer.kind is AnswerKind.WRITTEN
            written += 1
        assert written == 100
        assert dropped > 50
        account = one.account(EXPERIMENT, 0)
        assert int(account["dropped:bytes"]) == dropped
        assert one.fetch_frames(EXPERIMENT, 0, [key(1)]) == [None]
        assert one.audit(EXPERIMENT).problems == ()


@pytest.mark.parametrize(
    ("answer", "meaning"),
    [
        ("LOADING Redis is loading the dataset in memory", UnavailableError),
        ("MISCONF Redis is configured to save RDB snapshots, but it's unable to", UnavailableError),
        ("READONLY You can't write against a read only replica.", UnavailableError),
        ("NOPERM this user has no permissions to run the 'evalsha' command", UnsuitableServerError),
        ("ERR syntax error", StorageError),
    ],
)
def test_a_servers_answer_is_one_to_wait_for_to_mend_or_a_fault(
    answer: str, meaning: type[StorageError]
) -> None:
    with pytest.raises(meaning) as raised, storage_errors("redis://box"):
        raise redis.ResponseError(answer)
    assert type(raised.value) is meaning
    assert str(raised.value).startswith("redis://box: ")
