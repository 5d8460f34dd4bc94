"""Certificates: an authority of our own, and the server's, issued by it.

Only what must last is made here: ten years for the authority (kept by `authority`), since the workers of an attempt
trust it for as long as they run; a year for the server, whose key never leaves the process.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LIFETIME = timedelta(days=3652)
SERVER_LIFETIME = timedelta(days=365)
# The nodes' clocks may be behind ours.
_BACKDATED = timedelta(hours=1)


class BadAuthority(Exception):
    """These bytes are no authority that we can use; the message says why."""


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
        return KeyPair(self.certificate.public_bytes(serialization.Encoding.PEM), _pem(self.key))


def new_authority(name: str, now: datetime) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _named(name)
    certificate = (
        _unsigned(subject, subject, key, now, AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def read_authority(pem: KeyPair, now: datetime) -> Authority:
    """What `new_authority` made. Raises BadAuthority for anything else, and for one that a server's certificate, made
    now, would outlive."""
    try:
        certificate = x509.load_pem_x509_certificate(pem.certificate)
        key = serialization.load_pem_private_key(pem.key, password=None)
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        certificate.verify_directly_issued_by(certificate)
    except Exception as error:
        # The library has one of its own for each thing that may be wrong with somebody else's bytes.
        raise BadAuthority(f"no certificate of an authority with its key: {error or type(error).__name__}") from None
    if not constraints.ca or not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadAuthority("no certificate of an authority with an elliptic curve's key")
    if key.public_key() != certificate.public_key():
        raise BadAuthority("the key is not that of the certificate")
    if certificate.not_valid_after_utc < now + SERVER_LIFETIME:
        raise BadAuthority(f"the certificate ends on {certificate.not_valid_after_utc:%Y-%m-%d}")
    return Authority(certificate, key)


def server_certificate(authority: Authority, dns_names: tuple[str, ...], now: datetime) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    issuer_key = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        _unsigned(_named("progress service"), authority.certificate.subject, key, now, SERVER_LIFETIME)
        .add_extension(x509.SubjectAlternativeName(map(x509.DNSName, dns_names)), critical=True)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


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
        # RFC 5280 4.2.1: what a strict verifier (ssl.VERIFY_X509_STRICT, Python 3.13's default) wants to see.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _named(name: str) -> x509.Name:
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


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
