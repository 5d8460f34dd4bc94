"""What the end-to-end tests decide about their real nodes before anything starts; this needs no root."""

from ipaddress import IPv4Address, IPv4Network

import pytest

from tests.cluster import cgroups, network

V1 = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("mountinfo", "found"),
    [
        (V1, [("/sys/fs/cgroup/cpu", False), ("/sys/fs/cgroup/unified", True)]),
        (V2, [("/sys/fs/cgroup", True)]),
        ("22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n", []),
    ],
    ids=["v1 with an empty v2", "v2", "none"],
)
def test_control_groups_are_found_where_they_are_mounted(mountinfo: str, found: list[tuple[str, bool]]) -> None:
    assert [(str(one.root), one.v2) for one in cgroups.hierarchies(mountinfo)] == found


@pytest.mark.parametrize(
    ("routed", "chosen"),
    [
        ([], "10.244.0.0/16"),
        (["10.244.0.0/24"], "10.245.0.0/16"),
        (["10.244.255.0/24", "10.245.0.0/16", "172.17.0.0/16"], "10.246.0.0/16"),
        (["10.192.0.0/10"], "10.128.0.0/16"),
    ],
)
def test_a_cluster_takes_the_first_subnet_that_no_route_touches(routed: list[str], chosen: str) -> None:
    assert network.free_subnet([IPv4Network(one) for one in routed]) == IPv4Network(chosen)


def test_addresses_of_machine_nodes_and_pods_do_not_overlap() -> None:
    cluster = network.Network("tpu-x", IPv4Network("10.244.0.0/16"))
    last = network.MAX_NODES - 1
    assert (cluster.machine, cluster.node(0)) == (IPv4Address("10.244.255.1"), IPv4Address("10.244.255.10"))
    assert cluster.node(last) < IPv4Address("10.244.255.255")
    assert not cluster.pods(last).overlaps(IPv4Network("10.244.255.0/24"))
