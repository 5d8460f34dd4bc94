"""Whom a worker believes: the server that holds a certificate of the authority, under the Service's names, in time."""

import asyncio
import base64
import os
import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fakes.cluster import FakeCluster
from tests.unit.tls_probe import certificate_seen, listening, trusting
from tpu_training_operator.kube.cluster import SECRETS, Object
from tpu_training_operator.runtime.progress import pki
from tpu_training_operator.runtime.progress.pki import (
    AUTHORITY_LIFETIME,
    SERVER_LIFETIME,
    Authority,
    BadAuthority,
    BadSecret,
    KeyPair,
    ServiceName,
    load_authority,
    new_authority,
    read_authority,
    server_certificate,
    server_tls,
)

SERVICE = ServiceName("operator", "tpu-system")
HOST = "operator.tpu-system.svc"
SECRET = "Secret tpu-system/operator-tls"


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return new_authority("operator.tpu-system", now())


# The Service's name


@pytest.mark.parametrize("text", ["operator.tpu-system", "a.b", "o-1.n-1", "o" * 63 + "." + "1" * 63])
def test_a_service_is_named_with_its_namespace(text: str) -> None:
    name, _, namespace = text.partition(".")
    assert ServiceName.parse(text) == ServiceName(name, namespace)


@pytest.mark.parametrize(
    "text",
    ["", "operator", "operator.", ".tpu-system", "a.b.svc", "Operator.b", "1a.b", "a_b.c", "a-.b", "o" * 64 + ".b"],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"NAME\.NAMESPACE"):
        ServiceName.parse(text)


def test_the_address_and_the_secret_follow_from_the_name() -> None:
    assert SERVICE.url(8443) == "https://operator.tpu-system.svc:8443"
    assert SERVICE.secret_name == "operator-tls"
    assert SERVICE.dns_names == (HOST, "operator.tpu-system.svc.cluster.local", "localhost")


# Certificates


def test_the_authority_lasts_ten_years_and_the_server_one(authority: Authority) -> None:
    moment = now()
    server = x509.load_pem_x509_certificate(server_certificate(authority, SERVICE.dns_names, moment).certificate)
    assert timedelta(days=3650) < AUTHORITY_LIFETIME < timedelta(days=3660)
    assert server.not_valid_after_utc == moment + SERVER_LIFETIME == moment + timedelta(days=365)
    assert server.not_valid_before_utc < moment


def test_an_authority_is_read_as_it_was_written(authority: Authority) -> None:
    read = read_authority(authority.pem, now())
    assert read.pem == authority.pem


def _signed_by_itself(key: Any, *, ca: bool) -> bytes:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "somebody")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now())
        .not_valid_after(now() + AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem(key: Any) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _encrypted(key: Any) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )


EC_KEY, OTHER_KEY = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
RSA_KEY = rsa.generate_private_key(65537, 2048)
STRANGE = {
    "nothing": (KeyPair(b"", b""), "not a CA certificate and its key"),
    "no certificate": (KeyPair(b"hello", _pem(EC_KEY)), "not a CA certificate and its key"),
    "no key": (KeyPair(_signed_by_itself(EC_KEY, ca=True), b"hello"), "not a CA certificate and its key"),
    "a locked key": (KeyPair(_signed_by_itself(EC_KEY, ca=True), _encrypted(EC_KEY)), "not a CA certificate"),
    "another key": (
        KeyPair(_signed_by_itself(EC_KEY, ca=True), _pem(OTHER_KEY)),
        "does not belong to the certificate",
    ),
    "a server's": (
        KeyPair(_signed_by_itself(EC_KEY, ca=False), _pem(EC_KEY)),
        "not a CA certificate with an",
    ),
    "RSA": (KeyPair(_signed_by_itself(RSA_KEY, ca=True), _pem(RSA_KEY)), "with an elliptic curve key"),
    "issued by another": (
        server_certificate(new_authority("somebody", now()), ("localhost",), now()),
        "not a CA certificate and its key",
    ),
}


@pytest.mark.parametrize(("pem", "why"), STRANGE.values(), ids=STRANGE.keys())
def test_anything_but_an_authority_is_refused(pem: KeyPair, why: str) -> None:
    with pytest.raises(BadAuthority, match=why):
        read_authority(pem, now())


# Python is told of what an old certificate may look like.
@pytest.mark.filterwarnings("ignore:Parsed a serial number:UserWarning")
@given(part=st.sampled_from(["certificate", "key"]), at=st.integers(0, 400), value=st.integers(0, 255))
@example(part="certificate", at=12, value=24)  # its version
def test_a_damaged_authority_is_refused_or_still_the_same(authority: Authority, part: str, at: int, value: int) -> None:
    begin, *lines, end = getattr(authority.pem, part).splitlines()
    der = bytearray(base64.b64decode(b"".join(lines)))
    der[at % len(der)] = value
    damaged = replace(authority.pem, **{part: b"\n".join((begin, base64.b64encode(der), end, b""))})
    try:
        read = read_authority(damaged, now())
    except BadAuthority:
        return
    assert read.pem == authority.pem


def test_an_authority_that_expires_before_a_server_certificate_is_refused(authority: Authority) -> None:
    end = authority.certificate.not_valid_after_utc
    assert read_authority(authority.pem, end - SERVER_LIFETIME)
    with pytest.raises(BadAuthority, match=f"expires on {end:%Y-%m-%d}"):
        read_authority(authority.pem, end - SERVER_LIFETIME + timedelta(seconds=1))


# Handshakes


@pytest.mark.parametrize("host", SERVICE.dns_names)
async def test_a_worker_that_trusts_the_authority_trusts_the_server(authority: Authority, host: str) -> None:
    async with server_tls(authority, SERVICE.dns_names, now) as tls, listening(tls) as port:
        seen = await certificate_seen(port, trusting(authority), host)
    assert seen.issuer == authority.certificate.subject


async def test_a_worker_that_trusts_another_authority_of_the_same_name_does_not(authority: Authority) -> None:
    async with server_tls(authority, SERVICE.dns_names, now) as tls, listening(tls) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            await certificate_seen(port, trusting(new_authority("operator.tpu-system", now())), HOST)


@pytest.mark.parametrize("host", ["another.tpu-system.svc", "operator.kube-system.svc", "127.0.0.1"])
async def test_the_certificate_is_valid_only_for_the_services_names(authority: Authority, host: str) -> None:
    async with server_tls(authority, SERVICE.dns_names, now) as tls, listening(tls) as port:
        with pytest.raises(ssl.SSLCertVerificationError, match="certificate is not valid for"):
            await certificate_seen(port, trusting(authority), host)


async def test_an_expired_certificate_is_not_trusted(authority: Authority) -> None:
    def last_year() -> datetime:
        return now() - SERVER_LIFETIME - timedelta(days=1)

    async with server_tls(authority, SERVICE.dns_names, last_year) as tls, listening(tls) as port:
        with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
            await certificate_seen(port, trusting(authority), HOST)


# OpenSSL here may not support the old versions at all, and Python warns about code that requests them.
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_old_versions_of_tls_are_refused(authority: Authority) -> None:
    client = trusting(authority)
    client.set_ciphers("ALL:@SECLEVEL=0")
    client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_1
    async with server_tls(authority, SERVICE.dns_names, now) as tls, listening(tls) as port:
        assert tls.minimum_version == ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await certificate_seen(port, client, HOST)


async def test_the_certificate_is_renewed_while_the_server_runs(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pki, "_RENEW_SECONDS", 0.01)
    async with server_tls(authority, SERVICE.dns_names, now) as tls, listening(tls) as port, asyncio.timeout(30):
        first = await certificate_seen(port, trusting(authority), HOST)
        while (await certificate_seen(port, trusting(authority), HOST)).serial_number == first.serial_number:
            pass


async def test_certificates_leave_nothing_open(authority: Authority) -> None:
    before = len(os.listdir("/dev/fd"))
    async with server_tls(authority, SERVICE.dns_names, now):
        assert len(os.listdir("/dev/fd")) == before


# The Secret


def secret(data: dict[str, Any] | None) -> Object:
    metadata = {"name": "operator-tls", "namespace": SERVICE.namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}


def secret_of(pem: KeyPair) -> Object:
    encoded = {"ca.crt": pem.certificate, "ca.key": pem.key}
    return secret({name: base64.b64encode(content).decode() for name, content in encoded.items()})


async def load(cluster: FakeCluster) -> Authority:
    return await load_authority(cluster, SERVICE, now())


def stored_in(cluster: FakeCluster) -> Object:
    return cluster.body(SECRETS, "operator-tls", SERVICE.namespace)


async def test_an_authority_is_created_once_and_kept() -> None:
    cluster = FakeCluster(secret(None))
    first = await load(cluster)
    assert (await load(cluster)).pem == first.pem
    assert cluster.count()["update Secret"] == 1
    stored = stored_in(cluster)
    assert (stored["immutable"], set(stored["data"])) == (True, {"ca.crt", "ca.key"})


async def test_of_two_operators_that_start_at_once_both_use_the_first_ones(authority: Authority) -> None:
    cluster = FakeCluster(secret(None))

    async def rival() -> None:
        cluster.put(secret_of(authority.pem))

    cluster.hooks["update Secret"] = rival
    assert (await load(cluster)).pem == authority.pem


async def test_a_missing_secret_must_be_created_by_the_chart() -> None:
    with pytest.raises(BadSecret, match=f"{SECRET} is missing; "):
        await load(FakeCluster())


SOMETHING_ELSE: dict[str, dict[str, Any]] = {
    "other keys": {"tls.crt": "aGVsbG8=", "tls.key": "aGVsbG8="},
    "no base64": {"ca.crt": "***", "ca.key": "***"},
    "no text": {"ca.crt": 3, "ca.key": None},
    "no certificate": {"ca.crt": "aGVsbG8=", "ca.key": "aGVsbG8="},
}


@pytest.mark.parametrize("data", SOMETHING_ELSE.values(), ids=SOMETHING_ELSE.keys())
async def test_a_foreign_secret_is_named_and_left_alone(data: dict[str, Any]) -> None:
    cluster = FakeCluster(secret(data))
    before = stored_in(cluster)
    with pytest.raises(BadSecret, match=f"{SECRET}: .*; delete it"):
        await load(cluster)
    assert stored_in(cluster) == before
