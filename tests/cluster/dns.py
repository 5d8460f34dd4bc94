"""CoreDNS for the pods of a cluster: a process on this machine that answers on the nodes' bridge.

It knows only the names of the cluster: no test uses another network.
"""

from tests.cluster import binaries
from tests.cluster.api import answers_ok
from tests.cluster.control_plane import ControlPlane
from tests.cluster.processes import Child

READY_PORT = 8181

# ttl 1: a pod that starts again under its name is found at its new address a second later.
CONFIG = """\
.:53 {{
    bind {address}
    errors
    ready {address}:{ready_port}
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 1
    }}
}}
"""

USER = "coredns"


def start_dns(cluster: ControlPlane, address: str) -> Child:
    """Starts CoreDNS as a child of `cluster`, listening on `address`. Does not wait: see `answers`."""
    config = cluster.directory / "Corefile"
    config.write_text(CONFIG.format(address=address, ready_port=READY_PORT, kubeconfig=cluster.user_kubeconfig(USER)))
    return cluster.children.start("coredns", binaries.ensure("coredns")["coredns"], f"-conf={config}")


def answers(address: str) -> bool:
    """Whether CoreDNS has read all Services at least once."""
    return answers_ok(f"http://{address}:{READY_PORT}/ready")
