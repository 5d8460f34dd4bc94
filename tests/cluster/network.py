"""The network of a cluster's nodes: one bridge on this machine, a cable to each node, routes to each node's pods.

A cluster takes one free /16 of 10.0.0.0/8, so that it collides neither with another test cluster nor with a network
that the machine already has:

    10.S.255.1        this machine: API server and DNS
    10.S.255.10 + i   node i
    10.S.i.0/24       the pods of node i, reached through it from this machine and from the other nodes

Everything else (the pods' bridge, kube-proxy's rules) is inside the nodes' network namespaces and ends with them.
"""

import ipaddress
import json
import subprocess
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from tests.cluster import packages

# Many Kubernetes tools use 10.244 for pods; 10.96 is SERVICE_CIDR.
CANDIDATES = tuple(IPv4Network(f"10.{second}.0.0/16") for second in (*range(244, 255), *range(128, 244)))
INTERFACES = Path("/sys/class/net")
MAX_NODES = 100
FIRST_NODE = 10


class NetworkError(Exception):
    """`ip` failed, or no subnet is free; the message says which."""


@dataclass(frozen=True)
class Network:
    """`bridge`: the interface's name. `subnet`: the cluster's /16."""

    bridge: str
    subnet: IPv4Network

    @property
    def machine(self) -> IPv4Address:
        """This machine, as the nodes and pods see it."""
        return self.subnet[255 * 256 + 1]

    def node(self, index: int) -> IPv4Address:
        return self.subnet[255 * 256 + FIRST_NODE + index]

    def pods(self, index: int) -> IPv4Network:
        return IPv4Network((int(self.subnet.network_address) + index * 256, 24))


def bridge_name(cluster_directory: Path) -> str:
    """At most 12 characters, which leaves three for the name of a node's cable (IFNAMSIZ: 15)."""
    return f"tpu-{cluster_directory.name[-8:]}"


def create(bridge: str) -> Network:
    """Makes the bridge with this machine's address. Hold a lock: two runs must not choose at the same time.

    Raises NetworkError when no subnet is free.
    """
    network = Network(bridge, free_subnet(_routed()))
    _ip(
        f"link add {bridge} type bridge",
        f"address add {network.machine}/24 dev {bridge}",
        f"link set {bridge} up",
    )
    return network


def free_subnet(routed: list[IPv4Network]) -> IPv4Network:
    """The first candidate that no route of the machine touches. Raises NetworkError when there is none."""
    for candidate in CANDIDATES:
        if not any(candidate.overlaps(network) for network in routed):
            return candidate
    raise NetworkError("every /16 of 10.128.0.0/9 is routed on this machine; the nodes need a free one")


def connect(network: Network, index: int, count: int, pid: int) -> None:
    """Gives the network namespace of process `pid` its interface eth0 as node `index` of `count`."""
    cable = f"{network.bridge}-{index}"
    # The kernel removes the cable of a node that ended some time after its namespace.
    _delete(cable)
    _ip(
        f"link add {cable} type veth peer name eth0 netns {pid}",
        f"link set {cable} master {network.bridge} up",
        f"route replace {network.pods(index)} via {network.node(index)} dev {network.bridge}",
    )
    others = [other for other in range(count) if other != index]
    _ip(
        "link set lo up",
        f"address add {network.node(index)}/24 dev eth0",
        "link set eth0 up",
        f"route add default via {network.machine}",
        *(f"route add {network.pods(other)} via {network.node(other)}" for other in others),
        pid=pid,
    )


def remove(bridge: str) -> None:
    """Deletes the bridge with its routes, and any cables of killed nodes that the kernel has not removed yet."""
    for name in sorted(path.name for path in (*INTERFACES.glob(bridge), *INTERFACES.glob(f"{bridge}-*"))):
        _delete(name)


def pod_network(network: Network, index: int) -> dict[str, object]:
    """The CNI configuration list of node `index`: a bridge inside the node, addresses from its /24."""
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    # In the node's own /run: a node that starts again has no pods.
                    "dataDir": "/run/cni",
                    "ranges": [[{"subnet": str(network.pods(index))}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _delete(name: str) -> None:
    """Deletes the interface unless there is none."""
    if (INTERFACES / name).exists():
        try:
            _ip(f"link delete {name}")
        except NetworkError:
            if (INTERFACES / name).exists():
                raise


def _routed() -> list[IPv4Network]:
    command = [str(packages.find("ip")), "-json", "-4", "route", "show", "table", "all"]
    routes = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return [ipaddress.IPv4Network(route["dst"]) for route in routes if route["dst"] != "default"]


def _ip(*commands: str, pid: int | None = None) -> None:
    """Runs `ip` commands, in the network namespace of `pid` if given. Raises NetworkError at the first failure."""
    inside = ["nsenter", f"--net=/proc/{pid}/ns/net"] if pid is not None else []
    done = subprocess.run(
        [*inside, str(packages.find("ip")), "-batch", "-"],
        input="\n".join(commands),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise NetworkError(f"ip {'; '.join(commands)}: {done.stderr.strip()}")
