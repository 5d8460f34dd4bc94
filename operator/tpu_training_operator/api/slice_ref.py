"""Which TPU slice: by accelerator type or by topology. What `spec.slice` and `recipe.tunedOn` have in common."""

import re
from typing import Annotated, ClassVar

from pydantic import Field

from tpu_training_operator.api import catalogue
from tpu_training_operator.api.model import TOPOLOGY_PATTERN, ApiModel, Rule, ShortText

AcceleratorType = Annotated[str, Field(max_length=32)]
Topology = Annotated[str, Field(max_length=32, pattern=TOPOLOGY_PATTERN)]
GenerationName = Annotated[str, Field(max_length=16)]

_KNOWN = tuple(catalogue.generations())
# From tpu7x on GKE's node label is the generation's own name, so a newer one can be used before this catalogue has it.
NEWER = re.compile(r"tpu[0-9]+[a-z]?")


def cel_list(values: tuple[str, ...]) -> str:
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"


def _one_form(value: "SliceRef") -> bool:
    if value.accelerator_type is not None:
        return value.generation is None and value.topology is None
    return value.generation is not None and value.topology is not None


def _explain_accelerator_type(value: "SliceRef") -> str:
    nearest = ", ".join(catalogue.nearest_accelerator_types(value.accelerator_type or ""))
    return f"there is no accelerator type {value.accelerator_type!r}; nearest: {nearest}"


def _explain_topology(value: "SliceRef") -> str:
    nearest = ", ".join(catalogue.nearest_topologies(value.generation or "", value.topology or ""))
    return f"{value.generation} has no topology {value.topology!r}; nearest: {nearest}"


_ONE_FORM = Rule(
    cel="has(self.acceleratorType) ? !has(self.generation) && !has(self.topology)"
    " : has(self.generation) && has(self.topology)",
    message="give either acceleratorType (like v5litepod-16) or generation and topology (like v5e and 4x4),"
    " not both and not neither",
    holds=_one_form,
)


def is_newer(value: "SliceRef") -> bool:
    return value.generation not in _KNOWN and NEWER.fullmatch(value.generation or "") is not None


_GENERATIONS_MESSAGE = f"known generations are {', '.join(_KNOWN)}; a newer one (like tpu8t) needs chipsPerHost as well"

_KNOWN_GENERATION = Rule(
    cel=f"!has(self.generation) || self.generation in {cel_list(_KNOWN)}"
    f" || (self.generation.matches('^{NEWER.pattern}$') && has(self.chipsPerHost))",
    message=_GENERATIONS_MESSAGE,
    holds=lambda value: (
        value.generation is None or value.generation in _KNOWN or (is_newer(value) and value.chips_per_host is not None)
    ),
    field="generation",
    explain=lambda value: f"{value.generation!r} is not known; {_GENERATIONS_MESSAGE}",
)

_CATALOGUE_KNOWS_CHIPS = Rule(
    cel="(!has(self.chipsPerHost) && !has(self.devicesPerChip))"
    f" || (has(self.generation) && !(self.generation in {cel_list(_KNOWN)}))",
    message="chipsPerHost and devicesPerChip are only for generations newer than the catalogue; leave them out",
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
    """`catalogue.follows_cube_rule` in CEL, as one more alternative; the list of one stands in for a variable."""
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
        f" of {catalogue.CUBE_SIDE}, of at most {generation.max_cubes} cubes (64 chips each)"
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
    """A slice by name; `recipe.tunedOn` is one."""

    rules: ClassVar[tuple[Rule, ...]] = REF_RULES

    accelerator_type: AcceleratorType | None = Field(
        None, description="Cloud TPU accelerator type, for example v5litepod-16."
    )
    generation: GenerationName | None = Field(None, description="TPU generation; goes with topology.")
    topology: Topology | None = Field(None, description="Chips along each axis, for example 4x4; goes with generation.")
    chips_per_host: Annotated[int, Field(strict=True, ge=1, le=64)] | None = Field(
        None, description="Chips of one host; only for a generation that the catalogue does not have yet."
    )
    devices_per_chip: Annotated[int, Field(strict=True, ge=1, le=8)] | None = Field(
        None, description="XLA devices per chip; goes with chipsPerHost, default 1."
    )
    machine_type: ShortText | None = Field(
        None, description="GKE machine type, where a shape exists on two (2x4 on v5e and v6e)."
    )
    count: Annotated[int, Field(strict=True, ge=1, le=256)] = Field(
        1, description="Number of slices; more than one is multislice."
    )
