"""kopf watches the jobs of one namespace or of all, and fills the memory of them; this is the only importer of kopf.

kopf calls an event handler for every change. Such a handler needs no finalizer and no annotation, so nothing of kopf's
is written to a job: GitOps tools see no drift, and a job can be deleted while the operator is gone. Every replica of
the operator watches, even one that waits to lead, so that it knows the jobs when its turn comes.

kopf does not say when its first list is complete, nor which objects vanished while a watch was broken, and it ends
after an answer that it does not expect (docs/adr/0001). So this module lists the jobs whenever kopf has opened a watch
after a list, and from time to time; and it starts kopf again, with a pause, once a list shows that the API server
answers.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import kopf

from tpu_training_operator.api.constants import GROUP, VERSION
from tpu_training_operator.api.replace import replace
from tpu_training_operator.kube import informer
from tpu_training_operator.kube.client import Client, Selection
from tpu_training_operator.kube.cluster import JOBS
from tpu_training_operator.kube.credentials import Credentials
from tpu_training_operator.kube.errors import Silence, Unavailable
from tpu_training_operator.kube.informer import Informer
from tpu_training_operator.kube.replica import Change
from tpu_training_operator.kube.watch_session import watch_session
from tpu_training_operator.runtime.records import JobRecord, KnownJobs, keep_job
from tpu_training_operator.runtime.resync import RESYNC_SECONDS

# The API server ends each watch after the first of these, kopf one that is silent after the second, and this module
# starts kopf again after the third without any answer.
_WATCH_SECONDS = 50
_SILENT_WATCH_SECONDS = 60.0
_SILENT_KOPF_SECONDS = 90.0
# Jobs per page: users decide how large they are, and kopf parses a page at once.
_PAGE = 10
# Between kopf's tries of one request, in seconds; then it ends.
_BACKOFFS = (1.0, 2.0, 4.0)
_STOP_SECONDS = 3.0


class JobWatch(Informer[JobRecord]):
    """`known`: the jobs. `on_change` is called for every change of one. `has_listed`: they have been complete once.

    `claim_signals` is called after each start of kopf, which claims SIGTERM and SIGINT for itself.
    """

    def __init__(
        self,
        client: Client,
        credentials: Credentials,
        namespace: str | None,
        claim_signals: Callable[[], None] = lambda: None,
    ) -> None:
        self.known = KnownJobs()
        self.on_change: Callable[[Change[JobRecord]], None] = lambda change: None
        self.has_listed = asyncio.Event()
        super().__init__(
            client,
            Selection(JOBS, namespace),
            keep_job,
            replica=self.known,
            changed=lambda change: self.on_change(change),
            is_patient=True,
        )
        self._credentials = credentials
        self._namespace = namespace
        self._claim_signals = claim_signals
        self._list_is_due = asyncio.Event()
        self._list_ended = asyncio.Event()
        self._kopf_lists = False
        self._answered_at = 0.0
        self._pause_of_kopf = informer.FIRST_PAUSE

    async def run(self) -> None:
        """Runs until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().run())
            tasks.create_task(self._keep_kopf_running())

    async def _follow(self) -> None:
        self._list_is_due.clear()
        await self._list()
        self.has_listed.set()
        self._list_ended.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESYNC_SECONDS):
                await self._list_is_due.wait()

    async def _keep_kopf_running(self) -> None:
        while True:
            await self._list_ended.wait()
            try:
                await self._run_kopf()
            except Exception as error:
                self._note_failure(
                    Unavailable(0, "NoWatch", getattr(error, "message", None) or str(error) or repr(error))
                )
            self._list_ended.clear()
            await asyncio.sleep(self._pause_of_kopf)
            self._pause_of_kopf = min(2 * self._pause_of_kopf, informer.LONGEST_PAUSE)
            self._list_is_due.set()

    async def _run_kopf(self) -> None:
        """Runs kopf until it ends. Raises its error, or Silence."""
        registry = kopf.OperatorRegistry()
        path = JOBS.path(self._namespace)
        async with watch_session(self._credentials, path, self._answered) as session:

            async def log_in(**_: Any) -> kopf.AiohttpSession:
                return kopf.AiohttpSession(server=self._credentials.server, aiohttp_session=session)

            kopf.on.login(registry=registry)(log_in)
            kopf.on.event(GROUP, VERSION, JOBS.plural, registry=registry)(self._take)
            self._answered_at, self._kopf_lists = time.monotonic(), True
            tasks = await kopf.spawn_tasks(
                registry=registry,
                settings=_settings(),
                # Another kopf operator in the cluster would pause this one otherwise.
                standalone=True,
                clusterwide=self._namespace is None,
                namespaces=() if self._namespace is None else (self._namespace,),
            )
            self._claim_signals()
            try:
                await self._until_it_ends(set(tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=_STOP_SECONDS)

    async def _until_it_ends(self, tasks: set["asyncio.Task[Any]"]) -> None:
        while (left := self._answered_at + _SILENT_KOPF_SECONDS - time.monotonic()) > 0:
            ended, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
            if ended:
                raise Unavailable(0, "NoWatch", "kopf has ended")
        raise Silence(0, "Silence", f"kopf has had no answer for {_SILENT_KOPF_SECONDS:g} s")

    def _answered(self, is_watch: bool) -> None:
        self._answered_at = time.monotonic()
        if not is_watch:
            self._kopf_lists = True
        else:
            self._pause_of_kopf = informer.FIRST_PAUSE
            self._note_success()
            if self._kopf_lists:
                self._kopf_lists = False
                self._list_is_due.set()

    async def _take(self, event: kopf.RawEvent, **_: Any) -> None:
        version = self._read_version(dict(event["object"]))
        if version is not None:
            if event["type"] == "ADDED" and version.record is not None:
                version = replace(version, record=replace(version.record, is_as_created=True))
            is_deletion = event["type"] == "DELETED"
            self._report(
                (self.replica.apply_streamed_deletion if is_deletion else self.replica.apply_streamed_change)(version)
            )


class _NoDiffs(kopf.DiffBaseStorage):
    """Keeps no earlier version of a job: event handlers need none, and kopf would copy each job three times."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    # No finalizer can have this name, so kopf never finds its own on a job and never removes it.
    settings.persistence.finalizer = "/"
    settings.persistence.diffbase_storage = _NoDiffs()
    # Watching definitions and namespaces would need rights to them.
    settings.scanning.disabled = True
    settings.watching.server_timeout = _WATCH_SECONDS
    settings.watching.inactivity_timeout = _SILENT_WATCH_SECONDS
    settings.watching.chunk_size = _PAGE
    # kopf's worker keeps its object in memory while it waits for more events.
    settings.queueing.idle_timeout = 0.01
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = _BACKOFFS
    settings.process.ultimate_exiting_timeout = None
    return settings


# kopf logs every failed request, and tracebacks; this module logs once what is wrong. Errors of handlers are bugs of
# this module.
logging.getLogger("kopf").setLevel(logging.CRITICAL)
logging.getLogger("kopf.objects").setLevel(logging.ERROR)
