"""What GKE's TPU device plugin adds to the environment of every container that asks for google.com/tpu.

The rules, and the table that they are held against, are those of github.com/ai-on-gke/tpu-device-plugin at 4626a9f
(pkg/tpu/util: InitEnvs and its tests). The plugin knows its node's labels, the chips that the container asks for, and
one annotation of the pod.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_training_operator.api.catalogue import Shape

# The value of TPU_ACCELERATOR_TYPE begins with it. The label of tpu7x and later is its own prefix.
_PREFIXES = {
    "tpu-v3-device": "v3",
    "tpu-v3-slice": "v3",
    "tpu-v4-podslice": "v4",
    "tpu-v5-lite-podslice": "v5litepod",
    "tpu-v5p-slice": "v5p",
    "tpu-v6e-slice": "v6e",
}
_BLOCKS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
_FIRST_METRICS_PORT = 8431
_SOCKET = "unix:///var/run/tpu-plugin/vbar.sock"

# Two names for each value: libtpu's, and an older one.
_BOUNDS = (
    ("TPU_HOST_BOUNDS", "HOST_BOUNDS"),
    ("TPU_CHIPS_PER_HOST_BOUNDS", "CHIPS_PER_HOST_BOUNDS"),
    ("TPU_TOPOLOGY_WRAP", "WRAP"),
    ("TPU_TOPOLOGY_ALT", "ALT"),
)


# What the plugin cannot know of a dynamic slice: it reads its node's labels when it starts, and the slice controller
# labels the node later.
SHAPE_OF_DYNAMIC_SLICE = frozenset(
    {"TPU_TOPOLOGY", "TPU_ACCELERATOR_TYPE", "TPU_HOST_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"}
)


@dataclass(frozen=True)
class LabelledNode:
    """A node as the plugin knows it. `topology`: None in a pool that is only provisioned, whose slices GKE's slice
    controller forms later. `resilient`: the label gke-tpu-ici-resiliency. `socket`: whether the node's vbar service
    listens on a socket; otherwise it listens on a port of the address `node_ip`."""

    label: str
    topology: str | None
    chips: int
    resilient: bool = True
    socket: bool = True
    node_ip: str = "10.0.0.1"


def injected(
    node: LabelledNode,
    *,
    annotation: str | None = None,
    visible: Sequence[int] = (),
    numa: Sequence[int] = (),
) -> dict[str, str]:
    """The variables of a container that takes all chips of its node.

    `annotation`: the pod's gke-tpu-slice-topology. `visible`: the chips of a privileged container, on generations that
    share out the chips of a host. `numa`: the NUMA nodes of its chips, there."""
    prefix = _PREFIXES.get(node.label, node.label)
    two_devices_per_chip = prefix == "tpu7x"
    ports = node.chips * (2 if two_devices_per_chip else 1)
    env = {
        "TPU_SKIP_MDS_QUERY": "true",
        "TPU_RUNTIME_METRICS_PORTS": ",".join(str(_FIRST_METRICS_PORT + i) for i in range(ports)),
        "VBAR_CONTROL_SERVICE_URL": _SOCKET if node.socket else f"{node.node_ip}:8353",
    }
    if visible and two_devices_per_chip:
        env["TPU_VISIBLE_CHIPS"] = ",".join(map(str, visible))
    if numa:
        env["WORKLOAD_NIC_PREFERRED_NUMA"] = ",".join(map(str, numa))
    if node.topology is None:
        return env
    topology = annotation if annotation is not None and fits(annotation, node.topology) else node.topology
    sides = [*(int(side) for side in topology.split("x")), 1][:3]
    env["TPU_TOPOLOGY"] = topology
    one_core_per_chip = prefix in ("v5litepod", "v6e")
    env["TPU_ACCELERATOR_TYPE"] = f"{prefix}-{math.prod(sides) * (1 if one_core_per_chip else 2)}"
    if not node.label.endswith("-device"):
        block = [int(side) for side in _BLOCKS[node.chips].split(",")]
        hosts = ",".join(str(side // of_host) for side, of_host in zip(sides, block, strict=True))
        cubes = all(side >= 4 for side in sides)
        wraps = [side == 16 for side in sides] if one_core_per_chip else [cubes] * 3
        values = (hosts, _BLOCKS[node.chips], ",".join(str(wrap).lower() for wrap in wraps), "false")
        env |= {name: value for names, value in zip(_BOUNDS, values, strict=True) for name in names}
        if cubes and prefix in ("v4", "v5p", "tpu7x"):
            env["ENABLE_ICI_RESILIENCY"] = str(node.resilient).lower()
    if math.prod(sides) == node.chips and not two_devices_per_chip:
        env |= {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}
    return env


def fits(annotation: str, topology: str) -> bool:
    """Whether the plugin takes the annotation for a part of the node's slice; otherwise it describes the whole."""
    known = ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4"]
    part, whole = ([int(side) for side in name.split("x")] for name in (annotation, topology))
    return annotation in known and len(part) == len(whole) and all(a <= b for a, b in zip(part, whole, strict=True))


def node_of(shape: Shape, **labels: Any) -> LabelledNode:
    """A node of the shape's pool."""
    assert shape.machine_type is not None
    return LabelledNode(shape.machine_type.label, shape.topology, shape.chips_per_host, **labels)


def device_plugin(shape: Shape) -> dict[str, str]:
    """The variables of a worker that has a node of the shape's pool."""
    return injected(node_of(shape))


@dataclass(frozen=True)
class Published:
    """One row of the plugin's tests. `alone`: the plugin also sets the worker's number and names. `resiliency`: None
    where the variable is left out. `options`: what `injected` is told. `topology`: where it is not the node's."""

    node: LabelledNode
    accelerator_type: str
    hosts: str | None
    per_host: str | None
    wrap: str | None
    ports: int
    alone: bool = False
    resiliency: str | None = None
    options: Mapping[str, Any] | None = None
    topology: str | None = None


NEVER, SECOND, TWO, ALL = "false,false,false", "false,true,false", "true,true,false", "true,true,true"
_V3, _V4, _V5E = "tpu-v3-slice", "tpu-v4-podslice", "tpu-v5-lite-podslice"
_V5P, _V6E, _V7 = "tpu-v5p-slice", "tpu-v6e-slice", "tpu7x"

PUBLISHED = [
    Published(LabelledNode("tpu-v3-device", "2x2", 4), "v3-8", None, None, None, 4, alone=True),
    Published(LabelledNode(_V3, "4x4", 4), "v3-32", "2,2,1", "2,2,1", NEVER, 4),
    Published(LabelledNode(_V3, "4x8", 4), "v3-64", "2,4,1", "2,2,1", NEVER, 4),
    Published(LabelledNode(_V3, "8x16", 4), "v3-256", "4,8,1", "2,2,1", NEVER, 4),
    Published(LabelledNode(_V3, "16x16", 4), "v3-512", "8,8,1", "2,2,1", NEVER, 4),
    Published(LabelledNode(_V4, "2x2x1", 4), "v4-8", "1,1,1", "2,2,1", NEVER, 4, alone=True),
    Published(LabelledNode(_V4, "2x2x2", 4), "v4-16", "1,1,2", "2,2,1", NEVER, 4),
    Published(LabelledNode(_V4, "2x2x4", 4), "v4-32", "1,1,4", "2,2,1", NEVER, 4),
    Published(LabelledNode(_V4, "4x4x4", 4), "v4-128", "2,2,4", "2,2,1", ALL, 4, resiliency="true"),
    Published(LabelledNode(_V4, "4x4x4", 4, resilient=False), "v4-128", "2,2,4", "2,2,1", ALL, 4, resiliency="false"),
    Published(LabelledNode(_V5E, "1x1", 1), "v5litepod-1", "1,1,1", "1,1,1", NEVER, 1, alone=True),
    Published(LabelledNode(_V5E, "2x2", 4), "v5litepod-4", "1,1,1", "2,2,1", NEVER, 4, alone=True),
    Published(LabelledNode(_V5E, "2x4", 4), "v5litepod-8", "1,2,1", "2,2,1", NEVER, 4),
    Published(LabelledNode(_V5E, "2x4", 8), "v5litepod-8", "1,1,1", "2,4,1", NEVER, 8, alone=True),
    Published(LabelledNode(_V5E, "4x4", 4), "v5litepod-16", "2,2,1", "2,2,1", NEVER, 4),
    Published(LabelledNode(_V5E, "8x16", 4), "v5litepod-128", "4,8,1", "2,2,1", SECOND, 4),
    Published(LabelledNode(_V5E, "16x16", 4, resilient=False), "v5litepod-256", "8,8,1", "2,2,1", TWO, 4),
    Published(LabelledNode(_V5P, "2x2x1", 4), "v5p-8", "1,1,1", "2,2,1", NEVER, 4, alone=True),
    Published(LabelledNode(_V5P, "2x2x4", 4), "v5p-32", "1,1,4", "2,2,1", NEVER, 4),
    Published(LabelledNode(_V5P, "2x4x4", 4, resilient=False), "v5p-64", "1,2,4", "2,2,1", NEVER, 4),
    Published(LabelledNode(_V5P, "4x4x4", 4), "v5p-128", "2,2,4", "2,2,1", ALL, 4, resiliency="true"),
    Published(LabelledNode(_V6E, "1x1", 1), "v6e-1", "1,1,1", "1,1,1", NEVER, 1, alone=True),
    Published(LabelledNode(_V6E, "2x4", 4), "v6e-8", "1,2,1", "2,2,1", NEVER, 4),
    Published(LabelledNode(_V6E, "2x4", 8), "v6e-8", "1,1,1", "2,4,1", NEVER, 8, alone=True),
    Published(LabelledNode(_V6E, "4x4", 4), "v6e-16", "2,2,1", "2,2,1", NEVER, 4),
    Published(LabelledNode(_V6E, "16x16", 4), "v6e-256", "8,8,1", "2,2,1", TWO, 4),
    Published(LabelledNode(_V7, "1x1x1", 1), "tpu7x-2", "1,1,1", "1,1,1", NEVER, 2),
    Published(LabelledNode(_V7, "2x2x1", 4), "tpu7x-8", "1,1,1", "2,2,1", NEVER, 8),
    Published(LabelledNode(_V7, "2x2x2", 4), "tpu7x-16", "1,1,2", "2,2,1", NEVER, 8, options={"numa": (0, 1)}),
    Published(LabelledNode(_V7, "4x4x4", 4), "tpu7x-128", "2,2,4", "2,2,1", ALL, 8, resiliency="true"),
    Published(
        LabelledNode(_V7, "12x24x24", 4),
        "tpu7x-13824",
        "6,12,24",
        "2,2,1",
        ALL,
        8,
        resiliency="true",
        options={"numa": (0, 1), "visible": (0, 1, 2, 3)},
    ),
    Published(
        LabelledNode(_V6E, "16x16", 4),
        "v6e-16",
        "2,2,1",
        "2,2,1",
        NEVER,
        4,
        options={"annotation": "4x4"},
        topology="4x4",
    ),
    Published(
        LabelledNode(_V5E, "2x4", 4),
        "v5litepod-4",
        "1,1,1",
        "2,2,1",
        NEVER,
        4,
        alone=True,
        options={"annotation": "2x2"},
        topology="2x2",
    ),
    Published(LabelledNode(_V5E, "2x4", 4), "v5litepod-8", "1,2,1", "2,2,1", NEVER, 4, options={"annotation": "2x3"}),
]
