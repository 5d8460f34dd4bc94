"""`tpujob crd` prints the CustomResourceDefinition."""

import click
import yaml

from tpu_training_operator.api.crd import custom_resource_definition


@click.command()
def crd() -> None:
    """Print the CustomResourceDefinition."""
    click.echo(crd_text(), nl=False)


def crd_text() -> str:
    """Returns the definition as it stands in `crds/`."""
    return yaml.dump(custom_resource_definition(), Dumper=_WithoutAnchors, sort_keys=False, width=120)


class _WithoutAnchors(yaml.SafeDumper):
    """Writes repeated parts in full: not every tool that reads the file follows an anchor."""

    def ignore_aliases(self, data: object) -> bool:
        return True
