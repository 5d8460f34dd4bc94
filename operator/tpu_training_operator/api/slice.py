"""`spec.slice`: what the job runs on, and which of it a cluster can give."""

import math
import re
from enum import StrEnum
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from tpu_training_operator.api import catalogue
from tpu_training_operator.api.constants import MAX_HOSTS
from tpu_training_operator.api.model import ApiModel, Boolean, Rule
from tpu_training_operator.api.slice_ref import REF_RULES, SliceRef, cel_list, is_newer


class Hardware(StrEnum):
    TPU = "TPU"
    CPU = "CPU"


def _generation_is(names: tuple[str, ...]) -> str:
    by_type = " || ".join(
        f"self.acceleratorType.startsWith('{catalogue.generations()[name].name_prefix}-')" for name in names
    )
    return (
        f"((has(self.acceleratorType) && ({by_type}))"
        f" || (has(self.generation) && self.generation in {cel_list(names)}))"
    )


def _is_generation(value: SliceRef, names: tuple[str, ...]) -> bool:
    prefixes = tuple(catalogue.generations()[name].name_prefix + "-" for name in names)
    return value.generation in names or (value.accelerator_type or "").startswith(prefixes)


V2_NEEDS_CPU = Rule(
    cel=f"self.hardware == 'CPU' || !{_generation_is(('v2',))}",
    message="GKE has no v2 nodes: use v3, the nearest generation with two cores per chip, or hardware: CPU",
    holds=lambda value: value.hardware is Hardware.CPU or not _is_generation(value, ("v2",)),
    field="hardware",
)


_NAME = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
# Every name in it becomes the value of a node label.
_RESERVATION = (
    f"(projects/(?P<project>{_NAME})/reservations/)?(?P<name>{_NAME})"
    f"(/reservationBlocks/(?P<block>{_NAME})(/reservationSubBlocks/(?P<subblock>{_NAME}))?)?"
)


class Reservation(NamedTuple):
    """A specific reservation; a `project` where it is another one's than the cluster's."""

    name: str
    project: str | None
    block: str | None
    subblock: str | None

    @staticmethod
    def parse(text: str) -> "Reservation | None":
        found = re.fullmatch(_RESERVATION, text)
        return Reservation(**found.groupdict()) if found else None


def _is_reservation(way: "Provisioning") -> bool:
    return way.reservation is None or Reservation.parse(way.reservation) is not None


class Provisioning(ApiModel):
    """How the chips are paid for; none of these is on demand."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="[has(self.spot) && self.spot, has(self.reservation), has(self.flexStart) && self.flexStart,"
            " has(self.queued) && self.queued].filter(given, given).size() <= 1",
            message="give at most one of spot, reservation, flexStart and queued",
            holds=lambda way: sum(map(bool, (way.spot, way.reservation, way.flex_start, way.queued))) <= 1,
        ),
        Rule(
            cel=f"!has(self.reservation) || self.reservation.matches('^{_RESERVATION}$')",
            message="give the reservation's name, or projects/PROJECT/reservations/NAME for one that another project"
            " shares; /reservationBlocks/BLOCK and /reservationSubBlocks/SUBBLOCK may follow. All names are of a-z,"
            " 0-9 and '-'",
            holds=_is_reservation,
            field="reservation",
        ),
    )

    spot: Boolean = Field(False, description="Spot VMs: cheap, may be taken back at any time with 30 s notice.")
    reservation: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        None,
        description="The specific reservation to draw from: NAME, or projects/PROJECT/reservations/NAME where another"
        " project shares it; /reservationBlocks/BLOCK may follow.",
    )
    flex_start: Boolean = Field(False, description="Flex-start VMs: started when there is room, for 7 days at most.")
    queued: Boolean = Field(False, description="Queued provisioning, through Kueue's ProvisioningRequest.")


# GKE's autoscaler has flex-start disabled on these generations' machine types.
_NO_FLEX_START = ("v3", "v4")


_FLEX_START_EXISTS = Rule(
    cel="!has(self.provisioning) || !has(self.provisioning.flexStart) || !self.provisioning.flexStart"
    f" || !{_generation_is(_NO_FLEX_START)}",
    message=f"{' and '.join(_NO_FLEX_START)} have no flex-start; use spot, a reservation or on demand",
    holds=lambda value: (
        value.provisioning is None or not value.provisioning.flex_start or not _is_generation(value, _NO_FLEX_START)
    ),
    field="provisioning",
)


def _hosts_of_several(generation: catalogue.Generation) -> catalogue.Shape:
    return next(shape for shape in generation.shapes if shape.hosts > 1 and shape.verified)


def _multislice_rule(generation: catalogue.Generation) -> Rule:
    """GKE joins slices only of node pools with several hosts."""
    single = [shape for shape in generation.shapes if shape.hosts == 1]
    names = tuple(s.accelerator_type for s in single if s.default)
    topologies = tuple(s.topology for s in single if s.default)
    # 2x4 on v5e and v6e is one host only on the machine type of eight chips.
    machine_types = tuple(s.machine_type.name for s in single if s.machine_type and not s.machine_type.multi_host)
    on_machine = (
        f" || (has(self.machineType) && self.machineType in {cel_list(machine_types)})" if machine_types else ""
    )
    smallest = _hosts_of_several(generation)
    return Rule(
        cel="self.hardware == 'CPU' || self.count == 1"
        f" || !((has(self.acceleratorType) && self.acceleratorType in {cel_list(names)})"
        f" || (has(self.generation) && self.generation == '{generation.name}' && has(self.topology)"
        f" && self.topology in {cel_list(topologies)}){on_machine})",
        message=f"several slices need slices of several hosts; the smallest of {generation.name} is"
        f" {smallest.accelerator_type} ({smallest.topology})",
        holds=lambda value: (
            value.hardware is Hardware.CPU
            or value.count == 1
            or not (
                value.accelerator_type in names
                or (value.generation == generation.name and value.topology in topologies)
                or value.machine_type in machine_types
            )
        ),
        field="count",
    )


def _declared_hosts_suffice(value: "Slice") -> bool:
    if value.hardware is Hardware.CPU or value.count == 1 or value.chips_per_host is None or not is_newer(value):
        return True
    return math.prod(int(side) for side in (value.topology or "").split("x") if side) > value.chips_per_host


_DECLARED_MULTISLICE = Rule(
    cel="self.hardware == 'CPU' || self.count == 1 || !has(self.chipsPerHost) || !has(self.topology)"
    " || [self.topology.split('x').map(side, int(side))].exists(t,"
    " t[0] * t[1] * (t.size() == 3 ? t[2] : 1) > self.chipsPerHost)",
    message="several slices need slices of several hosts: more chips in topology than chipsPerHost",
    holds=_declared_hosts_suffice,
    field="count",
)

MULTISLICE_RULES = (
    *(_multislice_rule(generation) for generation in catalogue.generations().values() if generation.on_gke),
    _DECLARED_MULTISLICE,
)


# Chips of every machine that slices of several hosts are made of. The one host of a small slice may have more or fewer,
# which does not matter: 256 of those are far below the bound.
_CHIPS_PER_HOST = 4


def _size_per_host(generation: catalogue.Generation) -> int:
    """What one host adds to the number in an accelerator type's name."""
    largest = max(generation.shapes, key=lambda shape: shape.hosts)
    return int(largest.accelerator_type.rpartition("-")[2]) // largest.hosts


_SIZES_PER_HOST = {g.name_prefix: _size_per_host(g) for g in catalogue.generations().values()}


def hosts_asked(value: SliceRef) -> int:
    """The hosts of all slices, as the API's bound counts them: rounded up, and for slices of one host per slice no
    more than twice what `domain.topology` says. 0 for a reference that names no slice."""
    return value.count * hosts_per_slice_asked(value)


def hosts_per_slice_asked(value: SliceRef) -> int:
    if value.accelerator_type is not None:
        prefix, _, size = value.accelerator_type.rpartition("-")
        per_host = _SIZES_PER_HOST.get(prefix)
        return -(-int(size) // per_host) if per_host and size.isdecimal() else 0
    chips = math.prod(int(side) for side in (value.topology or "0").split("x"))
    return -(-chips // (value.chips_per_host or _CHIPS_PER_HOST))


def cel_hosts_per_slice(ref: str) -> str:
    """The same in CEL, for the slice reference at `ref`."""
    # CEL has no division that rounds up, and no local variables: the list of one stands in for one.
    per_host = " : ".join(f"{ref}.acceleratorType.startsWith('{name}-') ? {n}" for name, n in _SIZES_PER_HOST.items())
    chips = f"[{ref}.topology.split('x').map(side, int(side))].map(t, t[0] * t[1] * (t.size() == 3 ? t[2] : 1))"
    return (
        f"(has({ref}.acceleratorType)"
        f" ? ({ref}.acceleratorType.matches('^[a-z0-9]+-[0-9]{{1,9}}$')"
        f" ? [{per_host} : 1].map(n, (int({ref}.acceleratorType.split('-')[1]) + n - 1) / n)[0] : 0)"
        f" : has({ref}.topology) ? [has({ref}.chipsPerHost) ? {ref}.chipsPerHost : {_CHIPS_PER_HOST}].map(n,"
        f" ({chips}[0] + n - 1) / n)[0] : 0)"
    )


_HOSTS_ARE_BOUNDED = Rule(
    cel=f"self.count * {cel_hosts_per_slice('self')} <= {MAX_HOSTS}",
    # Without the number of hosts: the API server budgets any text made of a number as if it had no end.
    message=f"a job has at most {MAX_HOSTS} hosts over all of its slices; use fewer or smaller slices",
    holds=lambda value: hosts_asked(value) <= MAX_HOSTS,
    explain=lambda value: (
        f"{hosts_asked(value)} hosts are too many: a job has at most {MAX_HOSTS}, over all of its slices"
    ),
)


class Slice(SliceRef):
    """`spec.slice`: what the job runs on."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *REF_RULES,
        V2_NEEDS_CPU,
        _FLEX_START_EXISTS,
        *MULTISLICE_RULES,
        _HOSTS_ARE_BOUNDED,
    )

    provisioning: Provisioning | None = None

    hardware: Hardware = Field(
        Hardware.TPU,
        description="TPU, or CPU: a rehearsal, the same gang of hosts without google.com/tpu.",
    )
