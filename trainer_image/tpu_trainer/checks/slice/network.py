"""Whether every worker finds and reaches every other one, and whether their clocks agree.

Each host listens on the ports that its libraries will use and on one of the system's choice, as gloo does, and answers
with its number and its time. So a NetworkPolicy, a firewall or a stale name shows as a pair of hosts and a port, and
not as a time-out of the first collective.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median_low
from typing import TYPE_CHECKING, Any

from tpu_contract.run_spec import RunSpec
from tpu_contract.slice_check import SliceCheckLine, SliceSection
from tpu_trainer.checks.slice.lines import TIME_IS_OVER, CheckedHost, judge, pod_of
from tpu_trainer.contract.errors import PeerLostError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_NETWORK = SliceSection.NETWORK
MOST_SKEW_SECONDS = 1.0
ANY_PORT = 0
"""A port of the system's choice: those of gloo's connections."""

_MEETING_SECONDS = 300.0
"""How long the hosts wait for what one of them finds out."""

_CONNECT_SECONDS, _TRIES, _AT_ONCE = 3.0, 2, 64
# torch_xla numbers its processes' ports from the first one, TorchTPU its slice builders' from the second; the third is
# where TorchTPU's processes compare their programs.
_LIBTPU, _SLICE_BUILDER, _HANDSHAKE = 8476, 8070, 36423


class HostMeeting:
    """Where the hosts exchange what they know, before their devices are opened. `index`: this host."""

    def __init__(self, store: Store | None, spec: RunSpec, index: int) -> None:
        self._store, self._spec, self.index, self._hosts = store, spec, index, range(spec.slice.hosts)

    def leave(self) -> None:
        """Leaves the meeting. Its store ends with host 0, which leaves last."""
        if self._store is not None:
            with suppress(RuntimeError):
                if self._store.add("left", 1) == len(self._hosts):
                    self._store.set("empty", "")
                if self.index == 0:
                    self._store.wait(["empty"], timedelta(seconds=_MEETING_SECONDS))
        self._store = None

    def exchange(self, name: str, value: Any, combine: Callable[[list[Any]], Any] = lambda values: values) -> Any:
        """Returns what host 0 makes of all hosts' values, in their order: the values themselves, or `combine` of them.
        So host 0 alone reads what each host has to say.

        Raises:
            PeerLostError: a host gives none, or host 0 has gone.
        """
        store, absent = self._store, [0]
        if store is None:
            return combine([value])
        with suppress(RuntimeError):
            store.set(f"{name}/{self.index}", json.dumps(value))
            if self.index == 0:
                until = time.monotonic() + _MEETING_SECONDS
                keys = [f"{name}/{index}" for index in self._hosts]
                missing = [index for index in self._hosts if not _has_come(store, keys[index], until)]
                found = None if missing else combine([json.loads(store.get(key)) for key in keys])
                store.set(name, json.dumps([missing, found]))
            store.wait([name], timedelta(seconds=3 * _MEETING_SECONDS))
            absent, combined = json.loads(store.get(name))
            if not absent:
                return combined
        pods = ", ".join(pod_of(self._spec, index) for index in absent)
        raise PeerLostError(f"slice check: {pods} gave no {name} within {_MEETING_SECONDS:.0f} s", absent=absent)


def _has_come(store: Store, key: str, until: float) -> bool:
    with suppress(RuntimeError):
        # Less than a millisecond would be no limit.
        if (left := until - time.monotonic()) > 0.001:
            store.wait([key], timedelta(seconds=left))
        return bool(store.check([key]))
    return False


@dataclass(frozen=True)
class HostReport:
    """Holds what a host found. unreachable: host, port and reason. untried: calls for which there was no time. ahead:
    by how many seconds host 0's clock is ahead of this host's, give or take `doubt`."""

    unreachable: Sequence[tuple[int, int, str]] = ()
    untried: int = 0
    ahead: float = 0.0
    doubt: float = 0.0


def used_ports(spec: RunSpec, index: int) -> list[int]:
    """Returns the ports on which the libraries of host `index` listen, besides the store's, by which all have come."""
    if spec.hardware != "TPU":
        return [ANY_PORT]
    if spec.backend == "torch":
        count = spec.torch.processes_per_host
        ports = [*range(_SLICE_BUILDER, _SLICE_BUILDER + count), _HANDSHAKE]
    else:
        count = 1 if spec.backend == "xla-spmd" else spec.slice.replicas // spec.slice.hosts
        ports = list(range(_LIBTPU, _LIBTPU + count))
    return [ANY_PORT, *ports, *([8080] if spec.slice.slices > 1 and index == 0 else [])]


def check_network(
    meeting: HostMeeting, hosts: Sequence[CheckedHost], ports: Sequence[int], until: float
) -> Iterator[SliceCheckLine]:
    """Yields this host's lines. A meeting of all hosts. ports: those on which this host will listen. until: the moment
    after which nobody is called any more."""
    me, listening = hosts[meeting.index], {}
    with ExitStack() as answering:
        for port in ports:
            try:
                listening[str(port)] = answering.enter_context(closing(_Answering(me, port))).port
            except OSError as error:
                advice = "end what listens there, or leave trainer.hostNetwork out"
                yield judge(_NETWORK, f"port {port}", False, f"cannot listen: {error.strerror}", "free", advice)
        listened = meeting.exchange("ports", listening)
        # Each host begins with the one after it, so that they do not all call the same one.
        others = (*hosts[me.index + 1 :], *hosts[: me.index])
        report = _reach_all([(host, listened[host.index]) for host in others], until)
        reports = [HostReport(**report) for report in meeting.exchange("reached", asdict(report))]
    yield from judge_network(me, hosts, reports)


def judge_network(
    me: CheckedHost, hosts: Sequence[CheckedHost], reports: Sequence[HostReport]
) -> Iterator[SliceCheckLine]:
    """Judges what all hosts have found, as host `me` sees it.

    A pair of hosts that do not reach each other is charged to the one that is in more such pairs, and to the one that
    was called if both are in as many. A clock is compared with the median of all hosts'.
    """
    pairs = [(caller, *call) for caller, report in enumerate(reports) for call in report.unreachable]
    times = Counter(host for caller, called, _, _ in pairs for host in {caller, called})
    mine = [pair for pair in pairs if (pair[0] if times[pair[0]] > times[pair[1]] else pair[1]) == me.index]
    texts = [
        f"{hosts[caller].pod} cannot reach {hosts[called].pod} at {f'port {port}' if port else 'any port'}: {reason}"
        for caller, called, port, reason in mine
    ]
    advice = "let the pods of a job reach each other on all ports: look for a NetworkPolicy or a firewall"
    measured = "; ".join(texts) if texts else f"{len(reports)} hosts"
    good: bool | None = not texts
    if good and (untried := reports[me.index].untried):
        good, measured, advice = None, f"{untried} calls were not made", TIME_IS_OVER
    yield judge(_NETWORK, "names and ports", good, measured, "every host reaches every other", advice)
    ahead = [report.ahead for report in reports]
    skew, doubt = median_low(ahead) - ahead[me.index], reports[me.index].doubt
    advice = "have the node's clock set: it must follow the metadata server's (chrony)"
    good = abs(skew) - doubt <= MOST_SKEW_SECONDS
    yield judge(_NETWORK, "clock", good, f"{skew:+.3f} s", f"within {MOST_SKEW_SECONDS:g} s", advice, abs(skew), "s")


def _reach_all(peers: Sequence[tuple[CheckedHost, Mapping[str, int]]], until: float) -> HostReport:
    calls = [(peer, int(port), actual) for peer, ports in peers for port, actual in ports.items()]
    unreachable, clocks, untried = [], [(0.0, 0.0)], 0
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(lambda call: _call(call[0], call[2]) if time.monotonic() < until else None, calls)
        for (peer, port, _), answer in zip(calls, answers, strict=True):
            if answer is None:
                untried += 1
            elif isinstance(answer, str):
                unreachable.append((peer.index, port, answer))
            elif peer.index == 0:
                clocks.append(answer)
    # The quickest answer says most about the clock. Host 0 has none of its own.
    ahead, doubt = min(clocks[1:] or clocks, key=lambda clock: clock[1])
    return HostReport(unreachable, untried, ahead, doubt)


def _call(peer: CheckedHost, port: int) -> tuple[float, float] | str:
    """Returns by how much the peer's clock is ahead and the doubt about it; or why there was no answer."""
    reason = ""
    for _ in range(_TRIES):
        try:
            began = time.time()
            with socket.create_connection((peer.name, port), timeout=_CONNECT_SECONDS) as connection:
                index, moment = connection.makefile("rb").readline(64).split()
            ended = time.time()
            if int(index) != peer.index:
                return f"{peer.name} is host {int(index)}"
            return float(moment) - (began + ended) / 2, (ended - began) / 2
        except OSError as error:
            reason = f"{peer.name}: {error.strerror or error}"
        except ValueError:
            reason = f"{peer.name} has no answer of this check"
    return reason


class _Answering:
    """Answers every connection to a port with this host's number and time until it is closed."""

    def __init__(self, me: CheckedHost, port: int) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
        self._me, self.port = me, int(self._listener.getsockname()[1])
        threading.Thread(target=self._answer, daemon=True).start()

    def close(self) -> None:
        # A thread that accepts keeps the port until it is woken.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _answer(self) -> None:
        with suppress(OSError):
            while True:
                guest, _ = self._listener.accept()
                threading.Thread(target=self._greet, args=(guest,), daemon=True).start()

    def _greet(self, guest: socket.socket) -> None:
        """Answers, and lets the guest close first: whoever does keeps its port busy for a minute, and libtpu needs
        this one at once."""
        with suppress(OSError), guest:
            guest.settimeout(_CONNECT_SECONDS)
            guest.sendall(f"{self._me.index} {time.time():.6f}\n".encode())
            guest.recv(1)
