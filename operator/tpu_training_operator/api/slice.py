"""`spec.slice` and `recipe.tunedOn`: which TPU slice. Both name it by accelerator type or by topology."""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tpu_training_operator.api import catalogue
from tpu_training_operator.api.model import ApiModel, Rule, ShortText

AcceleratorType = Annotated[str, Field(max_length=32)]
Topology = Annotated[str, Field(max_length=32)]
GenerationName = Literal["v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"]


class Hardware(StrEnum):
    TPU = "TPU"
    CPU = "CPU"


def _cel_list(values: tuple[str, ...]) -> str:
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


def _accelerator_type_rule(generation: catalogue.Generation) -> Rule:
    prefix = generation.name_prefix + "-"
    return Rule(
        cel=f"!has(self.acceleratorType) || !self.acceleratorType.startsWith('{prefix}')"
        f" || self.acceleratorType in {_cel_list(generation.accelerator_types)}",
        message=f"unknown accelerator type; valid {prefix}N are N = "
        + ", ".join(name.removeprefix(prefix) for name in generation.accelerator_types),
        holds=lambda value: (
            not (value.accelerator_type or "").startswith(prefix)
            or value.accelerator_type in generation.accelerator_types
        ),
        field="acceleratorType",
        explain=_explain_accelerator_type,
    )


def _topology_rule(generation: catalogue.Generation) -> Rule:
    return Rule(
        cel=f"!has(self.topology) || !has(self.generation) || self.generation != '{generation.name}'"
        f" || self.topology in {_cel_list(generation.topologies)}",
        message=f"unknown topology; valid for {generation.name}: " + ", ".join(generation.topologies),
        holds=lambda value: (
            value.topology is None or value.generation != generation.name or value.topology in generation.topologies
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

_SLICE_RULES = (
    _ONE_FORM,
    _KNOWN_PREFIX,
    *(_accelerator_type_rule(g) for g in catalogue.generations().values()),
    *(_topology_rule(g) for g in catalogue.generations().values()),
)


class SliceRef(ApiModel):
    """A slice by name; `recipe.tunedOn` is one."""

    rules: ClassVar[tuple[Rule, ...]] = _SLICE_RULES

    accelerator_type: AcceleratorType | None = Field(
        None, description="Cloud TPU accelerator type, for example v5litepod-16."
    )
    generation: GenerationName | None = Field(None, description="TPU generation; goes with topology.")
    topology: Topology | None = Field(None, description="Chips along each axis, for example 4x4; goes with generation.")
    machine_type: ShortText | None = Field(
        None, description="GKE machine type, where a shape exists on two (2x4 on v5e and v6e)."
    )
    count: Annotated[int, Field(strict=True, ge=1, le=256)] = Field(
        1, description="Number of slices; more than one is multislice."
    )


V2_NEEDS_CPU = Rule(
    cel="self.hardware == 'CPU' || !((has(self.acceleratorType) && self.acceleratorType.startsWith('v2-'))"
    " || (has(self.generation) && self.generation == 'v2'))",
    message="GKE has no v2 nodes: use v3, the nearest generation with two cores per chip, or hardware: CPU",
    holds=lambda value: (
        value.hardware is Hardware.CPU
        or not ((value.accelerator_type or "").startswith("v2-") or value.generation == "v2")
    ),
    field="hardware",
)


class Slice(SliceRef):
    """`spec.slice`: what the job runs on."""

    rules: ClassVar[tuple[Rule, ...]] = (*_SLICE_RULES, V2_NEEDS_CPU)

    hardware: Hardware = Field(
        Hardware.TPU,
        description="TPU, or CPU: a rehearsal, the same gang of hosts without google.com/tpu.",
    )
