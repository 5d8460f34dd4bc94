"""A progress service for workers under test: HTTPS on loopback, writes down what it is told, and answers as it is told.

Every start creates a new certificate authority, like an operator that has lost its Secret.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.trainer.gang_processes import DEADLINE

PATH = "/apis/tpu-operator.dev/v1alpha1/namespaces/default/tputrainingjobs/small/progress"
KUBEFLOW_PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/small/status"


@dataclass(frozen=True)
class Request:
    """`client`: the address and port that it came from, one for each connection."""

    path: str
    token: str
    body: bytes
    client: tuple[str, int]

    @property
    def said(self) -> dict[str, Any]:
        return json.loads(self.body)


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b'{"stacks": false}'
    headers: tuple[tuple[str, str], ...] = ()


class ProgressService:
    """`directory` gets the files that a pod would have mounted: `token` and `ca.crt`.

    `answer` is asked for every request, in the request's own thread, and may take as long as it likes.
    """

    def __init__(self, directory: Path) -> None:
        self.token_file, self.ca_file = directory / "token", directory / "ca.crt"
        self.token_file.write_text("first-token\n")
        self.answer: Callable[[Request], Answer] = lambda request: Answer()
        self.requests: list[Request] = []
        self.port = 0
        self._directory = directory
        self._changed = threading.Condition()
        self._server: ThreadingHTTPServer | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What the operator would set in the worker that reports."""
        return {
            "TPUJOB_PROGRESS_URL": f"https://localhost:{self.port}{PATH}",
            "TPUJOB_PROGRESS_TOKEN_FILE": str(self.token_file),
            "TPUJOB_PROGRESS_CA_FILE": str(self.ca_file),
        }

    @property
    def kubeflow_environment(self) -> dict[str, str]:
        """What Kubeflow Trainer would set."""
        return {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{self.port}{KUBEFLOW_PATH}",
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self.token_file),
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(self.ca_file),
        }

    def start(self) -> None:
        """Listens, after a stop on the same port again."""
        authority, key = _issue(self._directory)
        self.ca_file.write_bytes(authority)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(key)
        self._server = _Server(self, context)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuses connections, and closes those that there are."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def take(self, request: Request) -> None:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()

    def wait_for(self, holds: Callable[[dict[str, Any]], bool], *, after: int = 0) -> dict[str, Any]:
        """The first report after the first `after` ones for which `holds` is true, once it has arrived."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [request.said for request in self.requests[after:] if holds(request.said)]
            return bool(found)

        with self._changed:
            assert self._changed.wait_for(look, DEADLINE), [request.body for request in self.requests]
        return found[0]

    def wait_for_more(self, count: int) -> None:
        """Until `count` more requests have come."""
        with self._changed:
            before = len(self.requests)
            assert self._changed.wait_for(lambda: len(self.requests) >= before + count, DEADLINE), before


@contextmanager
def progress_service(directory: Path) -> Iterator[ProgressService]:
    service = ProgressService(directory)
    service.start()
    try:
        yield service
    finally:
        service.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, service: ProgressService, context: ssl.SSLContext) -> None:
        self.service, self._context = service, context
        self._open: set[ssl.SSLSocket] = set()
        super().__init__(("127.0.0.1", service.port), _Handler)

    def get_request(self) -> tuple[ssl.SSLSocket, Any]:
        plain, address = super().get_request()
        # The handshake is the request's thread's: a client that never says anything keeps nobody else waiting.
        secure = self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        self._open.add(secure)
        return secure, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        # Those that are kept open for the next request; their threads read an end and leave.
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves, or does not trust this service, is not an error of the test."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        token = self.headers["Authorization"].removeprefix("Bearer ")
        request = Request(self.path, token, body, self.client_address)
        self.server.service.take(request)
        answer = self.server.service.answer(request)
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, *_: object) -> None:
        """The test looks at the requests."""


def _issue(directory: Path) -> tuple[bytes, Path]:
    """A certificate authority (PEM), and the file with the certificate for localhost that it issued, and its key."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    now = datetime.now(UTC)

    def builder(name: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(authority_name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        )

    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    authority = (
        builder(authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    certificate = (
        builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")]), key.public_key())
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    file = directory / "serving.pem"
    file.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    return authority.public_bytes(serialization.Encoding.PEM), file
