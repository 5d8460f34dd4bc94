"""Finds mistakes in a PromQL query on the operator's metrics, as far as possible without data.

Prometheus does not report a name or label value that does not exist: the alert never fires, the panel stays empty.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import promql_parser
from promql_parser import AggModifierType, AggregateExpr, Matcher, MatchOp, VectorSelector

from tpu_training_operator.runtime.metrics import Metrics

Node = TypeVar("Node")

# Prometheus adds these to every series, however it is configured to scrape.
TARGET_LABELS = frozenset({"job", "instance", "namespace", "pod"})


@dataclass(frozen=True)
class Exported:
    """The existing metrics: by name, the values of each label."""

    labels: dict[str, dict[str, frozenset[str]]]

    @staticmethod
    def now() -> "Exported":
        found: dict[str, dict[str, set[str]]] = {}
        for family in Metrics().registry.collect():
            for sample in family.samples:
                labels = found.setdefault(sample.name, {})
                for label, value in sample.labels.items():
                    labels.setdefault(label, set()).add(value)
        return Exported({name: {k: frozenset(v) for k, v in labels.items()} for name, labels in found.items()})

    def mistakes(self, query: str) -> list[str]:
        try:
            parsed = promql_parser.parse(query)
        except ValueError as error:
            return [f"{query}: {error}"]
        found: list[str] = []
        for selector in _all(parsed, VectorSelector):
            found += self._in_selector(selector)
        for aggregation in _all(parsed, AggregateExpr):
            found += self._in_grouping(aggregation)
        return found

    def result_labels(self, query: str) -> set[str]:
        """Labels that the query's result may have."""
        parsed = promql_parser.parse(query)
        groupings = [set(one.modifier.labels) for one in _all(parsed, AggregateExpr) if one.modifier]
        selected = {label for one in _all(parsed, VectorSelector) for label in self._of(one)}
        return set.union(*groupings) if groupings else selected

    def _of(self, selector: VectorSelector) -> set[str]:
        return {*self.labels.get(selector.name or "", {}), *TARGET_LABELS}

    def _in_selector(self, selector: VectorSelector) -> Iterator[str]:
        if selector.name not in self.labels:
            yield f"no metric {selector.name}"
            return
        known = self.labels[selector.name]
        for matcher in selector.matchers.matchers:
            if matcher.name in TARGET_LABELS:
                continue
            if matcher.name not in known:
                yield f"{selector.name} has no label {matcher.name}"
            else:
                yield from _in_matcher(selector.name, matcher, known[matcher.name])

    def _in_grouping(self, aggregation: AggregateExpr) -> Iterator[str]:
        if aggregation.modifier is None or aggregation.modifier.type != AggModifierType.By:
            return
        there = {label for selector in _all(aggregation.expr, VectorSelector) for label in self._of(selector)}
        for label in aggregation.modifier.labels:
            if label not in there:
                yield f"grouped by {label}, which nothing there has"


def _in_matcher(name: str, matcher: Matcher, values: frozenset[str]) -> Iterator[str]:
    is_text = matcher.op in (MatchOp.Equal, MatchOp.NotEqual)
    for pattern in [re.escape(matcher.value)] if is_text else matcher.value.split("|"):
        if not any(re.fullmatch(pattern, value) for value in values):
            yield f"{name} has no {matcher.name} {pattern}"


def _all(parsed: promql_parser.Expr, kind: type[Node]) -> list[Node]:
    found: list[Node] = []

    def visit(node: object) -> None:
        if isinstance(node, kind):
            found.append(node)

    promql_parser.walk(parsed, visit)
    return found
