"""The certificates of the progress service: our own certificate authority, which workers trust, and the server's.

The authority is in a Secret of the operator's namespace and lasts ten years. It must outlive the process: the workers
of a running attempt trust the authority of the previous process. The server's certificate lasts a year, is made at
every start, and is renewed while the process runs; its key never leaves the process.
"""

import asyncio
import base64
import binascii
import contextlib
import os
import re
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tpu_training_operator.api.constants import CA_CERTIFICATE_KEY
from tpu_training_operator.kube.cluster import SECRETS, Object, Updater
from tpu_training_operator.kube.errors import Conflict, NotFound

AUTHORITY_LIFETIME = timedelta(days=3652)
SERVER_LIFETIME = timedelta(days=365)
# The nodes' clocks may be behind ours.
_BACKDATED = timedelta(hours=1)
# A twelfth of the certificate's life, so that no outage lets it expire.
_RENEW_SECONDS = 30 * 86400.0
_PRIVATE_KEY = "ca.key"

# An RFC 1035 label for the Service, an RFC 1123 label for the namespace.
_SERVICE_FORM = re.compile(r"([a-z]([-a-z0-9]*[a-z0-9])?)\.([a-z0-9]([-a-z0-9]*[a-z0-9])?)")
_LONGEST_LABEL = 63


@dataclass(frozen=True)
class ServiceName:
    """The Kubernetes Service in front of the operator."""

    name: str
    namespace: str

    @staticmethod
    def parse(text: str) -> "ServiceName":
        """Raises ValueError, with a message for the user, unless the text is NAME.NAMESPACE."""
        match = _SERVICE_FORM.fullmatch(text)
        if match is None or max(map(len, text.split("."))) > _LONGEST_LABEL:
            raise ValueError(f"{text!r} is not NAME.NAMESPACE of a Service, such as tpu-training-operator.tpu-system")
        return ServiceName(match[1], match[3])

    def url(self, port: int) -> str:
        return f"https://{self.name}.{self.namespace}.svc:{port}"

    @property
    def dns_names(self) -> tuple[str, ...]:
        """The names in the certificate. With `kubectl port-forward`, the service is localhost."""
        host = f"{self.name}.{self.namespace}.svc"
        return (host, f"{host}.cluster.local", "localhost")

    @property
    def secret_name(self) -> str:
        return f"{self.name}-tls"


class BadAuthority(Exception):
    """These bytes are not a usable authority; the message says why."""


class BadSecret(Exception):
    """The Secret is missing or holds something else. It is never overwritten; the message says what to do."""


@dataclass(frozen=True)
class KeyPair:
    """PEM: the certificate and its private key."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True)
class Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> KeyPair:
        return _pem(self.certificate, self.key)


def new_authority(name: str, now: datetime) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _x509_name(name)
    certificate = (
        _unsigned(subject, subject, key, now, AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def read_authority(pem: KeyPair, now: datetime) -> Authority:
    """Reads an authority that `new_authority` made. Raises BadAuthority for anything else, and for an authority that
    would expire before a server certificate made now."""
    try:
        certificate = x509.load_pem_x509_certificate(pem.certificate)
        key = serialization.load_pem_private_key(pem.key, password=None)
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        certificate.verify_directly_issued_by(certificate)
    except Exception as error:
        # The library raises a different exception for each possible error in the bytes.
        raise BadAuthority(f"not a CA certificate and its key: {error or type(error).__name__}") from None
    if not constraints.ca or not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadAuthority("not a CA certificate with an elliptic curve key")
    if key.public_key() != certificate.public_key():
        raise BadAuthority("the key does not belong to the certificate")
    if certificate.not_valid_after_utc < now + SERVER_LIFETIME:
        raise BadAuthority(f"the certificate expires on {certificate.not_valid_after_utc:%Y-%m-%d}")
    return Authority(certificate, key)


async def load_authority(cluster: Updater, service: ServiceName, now: datetime) -> Authority:
    """Reads the authority in the service's Secret; an empty Secret gets a new one. Raises BadSecret and ApiError.

    The chart creates the Secret: RBAC can limit `update` to one name, but not `create`. Two operators that start at
    once end up with the same authority: the second finds the Secret changed and reads it again.
    """
    where = f"Secret {service.namespace}/{service.secret_name}"
    try:
        secret = await cluster.get(SECRETS, service.namespace, service.secret_name)
        if not secret.get("data") and not secret.get("immutable"):
            secret = await _fill(cluster, secret, new_authority(f"{service.name}.{service.namespace}", now).pem)
    except NotFound:
        raise BadSecret(f"{where} is missing; run `helm upgrade` to create it, then restart the operator") from None
    data = secret.get("data") or {}
    try:
        return read_authority(KeyPair(_decode(data, CA_CERTIFICATE_KEY), _decode(data, _PRIVATE_KEY)), now)
    except BadAuthority as error:
        raise BadSecret(
            f"{where}: {error}; delete it, run `helm upgrade` and restart the operator, which then makes a new"
            " authority (gangs that run at that time cannot report until their next attempt)"
        ) from None


async def _fill(cluster: Updater, empty: Object, pem: KeyPair) -> Object:
    data = {
        CA_CERTIFICATE_KEY: base64.b64encode(pem.certificate).decode(),
        _PRIVATE_KEY: base64.b64encode(pem.key).decode(),
    }
    metadata = empty["metadata"]
    try:
        return await cluster.update({**empty, "kind": SECRETS.kind, "immutable": True, "data": data})
    except Conflict:
        return await cluster.get(SECRETS, metadata["namespace"], metadata["name"])


def _decode(data: dict[str, Any], key: str) -> bytes:
    try:
        return base64.b64decode(data[key], validate=True)
    except (KeyError, TypeError, binascii.Error):
        raise BadAuthority(f"no key {key}") from None


def server_certificate(authority: Authority, dns_names: tuple[str, ...], now: datetime) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    issuer_key = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        _unsigned(_x509_name("progress service"), authority.certificate.subject, key, now, SERVER_LIFETIME)
        .add_extension(x509.SubjectAlternativeName(map(x509.DNSName, dns_names)), critical=True)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return _pem(certificate, key)


@contextlib.asynccontextmanager
async def server_tls(
    authority: Authority, dns_names: tuple[str, ...], clock: Callable[[], datetime]
) -> AsyncIterator[ssl.SSLContext]:
    """Yields a context for servers of these names; connections after a renewal use the new certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def certify() -> None:
        pair = server_certificate(authority, dns_names, clock())
        with _path_to(pair.certificate) as certificate, _path_to(pair.key) as key:
            context.load_cert_chain(certificate, key)

    async def renew() -> None:
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            certify()

    certify()
    renewal = asyncio.create_task(renew(), name="certificate renewal")
    try:
        yield context
    finally:
        renewal.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await renewal


@contextlib.contextmanager
def _path_to(content: bytes) -> Iterator[str]:
    """Yields a path from which the content can be read once. OpenSSL only takes files, and the key must not be on a
    disk. A pipe holds a certificate or a key (1 kB) without a reader."""
    reading, writing = os.pipe()
    try:
        os.write(writing, content)
        os.close(writing)
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + lifetime)
        # RFC 5280 4.2.1: strict verifiers require it (ssl.VERIFY_X509_STRICT, the default of Python 3.13).
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _x509_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return KeyPair(
        certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(serialization.Encoding.PEM, *private)
    )
