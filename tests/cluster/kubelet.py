"""kubelet and kube-proxy inside a node's machine. Called by `nodes`.

Each node has an address and a network of its own, so both run on their usual ports.
"""

import json
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

# The node's lease is renewed after a quarter of this; the controller manager's patience must be longer.
LEASE_SECONDS = 8

# The longest wait before a container that died is started again. Kubernetes makes it minutes; the tests that kill the
# operator again and again need not wait for that.
CRASH_LOOP_SECONDS = 1

# kube-proxy's own default.
PROXY_HEALTH_PORT = 10256


@dataclass(frozen=True)
class NodeSettings:
    """What the two programs need to know of their node; `directory` is the node's own, `cgroup` its root."""

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
        # Nobody but this machine and the pods of the cluster reaches the port.
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
        "crashLoopBackOff": {"maxContainerRestartPeriod": f"{CRASH_LOOP_SECONDS}s"},
        # The machine's disk is shared by all nodes and by much else: how full it is must not decide over pods
        # and images.
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
        # A pod's answer to a pod of the same node would not come back through the node, where its address has to be
        # translated, unless the question came from the node.
        "iptables": {"masqueradeAll": True},
        # Settings of the whole machine, which is not the nodes' to change.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    file = node.directory / "kube-proxy.json"
    file.write_text(json.dumps(config))
    return [f"--config={file}"]
