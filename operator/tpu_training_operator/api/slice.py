"""`spec.slice` and `recipe.tunedOn`: which TPU slice, and the rules for what a cluster can provide.

A slice is named by accelerator type or by generation and topology. The rules come from the catalogue, once as CEL for
the API server and once in Python.
"""

import math
import re
from enum import StrEnum
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from tpu_training_operator.api import catalogue
from tpu_training_operator.api.constants import MAX_HOSTS
from tpu_training_operator.api.model import TOPOLOGY_PATTERN, ApiModel, Rule, ShortText
from tpu_training_operator.api.slice_names import explain_accelerator_type, generation_hint

MOST_SLICES = 256

_KNOWN = tuple(catalogue.generations())
# Since tpu7x GKE's node label is the generation's own name, so a job can use a newer one before the catalogue has it.
NEWER = re.compile(r"tpu[0-9]+[a-z]?")


def cel_list(values: tuple[str, ...]) -> str:
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"


def _one_form(value: "SliceRef") -> bool:
    if value.accelerator_type is not None:
        return value.generation is None and value.topology is None
    return value.generation is not None and value.topology is not None


def _explain_accelerator_type(value: "SliceRef") -> str:
    return explain_accelerator_type(value.accelerator_type or "")


def _explain_topology(value: "SliceRef") -> str:
    nearest = ", ".join(catalogue.nearest_topologies(value.generation or "", value.topology or ""))
    return f"{value.generation} has no topology {value.topology!r}; nearest: {nearest}"


_ONE_FORM = Rule(
    cel="has(self.acceleratorType) ? !has(self.generation) && !has(self.topology)"
    " : has(self.generation) && has(self.topology)",
    message="give either acceleratorType (like v5litepod-16) or generation and topology (like v5e and 4x4)",
    holds=_one_form,
)


def is_newer(value: "SliceRef") -> bool:
    return value.generation not in _KNOWN and NEWER.fullmatch(value.generation or "") is not None


_GENERATIONS_MESSAGE = f"known generations are {', '.join(_KNOWN)}; a newer one (like tpu8t) also needs chipsPerHost"

_KNOWN_GENERATION = Rule(
    cel=f"!has(self.generation) || self.generation in {cel_list(_KNOWN)}"
    f" || (self.generation.matches('^{NEWER.pattern}$') && has(self.chipsPerHost))",
    message=_GENERATIONS_MESSAGE,
    holds=lambda value: (
        value.generation is None or value.generation in _KNOWN or (is_newer(value) and value.chips_per_host is not None)
    ),
    field="generation",
    explain=lambda value: (
        generation_hint(value.generation) or f"{value.generation!r} is not known; {_GENERATIONS_MESSAGE}"
    ),
)

_CATALOGUE_KNOWS_CHIPS = Rule(
    cel="(!has(self.chipsPerHost) && !has(self.devicesPerChip))"
    f" || (has(self.generation) && !(self.generation in {cel_list(_KNOWN)}))",
    message="chipsPerHost and devicesPerChip are only for generations that the catalogue lacks; leave them out",
    holds=lambda value: (value.chips_per_host is None and value.devices_per_chip is None) or is_newer(value),
    field="chipsPerHost",
)


def _accelerator_type_rule(generation: catalogue.Generation) -> Rule:
    prefix = generation.name_prefix + "-"
    return Rule(
        cel=f"!has(self.acceleratorType) || !self.acceleratorType.startsWith('{prefix}')"
        f" || self.acceleratorType in {cel_list(generation.accelerator_types)}",
        message=f"unknown accelerator type; valid {prefix}N are N = "
        + ", ".join(name.removeprefix(prefix) for name in generation.accelerator_types),
        holds=lambda value: (
            not (value.accelerator_type or "").startswith(prefix)
            or value.accelerator_type in generation.accelerator_types
        ),
        field="acceleratorType",
        explain=_explain_accelerator_type,
    )


def _cel_cube_rule(generation: catalogue.Generation) -> str:
    """Returns `catalogue.follows_cube_rule` as one more alternative in CEL. A list of one stands in for a variable."""
    if not generation.max_cubes:
        return ""
    side, longest = catalogue.CUBE_SIDE, catalogue.LONGEST_SIDE
    chips = generation.max_cubes * side**3
    return (
        " || [self.topology.split('x').map(side, int(side))].exists(t, t.size() == 3"
        f" && t.all(side, side % {side} == 0 && side <= {longest})"
        f" && t[0] <= t[1] && t[1] <= t[2] && t[0] * t[1] * t[2] <= {chips})"
    )


def _topologies_message(generation: catalogue.Generation) -> str:
    if not generation.max_cubes:
        return f"unknown topology; valid for {generation.name}: " + ", ".join(generation.topologies)
    small = [t for t in generation.topologies if not catalogue.follows_cube_rule(generation, t)]
    return (
        f"unknown topology; valid for {generation.name}: {', '.join(small)}, and AxBxC with A <= B <= C, all multiples"
        f" of {catalogue.CUBE_SIDE}, with at most {generation.max_cubes} cubes of 64 chips"
    )


def _topology_rule(generation: catalogue.Generation) -> Rule:
    return Rule(
        cel=f"!has(self.topology) || !has(self.generation) || self.generation != '{generation.name}'"
        f" || self.topology in {cel_list(generation.topologies)}{_cel_cube_rule(generation)}",
        message=_topologies_message(generation),
        holds=lambda value: (
            value.topology is None
            or value.generation != generation.name
            or value.topology in generation.topologies
            or catalogue.follows_cube_rule(generation, value.topology)
        ),
        field="topology",
        explain=_explain_topology,
    )


_PREFIXES = tuple(g.name_prefix for g in catalogue.generations().values())

_KNOWN_PREFIX = Rule(
    cel="!has(self.acceleratorType) || "
    + " || ".join(f"self.acceleratorType.startsWith('{prefix}-')" for prefix in _PREFIXES),
    message="unknown accelerator type; names look like "
    + ", ".join(g.accelerator_types[min(1, len(g.shapes) - 1)] for g in catalogue.generations().values()),
    holds=lambda value: (
        value.accelerator_type is None or any(value.accelerator_type.startswith(prefix + "-") for prefix in _PREFIXES)
    ),
    field="acceleratorType",
    explain=_explain_accelerator_type,
)

REF_RULES = (
    _ONE_FORM,
    _KNOWN_GENERATION,
    _CATALOGUE_KNOWS_CHIPS,
    _KNOWN_PREFIX,
    *(_accelerator_type_rule(g) for g in catalogue.generations().values()),
    *(_topology_rule(g) for g in catalogue.generations().values()),
)


class SliceRef(ApiModel):
    """A slice by name, as in `recipe.tunedOn`."""

    rules: ClassVar[tuple[Rule, ...]] = REF_RULES

    accelerator_type: Annotated[str, Field(max_length=32)] | None = Field(
        None,
        description="Cloud TPU accelerator type, for example v5litepod-16. The alternative is generation with"
        " topology.",
    )
    generation: Annotated[str, Field(max_length=16)] | None = Field(
        None, description="TPU generation, for example v5e; needs topology."
    )
    topology: Annotated[str, Field(max_length=32, pattern=TOPOLOGY_PATTERN)] | None = Field(
        None, description="Chips along each axis of one slice, for example 4x4; needs generation."
    )
    chips_per_host: Annotated[int, Field(strict=True, ge=1, le=64)] | None = Field(
        None, description="Chips of one host; only for a generation that the catalogue lacks."
    )
    devices_per_chip: Annotated[int, Field(strict=True, ge=1, le=8)] | None = Field(
        None, description="XLA devices per chip, default 1; only together with chipsPerHost."
    )
    machine_type: ShortText | None = Field(
        None, description="GKE machine type; needed only if a topology exists on several, such as 2x4 on v5e and v6e."
    )
    count: Annotated[int, Field(strict=True, ge=1, le=MOST_SLICES)] = Field(
        1, description="Number of slices; several meet over the data center network."
    )


class Hardware(StrEnum):
    TPU = "TPU"
    CPU = "CPU"


def cel_generation_is(names: tuple[str, ...], ref: str = "self") -> str:
    """Returns CEL for whether the slice `ref` is of one of these generations, however it is named."""
    by_type = " || ".join(
        f"{ref}.acceleratorType.startsWith('{catalogue.generations()[name].name_prefix}-')" for name in names
    )
    return (
        f"((has({ref}.acceleratorType) && ({by_type}))"
        f" || (has({ref}.generation) && {ref}.generation in {cel_list(names)}))"
    )


def is_generation(value: SliceRef, names: tuple[str, ...]) -> bool:
    prefixes = tuple(catalogue.generations()[name].name_prefix + "-" for name in names)
    return value.generation in names or (value.accelerator_type or "").startswith(prefixes)


V2_NEEDS_CPU = Rule(
    cel=f"self.hardware == 'CPU' || !{cel_generation_is(('v2',))}",
    message="GKE has no v2 nodes; use v3, which also has two cores per chip, or hardware: CPU",
    holds=lambda value: value.hardware is Hardware.CPU or not is_generation(value, ("v2",)),
    field="hardware",
)


_NAME = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
# Every name in it becomes the value of a node label.
_RESERVATION = (
    f"(projects/(?P<project>{_NAME})/reservations/)?(?P<name>{_NAME})"
    f"(/reservationBlocks/(?P<block>{_NAME})(/reservationSubBlocks/(?P<subblock>{_NAME}))?)?"
)


class Reservation(NamedTuple):
    """A specific reservation. `project` is set if it belongs to another project than the cluster."""

    name: str
    project: str | None
    block: str | None
    subblock: str | None

    @staticmethod
    def parse(text: str) -> "Reservation | None":
        match = re.fullmatch(_RESERVATION, text)
        return Reservation(**match.groupdict()) if match else None


class ProvisioningType(StrEnum):
    ON_DEMAND = "OnDemand"
    SPOT = "Spot"
    FLEX_START = "FlexStart"
    QUEUED = "Queued"
    RESERVATION = "Reservation"


class Provisioning(ApiModel):
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.reservation) == (self.type == 'Reservation')",
            message="type Reservation and reservation, its name, need each other: give both or neither",
            holds=lambda way: (way.reservation is not None) == (way.type is ProvisioningType.RESERVATION),
            field="reservation",
        ),
        Rule(
            cel=f"!has(self.reservation) || self.reservation.matches('^{_RESERVATION}$')",
            message="give the reservation's name, or projects/PROJECT/reservations/NAME if another project shares it;"
            " /reservationBlocks/BLOCK and /reservationSubBlocks/SUBBLOCK may follow. Names consist of a-z, 0-9 and"
            " '-'",
            holds=lambda way: way.reservation is None or Reservation.parse(way.reservation) is not None,
            field="reservation",
        ),
    )

    type: ProvisioningType = Field(
        description="OnDemand: as long as the job needs them. Spot: cheaper, but reclaimed with 30 s notice. FlexStart:"
        " when there is capacity, for 7 days at most. Queued: through the ProvisioningRequests of Kueue. Reservation:"
        " from the specific one in the field reservation.",
    )
    reservation: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        None,
        description="Specific reservation to use, with type Reservation: NAME, or projects/PROJECT/reservations/NAME"
        " if another project shares it; /reservationBlocks/BLOCK may follow.",
    )


# TorchTPU 0.2 knows the chips of v4 and newer.
WITHOUT_TORCH_TPU = ("v2", "v3")

# GKE's autoscaler disables flex-start for the machine types of these generations.
_NO_FLEX_START = ("v3", "v4")


_FLEX_START_EXISTS = Rule(
    cel=f"!has(self.provisioning) || self.provisioning.type != 'FlexStart' || !{cel_generation_is(_NO_FLEX_START)}",
    message=f"{' and '.join(_NO_FLEX_START)} have no flex-start; use Spot, Reservation or OnDemand",
    holds=lambda value: (
        value.provisioning is None
        or value.provisioning.type is not ProvisioningType.FLEX_START
        or not is_generation(value, _NO_FLEX_START)
    ),
    field="provisioning",
)


def _multislice_rule(generation: catalogue.Generation) -> Rule:
    """Returns the rule that GKE joins slices only if each has several hosts."""
    single = [shape for shape in generation.shapes if shape.hosts == 1]
    names = tuple(s.accelerator_type for s in single if s.default)
    topologies = tuple(s.topology for s in single if s.default)
    # 2x4 on v5e and v6e is one host only on the machine type of eight chips.
    machine_types = tuple(s.machine_type.name for s in single if s.machine_type and not s.machine_type.multi_host)
    on_machine = (
        f" || (has(self.machineType) && self.machineType in {cel_list(machine_types)})" if machine_types else ""
    )
    smallest = next(shape for shape in generation.shapes if shape.hosts > 1 and shape.verified)
    return Rule(
        cel="self.hardware == 'CPU' || self.count == 1"
        f" || !((has(self.acceleratorType) && self.acceleratorType in {cel_list(names)})"
        f" || (has(self.generation) && self.generation == '{generation.name}' && has(self.topology)"
        f" && self.topology in {cel_list(topologies)}){on_machine})",
        message=f"count above 1 needs slices with several hosts; the smallest of {generation.name} is"
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
    message="count above 1 needs slices with several hosts: more chips in topology than chipsPerHost",
    holds=_declared_hosts_suffice,
    field="count",
)

# Google's overview of Multislice asks for v4 or newer. GKE has no v2 nodes; another rule says so.
_NO_MULTISLICE = ("v3",)

_MULTISLICE_EXISTS = Rule(
    cel=f"self.hardware == 'CPU' || self.count == 1 || !{cel_generation_is(_NO_MULTISLICE)}",
    message="v3 slices cannot be joined: Multislice needs v4 or newer; use one larger slice",
    holds=lambda value: value.hardware is Hardware.CPU or value.count == 1 or not is_generation(value, _NO_MULTISLICE),
    field="count",
)

MULTISLICE_RULES = (
    _MULTISLICE_EXISTS,
    *(
        _multislice_rule(generation)
        for generation in catalogue.generations().values()
        if generation.on_gke and generation.name not in _NO_MULTISLICE
    ),
    _DECLARED_MULTISLICE,
)


# Chips per host in every slice of several hosts. The host of a smaller slice may have more or fewer, which does not
# matter: 256 such hosts are far below the bound.
_CHIPS_PER_HOST = 4


def _size_per_chip(generation: catalogue.Generation) -> int:
    """Returns how much one chip adds to the number in an accelerator type's name: some count chips, some cores."""
    shape = generation.shapes[0]
    return int(shape.accelerator_type.rpartition("-")[2]) // shape.chips


_SIZES_PER_CHIP = {g.name_prefix: _size_per_chip(g) for g in catalogue.generations().values()}


def _chips_per_slice(value: SliceRef) -> int:
    if value.accelerator_type is not None:
        prefix, _, size = value.accelerator_type.rpartition("-")
        per_chip = _SIZES_PER_CHIP.get(prefix)
        return int(size) // per_chip if per_chip and size.isdecimal() else 0
    return math.prod(int(side) for side in (value.topology or "0").split("x"))


def _cel_chips_per_slice(ref: str) -> str:
    # CEL has no local variables: a list of one stands in for a variable.
    per_chip = " : ".join(f"{ref}.acceleratorType.startsWith('{name}-') ? {n}" for name, n in _SIZES_PER_CHIP.items())
    return (
        f"(has({ref}.acceleratorType)"
        f" ? ({ref}.acceleratorType.matches('^[a-z0-9]+-[0-9]{{1,9}}$')"
        f" ? int({ref}.acceleratorType.split('-')[1]) / ({per_chip} : 1) : 0)"
        f" : has({ref}.topology) ? [{ref}.topology.split('x').map(side, int(side))]"
        ".map(t, t[0] * t[1] * (t.size() == 3 ? t[2] : 1))[0] : 0)"
    )


def requested_chips(value: SliceRef) -> int:
    """Returns the chips of all slices; 0 if the reference names no slice."""
    return value.count * _chips_per_slice(value)


def cel_chips(ref: str) -> str:
    """Returns `requested_chips` in CEL, for the slice reference at `ref`."""
    return f"{ref}.count * {_cel_chips_per_slice(ref)}"


def requested_hosts_per_slice(value: SliceRef) -> int:
    """Returns the hosts of one slice as the bound on hosts counts them; 0 if the reference names no slice.

    Rounds up, so that a slice of one host counts as two at the most.
    """
    return -(-_chips_per_slice(value) // (value.chips_per_host or _CHIPS_PER_HOST))


def cel_hosts_per_slice(ref: str) -> str:
    """Returns `requested_hosts_per_slice` in CEL, for the slice reference at `ref`."""
    per_host = f"[has({ref}.chipsPerHost) ? {ref}.chipsPerHost : {_CHIPS_PER_HOST}]"
    # CEL cannot round a quotient up.
    return f"{per_host}.map(n, ({_cel_chips_per_slice(ref)} + n - 1) / n)[0]"


def requested_hosts(value: SliceRef) -> int:
    return value.count * requested_hosts_per_slice(value)


_HOSTS_ARE_BOUNDED = Rule(
    cel=f"self.count * {cel_hosts_per_slice('self')} <= {MAX_HOSTS}",
    # Names no number of hosts: the API server's cost estimate treats text made of a number as unbounded.
    message=f"a job can have at most {MAX_HOSTS} hosts over all slices; use fewer or smaller slices",
    holds=lambda value: requested_hosts(value) <= MAX_HOSTS,
    explain=lambda value: (
        f"{requested_hosts(value)} hosts are too many: a job can have at most {MAX_HOSTS} over all slices"
    ),
)


class Formation(StrEnum):
    NODE_POOL = "NodePool"
    SUB_SLICE = "SubSlice"
    DYNAMIC_SLICE = "DynamicSlice"


# GKE labels the parts of larger pools of these generations, and forms slices of newer ones when they are wanted.
_DIVIDED = ("v4", "v5e", "v5p", "v6e")
_BEFORE_DYNAMIC = tuple(name for name in _KNOWN if name != "tpu7x")

_FORMATION_EXISTS = Rule(
    cel=f"self.formation == 'NodePool' || (self.formation == 'SubSlice' ? {cel_generation_is(_DIVIDED)}"
    f" : !{cel_generation_is(_BEFORE_DYNAMIC)})",
    message=f"SubSlice exists on {', '.join(_DIVIDED)}, and DynamicSlice on tpu7x and newer; elsewhere leave it out",
    holds=lambda value: (
        value.formation is Formation.NODE_POOL
        or (
            is_generation(value, _DIVIDED)
            if value.formation is Formation.SUB_SLICE
            else not is_generation(value, _BEFORE_DYNAMIC)
        )
    ),
    field="formation",
)


class Slice(SliceRef):
    rules: ClassVar[tuple[Rule, ...]] = (
        *REF_RULES,
        V2_NEEDS_CPU,
        _FORMATION_EXISTS,
        _FLEX_START_EXISTS,
        *MULTISLICE_RULES,
        _HOSTS_ARE_BOUNDED,
    )

    provisioning: Provisioning | None = Field(
        None, description="How GKE provides and charges the chips; on demand by default."
    )
    hardware: Hardware = Field(
        Hardware.TPU, description="TPU, or CPU to rehearse the job with the same number of hosts on ordinary nodes."
    )
    formation: Formation = Field(
        Formation.NODE_POOL,
        description="What the nodes of a slice are. NodePool: a node pool. SubSlice: a part of a larger pool."
        " DynamicSlice: nodes that GKE's slice controller joins.",
    )
