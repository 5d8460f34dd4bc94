"""A real Kubernetes control plane on this machine: etcd, API server, controller manager, scheduler.

Use it from a fixture or a Python prompt: `with ControlPlane() as cluster: ...`. It has no nodes; `kwok` adds
simulated ones, and `nodes` builds a cluster of real ones around it.
"""

import base64
import json
import os
import secrets
import subprocess
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path
from typing import Self

from tests.cluster import binaries, directories, health, packages, pki
from tests.cluster.api import TIMEOUT_SECONDS, ApiClient, ApiError, Object, answers_ok
from tests.cluster.deadlines import deadline
from tests.cluster.ports import LOOPBACK, free_port
from tests.cluster.processes import Child, Children, wait_until

SERVICE_CIDR = "10.96.0.0/16"
# The API server's own Service, `kubernetes`, gets the first address.
API_SERVICE_ADDRESS = str(IPv4Network(SERVICE_CIDR)[1])
START_SECONDS = 60.0
# With clients connected, an API server takes 60 s to end after SIGTERM. Its state is in etcd, so a kill loses
# nothing.
STOP_GRACE_SECONDS = 1.0
TOKEN_SECONDS = 24 * 3600
# Percent by which a program's heap grows before Go looks for garbage. At Go's own 100, a tenth of all CPU time of a
# control plane is spent on saving 400 MB.
COLLECTS_GARBAGE_AT = "400"

ESTABLISHED_SECONDS = 60.0

CONTROLLER_MANAGER, SCHEDULER = "kube-controller-manager", "kube-scheduler"
# Children without which no test can pass, where they have been started.
ESSENTIAL = {"etcd", "kube-apiserver", CONTROLLER_MANAGER, SCHEDULER, "kwok", "coredns"}

API_SERVER_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")

# user name -> groups; each user gets a token in the API server's token file.
USERS = {
    "admin": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
    "kwok": "system:masters",
}


class KubectlError(Exception):
    """kubectl ended with an error; the message holds the command and what it said."""


class ControlPlane:
    """start() returns when the API server is ready and the default service account exists.

    directory: from `directories.create_cluster_directory`; a new one by default. stop() removes it.
    address: the address of this machine where the API server listens. Pods can reach it unless it is loopback.
    users: additional users, each with a token: name -> groups.
    apiserver_flags: additional flags of the API server.
    controller_manager_flags: additional flags of the controller manager.
    """

    def __init__(
        self,
        *,
        directory: Path | None = None,
        address: str = LOOPBACK,
        users: Mapping[str, str] | None = None,
        apiserver_flags: tuple[str, ...] = (),
        controller_manager_flags: tuple[str, ...] = (),
    ) -> None:
        self._own_directory = directory
        self._address = address
        self._users = USERS | dict(users or {})
        self._apiserver_flags = apiserver_flags
        self._controller_manager_flags = controller_manager_flags
        self.children: Children
        self.directory: Path
        self.server: str
        self.ca_file: Path
        self.kubeconfig: Path
        self.api: ApiClient
        self._connections = ExitStack()
        self._etcd: str
        self._healthz: list[str] = []
        self._programs: dict[str, Path]
        self._tokens: dict[str, str]
        self._keys: pki.Keys

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Raises ToolchainMissing or BuildError before anything runs, then ProcessError with the tail of a log."""
        self._programs = binaries.ensure(*binaries.CONTROL_PLANE_PROGRAMS)
        self.directory = self._own_directory or directories.create_cluster_directory()
        # The machine's settings (ETCD_*, KUBECONFIG, ~/.kwok) must not reach the cluster.
        environment = {"PATH": packages.PATH, "HOME": str(self.directory), "GOGC": COLLECTS_GARBAGE_AT}
        self.children = Children(self.directory, environment)
        try:
            self._write_credentials()
            self._start_processes()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.children.stop_all(grace=STOP_GRACE_SECONDS)
        self._connections.close()
        directories.remove_cluster_directory(self.directory)

    def problem(self) -> str | None:
        """Why no test should run here, if so."""
        if ended := ESSENTIAL & self.children.ended():
            return f"{', '.join(sorted(ended))} ended"
        return health.lasting(self._unready) or health.left_over_namespace(self.api) or health.left_over_node(self.api)

    def _unready(self) -> str | None:
        urls = (f"{self.server}/readyz", *self._healthz)
        return next((f"{url} does not answer" for url in urls if not answers_ok(url, self.ca_file)), None)

    def restart_apiserver(self) -> None:
        """Stops the API server and starts it again on the same port; returns when it is ready."""
        self.children.stop("kube-apiserver", grace=STOP_GRACE_SECONDS)
        self._start_apiserver()
        # Each backs off on its own, for longer after each restart; one after the other they took two minutes.
        for client in (CONTROLLER_MANAGER, SCHEDULER):
            self.children.start_again(client, grace=STOP_GRACE_SECONDS)

    def erase(self, kind: str, namespace: str, name: str) -> None:
        """Removes an object from etcd behind the API server's back. `kind`: as in "pods".

        Watches see it gone and never saw it stop, while even a forced deletion first writes when it began. Raises
        LookupError.
        """
        key = base64.b64encode(f"/registry/{kind}/{namespace}/{name}".encode()).decode()
        request = urllib.request.Request(f"{self._etcd}/v3/kv/deleterange", json.dumps({"key": key}).encode())
        with urllib.request.urlopen(request, timeout=deadline(TIMEOUT_SECONDS)) as answer:
            if "deleted" not in json.load(answer):
                raise LookupError(f"no {namespace}/{name} among the {kind}")

    def kubectl(
        self,
        *args: str,
        input: str | None = None,  # noqa: A002 - named as in subprocess.run
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs kubectl as admin. With `check`, raises KubectlError when it ends with an error."""
        command = [str(self._programs["kubectl"]), f"--kubeconfig={self.kubeconfig}", *args]
        environment = {"PATH": os.defpath, "HOME": str(self.directory), "KUBERC": "off"}
        done = subprocess.run(command, input=input, env=environment, capture_output=True, text=True, check=False)
        if check and done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done

    def wait_established(self, *definitions: str) -> None:
        """Waits until the API server serves these custom resources, named like jobs.example.org.

        `kubectl wait` fails on a definition that is too new to have conditions.
        """
        for name in definitions:
            wait_until(lambda name=name: self._is_established(name), timeout=ESTABLISHED_SECONDS, what=f"{name} served")

    def _is_established(self, definition: str) -> bool:
        found = self.api.call("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition}")
        conditions = found.get("status", {}).get("conditions") or ()
        return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """A kubeconfig that acts as the service account."""
        return self._write_kubeconfig(f"{namespace}.{name}", self.service_account_token(namespace, name))

    def service_account_token(self, namespace: str, name: str, **spec: Object) -> str:
        """A token from the TokenRequest API, whose spec may have more."""
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": TOKEN_SECONDS} | spec,
        }
        answer = self.api.call("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", request)
        return str(answer["status"]["token"])

    def user_kubeconfig(self, user: str) -> Path:
        """The kubeconfig of one of USERS or of the additional users."""
        return self._write_kubeconfig(user, self._tokens[user])

    def _write_credentials(self) -> None:
        addresses = sorted({LOOPBACK, self._address, API_SERVICE_ADDRESS})
        names = (*(f"IP:{address}" for address in addresses), *(f"DNS:{name}" for name in API_SERVER_NAMES))
        self._keys = pki.issue(self.directory, names=names)
        self._tokens = {user: secrets.token_hex(16) for user in self._users}
        lines = [f'{self._tokens[user]},{user},{user},"{groups}"\n' for user, groups in self._users.items()]
        (self.directory / "tokens.csv").write_text("".join(lines))
        self.ca_file = self._keys.ca
        self.server = f"https://{self._address}:{free_port()}"
        self.kubeconfig = self.user_kubeconfig("admin")
        self.api = ApiClient(self.server, self.ca_file, self._tokens["admin"])
        self._connections.callback(self.api.close)

    def _write_kubeconfig(self, user: str, token: str) -> Path:
        path = self.directory / f"{user.replace(':', '.')}.kubeconfig"
        config: Object = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": self.server, "certificate-authority": str(self.ca_file)},
                }
            ],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }
        path.write_text(json.dumps(config))  # JSON is YAML
        return path

    def _start_processes(self) -> None:
        self._start_etcd()
        self._start_apiserver()
        clients = (
            self._start_client(
                CONTROLLER_MANAGER,
                "--use-service-account-credentials",
                f"--service-account-private-key-file={self._keys.service_account_key}",
                f"--root-ca-file={self.ca_file}",
                *self._controller_manager_flags,
            ),
            self._start_client(SCHEDULER),
        )
        for child, healthz in clients:
            self._healthz.append(healthz)
            child.wait_ready(partial(answers_ok, healthz, self.ca_file), timeout=START_SECONDS)
        wait_until(
            self._default_service_account_exists,
            timeout=START_SECONDS,
            what="the service account default/default exists",
        )

    def _start_etcd(self) -> None:
        client, peer = (f"http://{LOOPBACK}:{free_port()}" for _ in range(2))
        self._etcd = client
        etcd = self.children.start(
            "etcd",
            self._programs["etcd"],
            f"--data-dir={self.directory / 'etcd'}",
            # A test cluster need not survive a power cut.
            "--unsafe-no-fsync",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )
        etcd.wait_ready(lambda: answers_ok(f"{client}/readyz"), timeout=START_SECONDS)

    def _start_apiserver(self) -> None:
        port = self.server.rpartition(":")[2]
        apiserver = self.children.start(
            "kube-apiserver",
            self._programs["kube-apiserver"],
            f"--etcd-servers={self._etcd}",
            f"--bind-address={self._address}",
            f"--secure-port={port}",
            f"--advertise-address={self._address}",
            # The endpoint of the Service `kubernetes` cannot be 127.0.0.1; a loopback cluster has no real pods.
            f"--endpoint-reconciler-type={'none' if self._address == LOOPBACK else 'lease'}",
            "--kubelet-preferred-address-types=InternalIP",
            # Each namespace's Pod Security level decides what its pods may do.
            "--allow-privileged=true",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            f"--tls-cert-file={self._keys.serving_certificate}",
            f"--tls-private-key-file={self._keys.serving_key}",
            f"--token-auth-file={self.directory / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self._keys.service_account_public_key}",
            f"--service-account-signing-key-file={self._keys.service_account_key}",
            *self._apiserver_flags,
        )
        apiserver.wait_ready(lambda: answers_ok(f"{self.server}/readyz", self.ca_file), timeout=START_SECONDS)

    def _start_client(self, name: str, *flags: str) -> tuple[Child, str]:
        """Starts the controller manager or the scheduler; returns it with its health URL."""
        port = free_port()
        kubeconfig = self.user_kubeconfig(f"system:{name}")
        child = self.children.start(
            name,
            self._programs[name],
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--bind-address={LOOPBACK}",
            f"--secure-port={port}",
            f"--tls-cert-file={self._keys.serving_certificate}",
            f"--tls-private-key-file={self._keys.serving_key}",
            # There is one of each, and losing its lease while the API server restarts would end it.
            "--leader-elect=false",
            # The defaults are 20 and 50 a second: the first slows the start down by seconds, and at the second
            # the scheduler could not bind 1024 pods in less than 20 s.
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
            *flags,
        )
        return child, f"https://{LOOPBACK}:{port}/healthz"

    def _default_service_account_exists(self) -> bool:
        try:
            self.api.call("GET", "/api/v1/namespaces/default/serviceaccounts/default")
        except ApiError:
            return False
        return True
