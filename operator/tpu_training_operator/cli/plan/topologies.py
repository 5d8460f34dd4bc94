"""`tpujob topologies` lists the TPU slices that exist."""

import click

from tpu_training_operator.api.catalogue import Shape, generations, shapes_of_type
from tpu_training_operator.cli.common.terminal import print_columns, print_document

_HEADER = ("ACCELERATOR TYPE", "TOPOLOGY", "CHIPS", "HOSTS", "REPLICAS", "CHIPS/HOST", "MACHINE TYPE", "NOTE")


@click.command()
@click.option("--generation", type=click.Choice(list(generations())), help="List only this generation.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def topologies(generation: str | None, output: str) -> None:
    """List the TPU slices that a job can run on."""
    selection = [known for name, known in generations().items() if generation in (None, name)]
    shapes = [shape for known in selection for shape in known.shapes]
    if output == "json":
        print_document([_as_json(shape) for shape in shapes], output)
        return
    print_columns([_HEADER, *map(_row, shapes)])


def _row(shape: Shape) -> tuple[str, ...]:
    return (
        shape.accelerator_type,
        shape.topology,
        str(shape.chips),
        str(shape.hosts),
        str(shape.devices),
        str(shape.chips_per_host),
        shape.machine_type.name if shape.machine_type else "-",
        "; ".join(_notes(shape)),
    )


def _notes(shape: Shape) -> list[str]:
    notes = []
    if shape.machine_type is None:
        notes.append("not on GKE, only for tpujob plan and rehearsals")
    namesakes = shapes_of_type(shape.accelerator_type)
    if shape != namesakes[0]:
        also = " and machineType" if shape.topology == namesakes[0].topology else ""
        notes.append("select it by topology" + also)
    if not shape.verified:
        notes.append("listed by only one source")
    return notes


def _as_json(shape: Shape) -> dict[str, object]:
    generation = generations()[shape.generation]
    return {
        "generation": shape.generation,
        "acceleratorType": shape.accelerator_type,
        "topology": shape.topology,
        "chips": shape.chips,
        "hosts": shape.hosts,
        "replicas": shape.devices,
        "chipsPerHost": shape.chips_per_host,
        "machineType": shape.machine_type.name if shape.machine_type else None,
        "nodeLabel": shape.machine_type.label if shape.machine_type else None,
        "hostBounds": list(shape.host_bounds),
        "processesPerHost": shape.chips_per_host * generation.processes_per_chip,
        "hbmGib": shape.chips * generation.hbm_gib_per_chip,
        "bf16Tflops": shape.chips * generation.bf16_tflops_per_chip,
        "default": shape.default,
        "verified": shape.verified,
    }
