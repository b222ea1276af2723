"""A load over https, whose certificate the client checks."""

import asyncio
import ssl
import subprocess
import threading

import pytest

from llmb.config.load_settings import LoadSettings
from llmb.errors import LaunchError
from llmb.events import RequestDone
from llmb.loadgen.load_test import run_load
from llmb.loadgen.noop_server import NoopConnection


@pytest.fixture
def tls_server(tmp_path):
    """A no-op server with a certificate of its own; gives its port and the certificate."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    try:
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("openssl cannot make a certificate here")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(lambda: NoopConnection(0.0, 0.0), "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server.sockets[0].getsockname()[1], certificate
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.close()
    loop.close()


def test_https_with_a_trusted_certificate_only(tls_server, monkeypatch):
    port, certificate = tls_server
    lengths = {"isl": 8, "osl": 3, "concurrency": 2, "num_requests": 6}
    load = LoadSettings(
        base_url=f"https://localhost:{port}", model="noop", **lengths, calibrate=False, ready_timeout_s=30.0
    )
    events: list = []
    with pytest.raises(LaunchError, match=r"certificate verify failed: .*; trust it by SSL_CERT_FILE"):
        run_load(load, events.append, lambda line: None)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert run_load(load, events.append, lambda line: None).status == "ok"
    requests = [event for event in events if isinstance(event, RequestDone)]
    assert [request.error for request in requests] == [None] * 6
