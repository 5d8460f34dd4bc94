"""How many hosts, chips and replicas a slice has."""

import math
from dataclasses import dataclass

from tpu_training_operator.api.catalogue import MachineType, Shape, shapes_of_topology, shapes_of_type
from tpu_training_operator.api.slice import SliceRef
from tpu_training_operator.api.validation import InvalidJob, Problem
from tpu_training_operator.api.words import count


@dataclass(frozen=True)
class SliceLayout:
    """The hosts and replicas of a job: `slices` slices of one shape.

    A replica is one XLA device: one per chip, but two per chip on v2, v3 and tpu7x.
    """

    shape: Shape
    slices: int

    @property
    def hosts_per_slice(self) -> int:
        return self.shape.hosts

    @property
    def hosts(self) -> int:
        return self.slices * self.shape.hosts

    @property
    def chips(self) -> int:
        return self.slices * self.shape.chips

    @property
    def replicas(self) -> int:
        return self.slices * self.shape.devices

    def has(self, slice_index: int, host: int) -> bool:
        return slice_index < self.slices and host < self.hosts_per_slice

    def __str__(self) -> str:
        times = f"{self.slices} x " if self.slices > 1 else ""
        return f"{times}{self.shape.accelerator_type}"


def layout_of(ref: SliceRef, field: str) -> SliceLayout:
    """Returns the layout that `ref` at path `field` names. Raises InvalidJob if the catalogue has none."""
    if ref.accelerator_type is not None:
        shapes = shapes_of_type(ref.accelerator_type)
    elif ref.chips_per_host is not None:
        shapes = (_declared_shape(ref, field, ref.chips_per_host),)
    else:
        shapes = shapes_of_topology(ref.generation or "", ref.topology or "")
    if ref.machine_type is not None:
        offered = [shape.machine_type.name for shape in shapes if shape.machine_type]
        shapes = tuple(s for s in shapes if s.machine_type and s.machine_type.name == ref.machine_type)
        if not shapes:
            offer = f"it exists on {', '.join(dict.fromkeys(offered))}" if offered else "leave it out"
            raise InvalidJob(
                [Problem(f"{field}.machineType", f"{ref.machine_type!r} does not have this slice; {offer}")]
            )
    return SliceLayout(shapes[0], ref.count)


def _declared_shape(ref: SliceRef, field: str, chips_per_host: int) -> Shape:
    """Returns the shape that the user describes for a generation newer than the catalogue."""
    generation, topology = ref.generation or "", ref.topology or ""
    chips = math.prod(int(side) for side in topology.split("x"))
    if chips % chips_per_host and chips > chips_per_host:
        message = f"{count(chips, 'chip')} ({topology}) cannot be divided over hosts of {chips_per_host}"
        raise InvalidJob([Problem(f"{field}.chipsPerHost", message)])
    return Shape(
        generation=generation,
        topology=topology,
        # From tpu7x on, the node label is the generation's name.
        machine_type=MachineType("", chips_per_host, generation, multi_host=chips > chips_per_host),
        accelerator_type=f"{generation}-{topology}",
        chips=chips,
        chips_per_host=chips_per_host,
        hosts=max(1, chips // chips_per_host),
        devices=chips * (ref.devices_per_chip or 1),
        default=True,
        verified=False,
    )
