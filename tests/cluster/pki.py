"""The keys of a test cluster: a CA, one serving certificate for all of 127.0.0.1, a service account key pair.

The `openssl` program makes them, since no dependency of the project issues certificates.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import toolchain

# Nothing here outlives a test run; a day leaves room for a debugger.
DAYS = "1"

# RFC 5280 4.2.1: what a strict verifier (ssl.VERIFY_X509_STRICT, Python 3.13's default) requires.
_EXTENSIONS = """\
[ca]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[serving]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""


@dataclass(frozen=True)
class Keys:
    """PEM files. `service_account_*` sign and verify service account tokens."""

    ca: Path
    serving_certificate: Path
    serving_key: Path
    service_account_key: Path
    service_account_public_key: Path


def issue(directory: Path, *, names: tuple[str, ...]) -> Keys:
    """Writes all keys into `directory`.

    names: subject alternative names in OpenSSL's notation, for example "IP:127.0.0.1", "DNS:localhost".
    Raises ToolchainMissing without `openssl`.
    """
    openssl = toolchain.find(
        "openssl", purpose="issue the test cluster's certificates", install="the package `openssl`"
    )
    keys = Keys(
        ca=directory / "ca.crt",
        serving_certificate=directory / "serving.crt",
        serving_key=directory / "serving.key",
        service_account_key=directory / "service-account.key",
        service_account_public_key=directory / "service-account.pub",
    )
    config, ca_key, request = directory / "openssl.cnf", directory / "ca.key", directory / "serving.csr"
    config.write_text(_EXTENSIONS.format(names=", ".join(names)))

    def run(*arguments: str | Path) -> None:
        command = [openssl, *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)

    for key in (ca_key, keys.serving_key, keys.service_account_key):
        run("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key)
    for key, subject, out in (
        (ca_key, "/CN=test-cluster-ca", directory / "ca.csr"),
        (keys.serving_key, "/CN=test-cluster", request),
    ):
        run("req", "-new", "-key", key, "-subj", subject, "-out", out)
    extended = ("-days", DAYS, "-extfile", config)
    run("x509", "-req", "-in", directory / "ca.csr", "-signkey", ca_key,
        *extended, "-extensions", "ca", "-out", keys.ca)  # fmt: skip
    run("x509", "-req", "-in", request, "-CA", keys.ca, "-CAkey", ca_key, "-CAcreateserial",
        *extended, "-extensions", "serving", "-out", keys.serving_certificate)  # fmt: skip
    run("pkey", "-in", keys.service_account_key, "-pubout", "-out", keys.service_account_public_key)
    return keys
