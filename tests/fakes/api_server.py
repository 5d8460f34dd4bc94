"""A scripted API server on loopback, for answers that a real one gives only in bad times."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.client import Configuration

from tpu_training_operator.kube.cluster import Object
from tpu_training_operator.kube.credentials import Credentials

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Call:
    """One request as the server received it."""

    method: str
    path: str
    query: dict[str, str]
    body: Any
    authorization: str | None


@dataclass
class ApiServer:
    """Gives the scripted answers in order and then repeats the last one; records the calls."""

    answers: list[Answer] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        body = json.loads(text) if text else None
        token = request.headers.get("Authorization")
        self.calls.append(Call(request.method, request.path, dict(request.query), body, token))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(request)


def says(status: int, body: Object, **headers: str) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return answer


def status(code: int, reason: str, message: str, **headers: str) -> web.Response:
    body = {"kind": "Status", "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code, headers=headers)


def refuses(code: int, reason: str = "", message: str = "", **headers: str) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return status(code, reason, message, **headers)

    return answer


def answers_in_plain_text(status: int, text: str, content_type: str = "text/html") -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text, content_type=content_type)

    return answer


async def hangs_up(request: web.Request) -> web.StreamResponse:
    request.transport.abort()
    return web.Response()


@asynccontextmanager
async def serve(server: ApiServer) -> AsyncIterator[ApiServer]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app, host="127.0.0.1") as started:
        server.url = str(started.make_url("/"))
        yield server


def credentials_for(url: str) -> Credentials:
    configuration = Configuration()
    configuration.host = url
    # Reading the system's certificates would take each client 30 ms.
    configuration.verify_ssl = False
    return Credentials(configuration)
