"""The TPU slices that exist: generations, machine types and slice shapes, read once from `catalogue.json`.

Admission accepts these slices, and `domain.job.topology` computes with them. The rows come from the tables of Google's
device plugin, cluster autoscaler, XPK and pathways-job; `verified: false` marks a shape that only one of them lists.
A chip has one or two TensorCores; v2 and v3 name slices by cores, v5e and v6e by chips.
"""

import difflib
import json
import math
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class MachineType:
    """A GKE machine type, which is one host. `label` is the value of its nodes' label gke-tpu-accelerator.

    `cpus` (virtual) and `memory_gb` are None if no source gives them.
    """

    name: str
    chips: int
    label: str
    multi_host: bool
    cpus: int | None = None
    memory_gb: int | None = None


@dataclass(frozen=True)
class Shape:
    """One slice shape on one machine type. `default`: its accelerator type alone means this shape."""

    generation: str
    topology: str
    machine_type: MachineType | None
    accelerator_type: str
    chips: int
    chips_per_host: int
    hosts: int
    devices: int
    default: bool
    verified: bool

    @property
    def host_bounds(self) -> tuple[int, int, int]:
        """Hosts along each axis, which GKE's device plugin passes to libtpu as TPU_HOST_BOUNDS."""
        sides = [*(int(side) for side in self.topology.split("x")), 1][:3]
        block = HOST_BLOCKS.get(self.chips_per_host, (1, 1, 1))
        return (max(1, sides[0] // block[0]), max(1, sides[1] // block[1]), max(1, sides[2] // block[2]))

    @property
    def links(self) -> float:
        """The share of a chip's links that the slice uses, 0..1, on average over its chips.

        A row of chips has no link from its last chip to its first unless it wraps around: in slices of whole cubes, and
        in two dimensions along a side of 16 (as GKE's device plugin sets TPU_TOPOLOGY_WRAP). The devices of a single
        chip exchange on it.
        """
        sides = [int(side) for side in self.topology.split("x")]
        cubes = len(sides) == 3 and not any(side % CUBE_SIDE for side in sides)
        used = sum(1 if cubes or side >= _WRAPPED_SIDE else (side - 1) / side for side in sides)
        return used / len(sides) or 1.0


@dataclass(frozen=True)
class Generation:
    """A TPU generation. Memory and peak speeds are per chip: GiB; bf16 TFLOP/s; GB/s to and from HBM; GB/s that a chip
    sends over the interconnect (ICI), half of what Google calls bidirectional; Gbit/s of the data-center network (DCN).

    The DCN's are from the pages of tpu7x, v5p and v6e, and for v5e from the NICs of its hosts (two of 100 Gbit/s for
    eight chips); 0 where no page has one.

    Peaks of v4 and newer are from the generations' pages in the Cloud TPU documentation; of v2 and v3 from Jouppi et
    al., "A domain-specific supercomputer for training deep neural networks", CACM 63(7), 2020.

    `max_cubes` bounds slices of three dimensions, in cubes of 4x4x4; it is 0 for two dimensions. torch_xla starts
    `processes_per_chip` processes per chip: on v2 and v3 one process drives both devices of a chip, while on tpu7x
    each device is a PCI function and has its own process.
    """

    name: str
    on_gke: bool
    name_prefix: str
    devices_per_chip: int
    processes_per_chip: int
    hbm_gib_per_chip: int
    bf16_tflops_per_chip: int
    hbm_gb_per_second_per_chip: int
    ici_gb_per_second_per_chip: int
    dcn_gbit_per_second_per_chip: int
    max_cubes: int
    shapes: tuple[Shape, ...]

    @property
    def accelerator_types(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(shape.accelerator_type for shape in self.shapes))

    @property
    def topologies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(shape.topology for shape in self.shapes))


CUBE_SIDE = 4
_WRAPPED_SIDE = 16
LONGEST_SIDE = 256

# Chips along each axis of one host (TPU_CHIPS_PER_HOST_BOUNDS), by chips per host.
HOST_BLOCKS = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}

# v2 has no GKE machine type. Its TPU VMs have four chips, like every machine of a multi-host slice since.
_CHIPS_PER_VM_WITHOUT_MACHINE_TYPE = 4


@cache
def generations() -> dict[str, Generation]:
    """Returns all generations by their catalogue key (v2, v3, v4, v5e, v5p, v6e, tpu7x)."""
    text = resources.files(__package__).joinpath("catalogue.json").read_text(encoding="utf-8")
    return {name: _generation(name, row) for name, row in json.loads(text).items()}


def _generation(name: str, row: dict[str, Any]) -> Generation:
    machine_types = {
        key: MachineType(key, host["chips"], host["label"], host["multiHost"], host.get("cpus"), host.get("memoryGb"))
        for key, host in row["machineTypes"].items()
    }
    return Generation(
        name=name,
        on_gke=row["onGke"],
        name_prefix=row["namePrefix"],
        devices_per_chip=row["devicesPerChip"],
        processes_per_chip=row["processesPerChip"],
        hbm_gib_per_chip=row["hbmGibPerChip"],
        bf16_tflops_per_chip=row["bf16TflopsPerChip"],
        hbm_gb_per_second_per_chip=row["hbmGbPerSecondPerChip"],
        ici_gb_per_second_per_chip=row["iciGbPerSecondPerChip"],
        dcn_gbit_per_second_per_chip=row.get("dcnGbitPerSecondPerChip", 0),
        max_cubes=row.get("maxCubes", 0),
        shapes=tuple(_shape(name, row, shape, machine_types) for shape in row["shapes"]),
    )


def _shape(generation: str, row: dict[str, Any], shape: dict[str, Any], machine_types: dict[str, MachineType]) -> Shape:
    machine_type = machine_types[shape["machineType"]] if shape["machineType"] else None
    chips = math.prod(int(side) for side in shape["topology"].split("x"))
    chips_per_host = machine_type.chips if machine_type else _CHIPS_PER_VM_WITHOUT_MACHINE_TYPE
    size_in_name = chips * (row["coresPerChip"] if row["nameCounts"] == "cores" else 1)
    return Shape(
        generation=generation,
        topology=shape["topology"],
        machine_type=machine_type,
        accelerator_type=f"{row['namePrefix']}-{size_in_name}",
        chips=chips,
        chips_per_host=chips_per_host,
        hosts=max(1, chips // chips_per_host),
        devices=chips * row["devicesPerChip"],
        default=shape.get("default", True),
        verified=shape.get("verified", True),
    )


def generation_of(slice_name: str) -> str:
    """Returns the generation of a slice as a status names it, such as 2 x v5litepod-16 (spot)."""
    prefix = type_of(slice_name).rpartition("-")[0]
    return next((known.name for known in generations().values() if known.name_prefix == prefix), prefix)


def type_of(slice_name: str) -> str:
    """Returns the accelerator type of a slice as a status names it."""
    return slice_name.rpartition(" x ")[2].partition(" (")[0]


def shapes_of_type(accelerator_type: str) -> tuple[Shape, ...]:
    """Returns the shapes that an accelerator type can mean, the default first; none if the type does not exist."""
    shapes = [s for g in generations().values() for s in g.shapes if s.accelerator_type == accelerator_type]
    return tuple(sorted(shapes, key=lambda shape: not shape.default))


def shapes_of_topology(generation: str, topology: str) -> tuple[Shape, ...]:
    """Returns the shapes with this topology, the default first; none if the generation has none."""
    entry = generations().get(generation)
    if entry is None:
        return ()
    shapes = [shape for shape in entry.shapes if shape.topology == topology]
    if not shapes and follows_cube_rule(entry, topology):
        return (_unlisted_shape(entry, topology),)
    return tuple(sorted(shapes, key=lambda shape: not shape.default))


def follows_cube_rule(generation: Generation, topology: str) -> bool:
    """Returns whether the topology consists of whole cubes: three ascending sides, each a multiple of 4 up to 256.

    GKE's documentation and KubeRay's validator give this rule. No source lists most of the shapes that follow it.
    """
    sides = [int(side) for side in topology.split("x")]
    return (
        len(sides) == 3
        and all(side % CUBE_SIDE == 0 and side <= LONGEST_SIDE for side in sides)
        and sides == sorted(sides)
        and math.prod(sides) <= generation.max_cubes * CUBE_SIDE**3
    )


def _unlisted_shape(generation: Generation, topology: str) -> Shape:
    """Returns a shape that follows the cube rule, on the machine type of the generation's other large slices."""
    largest = generation.shapes[-1]
    chips = math.prod(int(side) for side in topology.split("x"))
    size_in_name = chips * int(largest.accelerator_type.rpartition("-")[2]) // largest.chips
    return replace(
        largest,
        topology=topology,
        accelerator_type=f"{generation.name_prefix}-{size_in_name}",
        chips=chips,
        hosts=chips // largest.chips_per_host,
        devices=chips * generation.devices_per_chip,
        default=False,
        verified=False,
    )


def nearest_accelerator_types(wrong: str, count: int = 3) -> list[str]:
    """Returns the valid names that the user most likely meant: the nearest sizes, or the closest spelling."""
    prefix, _, size = wrong.rpartition("-")
    by_prefix = {g.name_prefix: g for g in generations().values()}
    by_prefix |= {g.name: g for g in generations().values()}
    if prefix in by_prefix and size.isdecimal():
        # By ratio: sizes double, so 32 is as near to 16 as 8 is.
        names = by_prefix[prefix].accelerator_types
        return sorted(names, key=lambda name: abs(math.log(int(name.rpartition("-")[2]) / max(int(size), 1))))[:count]
    every = [name for g in generations().values() for name in g.accelerator_types]
    close = difflib.get_close_matches(wrong, every, n=count, cutoff=0.5)
    return close or [g.accelerator_types[-1] for g in generations().values()]


def nearest_topologies(generation: str, wrong: str, count: int = 3) -> list[str]:
    """Returns the generation's topologies whose number of chips is closest to that of the wrong one."""
    topologies = generations()[generation].topologies
    sides = wrong.split("x")
    if not all(side.isdecimal() for side in sides):
        return difflib.get_close_matches(wrong, topologies, n=count, cutoff=0.0)
    chips = max(1, math.prod(int(side) for side in sides))
    return sorted(topologies, key=lambda t: abs(math.log(math.prod(map(int, t.split("x"))) / chips)))[:count]
