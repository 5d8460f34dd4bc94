"""kubelet and kube-proxy inside a node's machine.

Each node has its own address and network, so both use their usual ports.
"""

import json
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

# kubelet renews the node's lease after a quarter of this; the controller manager's patience must be longer.
LEASE_SECONDS = 8

# The longest wait before a container that died is restarted. Kubernetes allows minutes; the tests that keep killing the
# operator need not wait that long.
CRASH_LOOP_SECONDS = 1

# kube-proxy's own default.
PROXY_HEALTH_PORT = 10256


@dataclass(frozen=True)
class NodeSettings:
    """What the two programs need to know about their node. `directory`: the node's own. `cgroup`: the node's root."""

    name: str
    address: IPv4Address
    directory: Path
    cgroup: str
    dns: IPv4Address
    pods: IPv4Network
    containerd_socket: Path
    kubelet_credentials: Path
    proxy_credentials: Path


def kubelet_flags(node: NodeSettings) -> list[str]:
    """Writes kubelet's configuration and returns its command line."""
    (node.directory / "resolv.conf").write_text(f"nameserver {node.dns}\n")
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": str(node.address),
        # Only this machine and the cluster's pods can reach the port.
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [str(node.dns)],
        "clusterDomain": "cluster.local",
        "resolvConf": str(node.directory / "resolv.conf"),
        "containerRuntimeEndpoint": f"unix://{node.containerd_socket}",
        "podLogsDir": str(node.directory / "pod-logs"),
        "volumePluginDir": str(node.directory / "volume-plugins"),
        "nodeLeaseDurationSeconds": LEASE_SECONDS,
        "nodeStatusUpdateFrequency": "2s",
        # Of a status that has not changed: the lease tells that the node lives. It costs the API server a write.
        "nodeStatusReportFrequency": "1m",
        "crashLoopBackOff": {"maxContainerRestartPeriod": f"{CRASH_LOOP_SECONDS}s"},
        # All nodes share the machine's disk with much else: how full it is must not affect pods and images.
        "localStorageCapacityIsolation": False,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi"},
    }
    file = node.directory / "kubelet.json"
    file.write_text(json.dumps(config))
    return [
        f"--config={file}",
        f"--kubeconfig={node.kubelet_credentials}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
        f"--root-dir={node.directory / 'kubelet'}",
        f"--cert-dir={node.directory / 'kubelet-pki'}",
    ]


def proxy_flags(node: NodeSettings) -> list[str]:
    """Writes kube-proxy's configuration and returns its command line."""
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": node.name,
        "bindAddress": str(node.address),
        "clusterCIDR": str(node.pods),
        "clientConnection": {"kubeconfig": str(node.proxy_credentials)},
        # A pod's answer to a pod on the same node would otherwise bypass the node, which has to translate its address.
        "iptables": {"masqueradeAll": True},
        # These belong to the whole machine; the nodes must not change them.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    file = node.directory / "kube-proxy.json"
    file.write_text(json.dumps(config))
    return [f"--config={file}"]
