"""Kueue's own definitions, from its Go module: pinned and checksummed in go/kueue, downloaded once, never copied here.

Only the definitions. Kueue itself takes ten minutes to build; the tests write what its scheduler writes.
docs/kueue.md says which version the operator has met.
"""

from pathlib import Path

from tests.cluster.binaries import module_folder
from tests.cluster.control_plane import ControlPlane

MODULE = "sigs.k8s.io/kueue"
_KINDS = ("workloads", "resourceflavors", "workloadpriorityclasses")


def definition(kinds: str) -> Path:
    """The file with the definition of these kinds, in the plural. Raises ToolchainMissing, BuildError."""
    folder = module_folder("kueue", MODULE) / "config" / "components" / "crd" / "bases"
    return folder / f"kueue.x-k8s.io_{kinds}.yaml"


def install(cluster: ControlPlane) -> None:
    """Kueue's definitions are served, and Kueue itself is not there."""
    for kinds in _KINDS:
        # Too large for the annotation that a client-side apply writes.
        cluster.kubectl("apply", "--server-side", "-f", str(definition(kinds)))
    for kind in _KINDS:
        cluster.wait_established(f"{kind}.kueue.x-k8s.io")
