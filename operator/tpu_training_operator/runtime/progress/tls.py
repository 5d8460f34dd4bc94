"""The server's side of TLS: one context, with a certificate that is renewed while the process runs. Used by `main`."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime

from tpu_training_operator.runtime.progress.certificates import Authority, server_certificate

# A twelfth of its life, so that no outage of ours lets it expire.
_RENEW_SECONDS = 30 * 86400.0


@contextlib.asynccontextmanager
async def server_tls(
    authority: Authority, dns_names: tuple[str, ...], clock: Callable[[], datetime]
) -> AsyncIterator[ssl.SSLContext]:
    """A context for servers of these names; connections made after a renewal see the new certificate."""
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
    """A path that reads as the content, once: OpenSSL takes files only, and the key belongs on no disk. A pipe holds a
    certificate or a key (1 kB) without a reader."""
    reading, writing = os.pipe()
    try:
        os.write(writing, content)
        os.close(writing)
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)
