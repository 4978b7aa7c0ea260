"""`rediss://`: a real redis-server that speaks TLS, with an authority of the test's own."""

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from storage.embedded import EmbeddedServer, machine_server
from storage.errors import UnavailableError, UnsuitableServerError
from storage.url import open_storage
from tests.storage.entries import CREATION, EXPERIMENT, create, entry


@pytest.fixture
def tls_server(machine_redis: EmbeddedServer, tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Port of a TLS-only server that wants a password, and the file of its authority. It needs the
    machine's server: the package's is built without TLS."""
    binary = machine_server()
    assert binary is not None
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "port": "0",
        "tls-port": str(port),
        "bind": "127.0.0.1",
        "tls-cert-file": "cert.pem",
        "tls-key-file": "key.pem",
        "tls-ca-cert-file": "ca.pem",
        "tls-auth-clients": "no",
        "requirepass": "open sesame",
        "save": "",
        "dir": str(tmp_path),
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    server = subprocess.Popen([binary.path, *words], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None, "redis-server ended: built without TLS?"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield port, tmp_path / "ca.pem"
    finally:
        server.kill()
        server.wait()


def test_a_storage_over_tls_writes_and_reads(tls_server: tuple[int, Path]) -> None:
    port, authority = tls_server
    storage = open_storage(f"rediss://:open%20sesame@localhost:{port}/0?ssl_ca_certs={authority}")
    create(storage)
    incarnation = storage.register_writer(EXPERIMENT, 0, "ada", CREATION)
    storage.write(EXPERIMENT, 0, entry(1, incarnation, frames=[4]))
    (read,) = storage.read(EXPERIMENT, {0: 0}, 10, 0.0)
    assert read.entry == 1
    assert storage.audit(EXPERIMENT).problems == ()
    storage.close()


def test_an_unknown_authority_is_refused_in_one_line(tls_server: tuple[int, Path]) -> None:
    port, _ = tls_server
    storage = open_storage(f"rediss://:open%20sesame@localhost:{port}/0")
    with pytest.raises((UnavailableError, UnsuitableServerError), match="certificate") as caught:
        storage.check_server()
    assert "\n" not in str(caught.value)
    assert "sesame" not in str(caught.value)


def test_a_wrong_password_is_refused_without_showing_it(tls_server: tuple[int, Path]) -> None:
    port, authority = tls_server
    storage = open_storage(f"rediss://:guess@localhost:{port}/0?ssl_ca_certs={authority}")
    with pytest.raises(UnsuitableServerError) as caught:
        storage.check_server()
    assert "guess" not in str(caught.value)


def test_plain_text_to_a_tls_port_is_an_error_and_not_a_hang(
    tls_server: tuple[int, Path],
) -> None:
    port, _ = tls_server
    began = time.monotonic()
    with pytest.raises(UnavailableError):
        open_storage(f"redis://localhost:{port}").check_server()
    assert time.monotonic() - began < 30
