"""The catalogue is arithmetic over a list: every row is consistent, and some match examples from Google's documents."""

import math

import pytest

from tpu_training_operator.api.catalogue import (
    Shape,
    generations,
    nearest_accelerator_types,
    nearest_topologies,
    shapes_of_topology,
    shapes_of_type,
)

SHAPES = [shape for generation in generations().values() for shape in generation.shapes]


def _name(shape: Shape) -> str:
    machine_type = shape.machine_type.name if shape.machine_type else "no machine type"
    return f"{shape.generation} {shape.topology} {machine_type}"


def _chips(shape: Shape) -> int:
    return math.prod(map(int, shape.topology.split("x")))


def test_hosts_times_chips_per_host_is_the_number_of_chips() -> None:
    wrong = [
        _name(shape)
        for shape in SHAPES
        if (shape.chips, shape.hosts * shape.chips_per_host, shape.devices)
        != (chips := _chips(shape), chips, chips * generations()[shape.generation].devices_per_chip)
    ]
    assert wrong == []


def test_only_multi_host_machine_types_form_slices_of_several_hosts() -> None:
    several = [shape for shape in SHAPES if shape.hosts > 1 and shape.machine_type is not None]
    assert [_name(shape) for shape in several if shape.machine_type and not shape.machine_type.multi_host] == []


def test_no_shape_is_listed_twice_on_one_machine_type() -> None:
    assert len(set(map(_name, SHAPES))) == len(SHAPES)


def test_every_accelerator_type_has_one_default_shape_or_one_shape() -> None:
    names = sorted({shape.accelerator_type for shape in SHAPES})
    flags = {name: [shape.default for shape in shapes_of_type(name)] for name in names}
    assert {name: defaults for name, defaults in flags.items() if defaults.count(True) != 1 and len(defaults) > 1} == {}


def test_the_default_shape_comes_first() -> None:
    assert [shape for shape in SHAPES if shape.default and shapes_of_type(shape.accelerator_type)[0] != shape] == []


@pytest.mark.parametrize(
    ("name", "topology", "hosts", "chips", "devices"),
    [
        # Two cores per chip in the name; v2, v3 and tpu7x give each core to a replica of its own.
        ("v2-8", "2x2", 1, 4, 8),
        ("v2-32", "4x4", 4, 16, 32),
        ("v3-8", "2x2", 1, 4, 8),
        ("v3-32", "4x4", 4, 16, 32),
        ("v4-128", "4x4x4", 16, 64, 64),
        ("v4-512", "4x8x8", 64, 256, 256),
        ("v4-2048", "8x8x16", 256, 1024, 1024),
        ("v5p-32", "2x2x4", 4, 16, 16),
        ("tpu7x-128", "4x4x4", 16, 64, 128),
        # Chips in the name.
        ("v5litepod-16", "4x4", 4, 16, 16),
        ("v6e-16", "4x4", 4, 16, 16),
        # One host of eight chips exists, too; two hosts of four are meant by the bare name.
        ("v5litepod-8", "2x4", 2, 8, 8),
        ("v6e-8", "2x4", 2, 8, 8),
    ],
)
def test_what_an_accelerator_type_means(name: str, topology: str, hosts: int, chips: int, devices: int) -> None:
    shape = shapes_of_type(name)[0]
    assert (shape.topology, shape.hosts, shape.chips, shape.devices) == (topology, hosts, chips, devices)


def test_a_shape_on_two_machine_types_offers_both_with_the_larger_gang_first() -> None:
    shapes = shapes_of_topology("v5e", "2x4")
    assert [(s.machine_type.name, s.hosts) for s in shapes if s.machine_type] == [
        ("ct5lp-hightpu-4t", 2),
        ("ct5lp-hightpu-8t", 1),
    ]


def test_what_does_not_exist_has_no_shapes() -> None:
    assert shapes_of_type("v5litepod-17") == ()
    assert shapes_of_topology("v5e", "4x4x4") == ()
    assert shapes_of_topology("v9", "4x4") == ()


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("v5litepod-12", "v5litepod-16"),  # a size between two
        ("v5e-16", "v5litepod-16"),  # the generation's name instead of the prefix
        ("v5litpod-16", "v5litepod-16"),  # a slip of the finger
        ("v4-99999999999999999999", "v4-8192"),
        ("v4-0", "v4-8"),
        ("v4-²", "v4-8"),  # a digit to Unicode, but no number
    ],
)
def test_the_accelerator_type_that_was_meant_is_among_the_nearest(wrong: str, expected: str) -> None:
    assert expected in nearest_accelerator_types(wrong)


def test_even_a_name_unlike_any_other_gets_suggestions() -> None:
    assert nearest_accelerator_types("") != []
    assert nearest_accelerator_types("gpu") != []


@pytest.mark.parametrize(
    ("generation", "wrong", "expected"),
    [
        ("v5e", "4x5", "4x4"),
        ("v4", "4x4", "2x2x4"),
        ("v5e", "4*4", "4x4"),
        ("v4", "0x0x0", "2x2x1"),
        ("v5e", "4x²", "4x4"),
    ],
)
def test_the_topology_of_about_as_many_chips_is_among_the_nearest(generation: str, wrong: str, expected: str) -> None:
    assert expected in nearest_topologies(generation, wrong)


@pytest.mark.parametrize(
    ("generation", "topology", "hosts"),
    [("v4", "4x4x20", 80), ("v5p", "4x4x16", 64), ("tpu7x", "4x4x4", 16), ("tpu7x", "4x8x20", 160)],
)
def test_whole_cubes_are_a_slice_even_if_no_list_names_it(generation: str, topology: str, hosts: int) -> None:
    assert [shape.hosts for shape in shapes_of_topology(generation, topology)] == [hosts]


@pytest.mark.parametrize(
    ("generation", "topology"),
    [
        ("v4", "8x4x4"),  # sides out of order
        ("v4", "4x4x6"),  # no multiple of 4
        ("v4", "4x4x260"),  # longer than any side
        ("v4", "16x16x20"),  # more than 64 cubes
        ("v5e", "4x4x4"),  # two dimensions only
    ],
)
def test_what_breaks_the_cube_rule_is_not_a_slice(generation: str, topology: str) -> None:
    assert shapes_of_topology(generation, topology) == ()
