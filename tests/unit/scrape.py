"""What Prometheus would read from the operator's metrics."""

from prometheus_client.parser import text_string_to_metric_families

from tpu_training_operator.runtime.metrics import Metrics

Series = tuple[str, frozenset[tuple[str, str]]]


def scrape(metrics: Metrics) -> dict[Series, float]:
    """(name, labels) -> value, of every series, as it stands in the text that is served."""
    text, _ = metrics.exposition()
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """The one series of this name that has these labels; `class_` for the label that Python has no name for."""
    wanted = {(key.rstrip("_"), text) for key, text in labels.items()}
    (found,) = [number for (series, own), number in scrape(metrics).items() if series == name and wanted <= own]
    return found


def counted(metrics: Metrics, name: str, label: str) -> dict[str, float]:
    """What is not 0 in a family, by the value of one of its labels."""
    found = {own: number for (series, own), number in scrape(metrics).items() if series == name and number}
    return {dict(own)[label]: number for own, number in found.items()}
