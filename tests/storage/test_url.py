"""What a server's URL may say, and that a password in it is shown to nobody."""

import os
from pathlib import Path

import pytest

from storage.connection import connect, shown_url
from storage.embedded import start_embedded
from storage.errors import UnsuitableServerError
from storage.fake import fake_storage
from storage.redis_store import RedisStore
from storage.url import open_storage


@pytest.mark.parametrize("value", ["True", "1", "yes", "0", ""])
def test_decoding_of_answers_is_refused_in_one_line_that_names_it(value: str) -> None:
    with pytest.raises(UnsuitableServerError) as refused:
        open_storage(f"redis://localhost:6379/0?decode_responses={value}")
    message = str(refused.value)
    assert "option 'decode_responses'" in message
    assert "binary" in message
    assert "\n" not in message


def test_a_client_keeps_bytes_that_are_no_text(redis_url: str) -> None:
    client = connect(redis_url)
    client.set("payload", b"\xff\x00\xfe")
    assert client.get("payload") == b"\xff\x00\xfe"
    client.flushall()


@pytest.mark.parametrize(
    "option",
    ["protocol=3", "socket_timeout=0", "encoding=utf-16", "max_connections=1", "ssl_ca_certs=/ca"],
)
def test_options_that_would_change_this_program_are_refused(option: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(UnsuitableServerError, match=f"option '{name}' is not settable"):
        connect(f"redis://localhost?{option}")


def test_options_of_the_server_are_taken() -> None:
    plain = connect("redis://localhost:6380/3?client_name=maze").connection_pool.connection_kwargs
    assert (plain["port"], plain["db"], plain["client_name"]) == (6380, 3, "maze")
    encrypted = connect("rediss://box?ssl_ca_certs=/etc/ca.pem").connection_pool.connection_kwargs
    assert encrypted["ssl_ca_certs"] == "/etc/ca.pem"
    assert encrypted.get("ssl_cert_reqs", "required") == "required"
    with pytest.raises(UnsuitableServerError, match="ssl_ca_cart"):
        connect("rediss://box?ssl_ca_cart=/etc/ca.pem")


@pytest.mark.parametrize(
    "url", ["redis://localhost/maze", "redis://localhost/1/2", "redis://localhost/-1"]
)
def test_a_database_that_is_no_number_is_refused_and_not_taken_for_the_first(url: str) -> None:
    with pytest.raises(UnsuitableServerError, match="should be a number"):
        connect(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:se/cret@box:6379",
        "redis://ada:se/cr@et#9@box",
        "redis://:secret@box:port",
        "redis://:secret@box:70000",
        "redis://:secret@[::1",
        "redis://box:port?password=secret",
        "redis://:secret@box?decode_responses=1",
        "http://:secret@box",
        "unix:///tmp/a.sock?password=secret&db=x",
    ],
)
def test_a_url_that_is_none_is_one_line_without_its_password(url: str) -> None:
    with pytest.raises(UnsuitableServerError) as refused:
        open_storage(url)
    message = str(refused.value)
    assert "\n" not in message
    assert not any(part in message for part in ("secret", "se/", "cret", "cr@", "et#9"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://ada:p%40s%2Fs@box:1", "redis://ada:***@box:1"),
        ("redis://:a@b/c#d@box:1/2", "redis://:***@box:1/2"),
        (
            "redis://box?db=2&password=abc&client_name=x",
            "redis://box?db=2&password=***&client_name=x",
        ),
        ("unix://:abc@/tmp/s.sock", "unix://:***@/tmp/s.sock"),
        ("unix:///tmp/me@home/s.sock", "unix:///tmp/me@home/s.sock"),
    ],
)
def test_passwords_are_hidden_wherever_they_stand(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_a_password_of_odd_characters_connects_when_percent_encoded(tmp_path: Path) -> None:
    with start_embedded(tmp_path / "data", append_only=False) as server:
        connect(server.url).config_set("requirepass", "q@u/o#t?e:%1")
        url = server.url.replace("unix://", "unix://:q%40u%2Fo%23t%3Fe%3A%251@")
        store = open_storage(url)
        assert store.experiments() == []
        assert "q@u" not in shown_url(url)
        assert "q%40u" not in shown_url(url)
        wrong = open_storage(server.url.replace("unix://", "unix://:q%40u@"))
        with pytest.raises(UnsuitableServerError) as refused:
            wrong.experiments()
        assert "\n" not in str(refused.value)
        assert "q@u" not in str(refused.value)
        assert "q%40u" not in str(refused.value)


def test_an_embedded_server_lives_as_long_as_its_storage(tmp_path: Path) -> None:
    store = open_storage(f"embedded://{tmp_path / 'here'}")
    assert isinstance(store, RedisStore)
    assert store.create_experiment("maze", "a: 1\n", "0" * 16, 1, 0) == "a: 1\n"
    process = int(store.client.info("server")["process_id"])
    store.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    again = open_storage(f"embedded://{tmp_path / 'here'}")
    assert again.read_config("maze") == "a: 1\n"
    again.close()
    with pytest.raises(UnsuitableServerError, match="names no directory"):
        open_storage("embedded://")


def test_two_fake_storages_know_nothing_of_each_other() -> None:
    one, other = open_storage("fake://"), fake_storage()
    one.create_experiment("maze", "a: 1\n", "0" * 16, 1, 0)
    assert other.experiments() == []
