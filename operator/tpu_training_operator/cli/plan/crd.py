"""`tpujob crd` prints the CustomResourceDefinition, for `kubectl apply -f -` and for `crds/`."""

import click
import yaml

from tpu_training_operator.api.crd import custom_resource_definition


@click.command()
def crd() -> None:
    """Print the CustomResourceDefinition."""
    click.echo(crd_text(), nl=False)


def crd_text() -> str:
    """The definition as `crds/` has it."""
    return yaml.safe_dump(custom_resource_definition(), sort_keys=False, width=120)
