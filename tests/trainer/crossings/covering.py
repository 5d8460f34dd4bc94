"""Covering arrays: few rows of values in which every pair of values occurs, or every triple.

Greedy: each row begins with a tuple that no row has yet and takes, feature by feature, the value that brings the most
further ones. Then values that no tuple needs in their row change at random, to dearer ones ever less often: one change
makes room for another, and a row that no tuple needs any more goes. The same input always gives the same rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from random import Random

Row = Mapping[str, str]
Pairs = frozenset[tuple[str, str]]
"""Some of a row's features, each with its value."""

CANDIDATES = 12
"""Orders of the features in which a row is tried; the best row is taken."""

WARM = 8.0
"""A change that costs so much more is made by one in three at first."""


def covering(
    features: Mapping[str, Sequence[str]],
    forbidden: Sequence[Row],
    strength: int = 2,
    begin: Sequence[Row] = (),
    cost: Callable[[Row], float] = lambda row: 1.0,
    changes: int = 350,
) -> list[dict[str, str]]:
    """Returns rows without a forbidden combination in which every allowed tuple of `strength` values occurs.

    `begin`: parts of rows, each of which is in a row, too. `cost`: what a row costs. `changes`: how many are tried at
    last, for each row.
    """
    random = Random(0)
    rows: list[dict[str, str]] = []
    left = dict.fromkeys(allowed(features, forbidden, strength))
    starts: list[Row] = list(begin)
    while starts or left:
        start = starts.pop(0) if starts else dict(next(iter(left)))
        tried = [_completed(start, _shuffled(features, random), forbidden, left, strength) for _ in range(CANDIDATES)]
        best = max(tried, key=lambda row: sum(each in left for each in tuples(row, strength)))
        for each in tuples(best, strength):
            left.pop(each, None)
        rows.append({name: best[name] for name in features})
    _cheapen(rows, features, forbidden, strength, begin, cost, changes, random)
    return rows


def allowed(features: Mapping[str, Sequence[str]], forbidden: Sequence[Row], strength: int) -> Iterator[Pairs]:
    """Yields every tuple of values of different features that a row may contain."""
    for names in combinations(features, strength):
        for values in product(*(features[name] for name in names)):
            row = dict(zip(names, values, strict=True))
            if fits(row, forbidden) and _complete(row, features, forbidden) is not None:
                yield frozenset(row.items())


def tuples(row: Row, strength: int) -> Iterator[Pairs]:
    """Yields the tuples of `strength` values that occur in a row."""
    return map(frozenset, combinations(row.items(), strength))


def fits(row: Row, forbidden: Sequence[Row]) -> bool:
    """Returns whether a row, or a part of one, has no forbidden combination."""
    values = row.items()
    return not any(rule.items() <= values for rule in forbidden)


def _cheapen(
    rows: list[dict[str, str]],
    features: Mapping[str, Sequence[str]],
    forbidden: Sequence[Row],
    strength: int,
    begin: Sequence[Row],
    cost: Callable[[Row], float],
    changes: int,
    random: Random,
) -> None:
    """Changes values, and drops rows, wherever other rows have all that is lost."""

    def with_value(row: Row, name: str) -> Iterator[Pairs]:
        others = [pair for pair in row.items() if pair[0] != name]
        yield from (frozenset(((name, row[name]), *each)) for each in combinations(others, strength - 1))
        yield from (frozenset(part.items()) for part in begin if name in part and part.items() <= row.items())

    def with_row(row: Row) -> Iterator[Pairs]:
        yield from tuples(row, strength)
        yield from (frozenset(part.items()) for part in begin if part.items() <= row.items())

    found = Counter(each for row in rows for each in with_row(row))
    names, tries = list(features), changes * len(rows)
    for number in range(tries):
        row, name = random.choice(rows), random.choice(names)
        changed = {**row, name: random.choice(features[name])}
        if changed == row or any(found[each] == 1 for each in with_value(row, name)):
            continue
        if all(found[each] > 1 for each in with_row(row)):
            found.subtract(with_row(row))
            rows.remove(row)
            continue
        dearer = cost(changed) - cost(row)
        warmth = WARM * (1 - number / tries)
        if fits(changed, forbidden) and (dearer <= 0 or random.random() < math.exp(-dearer / warmth)):
            found.subtract(with_value(row, name))
            found.update(with_value(changed, name))
            row.update(changed)


def _shuffled(features: Mapping[str, Sequence[str]], random: Random) -> Mapping[str, Sequence[str]]:
    names = random.sample(list(features), len(features))
    return {name: random.sample(list(features[name]), len(features[name])) for name in names}


def _completed(
    start: Row, features: Mapping[str, Sequence[str]], forbidden: Sequence[Row], left: Mapping[Pairs, None], size: int
) -> dict[str, str]:
    """Returns a row that contains `start`, filled in the order of `features`."""
    row = dict(start)
    for name in features:
        if name in row:
            continue
        others = [frozenset(each) for each in combinations(row.items(), size - 1)]
        values = sorted(
            features[name],
            key=lambda value, name=name, others=others: -sum(other | {(name, value)} in left for other in others),
        )
        row[name] = next(v for v in values if _complete({**row, name: v}, features, forbidden) is not None)
    return row


def _complete(row: Row, features: Mapping[str, Sequence[str]], forbidden: Sequence[Row]) -> Row | None:
    """Returns some whole row that contains this part, None if each would be forbidden."""
    # Only these can still be met, and only the features that they name make a difference.
    near = [rule for rule in forbidden if all(row.get(name, value) == value for name, value in rule.items())]
    if any(rule.keys() <= row.keys() for rule in near):
        return None
    named = {name for rule in near for name in rule}
    name = next((name for name in features if name in named and name not in row), None)
    if name is None:
        return row
    tries = (_complete({**row, name: value}, features, near) for value in features[name])
    return next((whole for whole in tries if whole is not None), None)
