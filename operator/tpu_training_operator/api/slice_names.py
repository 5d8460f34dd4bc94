"""Tells what a name is that is no accelerator type: a generation, a node's label, a machine type, a topology, a GPU."""

import re

from tpu_training_operator.api import catalogue
from tpu_training_operator.api.model import TOPOLOGY_PATTERN

_GPU = re.compile(r"(nvidia|amd|tesla|gpu|[abhlpv]\d{2,3}s?\b|t4\b|l4\b|rtx|mi\d{3}|gb\d{3})")


def generation_called(name: str) -> catalogue.Generation | None:
    """Returns the generation that somebody calls so: v5e, V5E, tpu-v5e, v5litepod, or the label of its nodes."""
    small = name.strip().lower()
    bare = re.sub(r"^(cloud[ -])?tpu[ _-]?(?=v)", "", small)
    for generation in catalogue.generations().values():
        labels = {shape.machine_type.label for shape in generation.shapes if shape.machine_type}
        if small in labels or bare in (generation.name, generation.name_prefix):
            return generation
    return None


def explain_accelerator_type(name: str) -> str:
    """Says why no accelerator type has the name, and which has."""
    machines = {s.machine_type.name: g for g in catalogue.generations().values() for s in g.shapes if s.machine_type}
    if generation := generation_called(name) or machines.get(name):
        is_label, is_machine = name.startswith("tpu-"), name in machines
        kind = "a machine type of" if is_machine else "a node label of" if is_label else "the name of the generation"
        shape = next(shape for shape in generation.shapes if shape.hosts > 1 and shape.default)
        return (
            f"{name!r} is {kind} {generation.name}, not an accelerator type; write {generation.name_prefix}-N, such as"
            f" {shape.accelerator_type}, or generation: {generation.name} and topology: {shape.topology}"
        )
    if re.fullmatch(TOPOLOGY_PATTERN, name):
        return f"{name!r} is a topology; write it as topology, and name the generation, such as v5e, beside it"
    if not name or _GPU.match(name.lower()):
        return f"{name!r} is {'a GPU' if name else 'empty'}; write an accelerator type of TPUs, such as v5litepod-8"
    if (several := re.fullmatch(r"([1-9]\d*) *[x*] *(.+)", name)) and catalogue.shapes_of_type(several[2]):
        return f"{name!r} is several slices; write {several[2]}, and count: {several[1]} beside it"
    small = re.sub(r"^tpu[ _-]?(?=v)", "", name.strip().lower()).replace("_", "-").replace(" ", "-")
    nearest = [small] if catalogue.shapes_of_type(small) else catalogue.nearest_accelerator_types(small)
    return f"there is no accelerator type {name!r}; nearest: {', '.join(nearest)}"


def generation_hint(name: str) -> str:
    """Says which generation is meant by another name for it; empty if none is."""
    generation = generation_called(name) or generation_called(re.sub(r"-\d+$", "", name))
    return f"{name!r} is not the generation's name; write {generation.name}" if generation else ""
