"""A TLS server on loopback that only shakes hands, and what a worker that trusts an authority sees there."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cryptography import x509

from tpu_training_operator.runtime.progress.pki import Authority

LOOPBACK = "127.0.0.1"


def trusting(authority: Authority) -> ssl.SSLContext:
    """A client as strict as Python 3.13's default one, which trusts this authority alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=authority.pem.certificate.decode())
    return context


@asynccontextmanager
async def listening(tls: ssl.SSLContext) -> AsyncIterator[int]:
    """Yields the port."""

    async def leave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(leave, LOOPBACK, 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def certificate_seen(port: int, client: ssl.SSLContext, host: str) -> x509.Certificate:
    """The server's certificate, once the client has found it good for this host. Raises ssl.SSLError."""
    _, writer = await asyncio.open_connection(LOOPBACK, port, ssl=client, server_hostname=host)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return x509.load_der_x509_certificate(der)
