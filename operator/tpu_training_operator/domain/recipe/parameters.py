"""The recipe's parameters as environment variables, for a loop of the user's own.

No rule of the API: CEL cannot bound the cost of comparing map keys, which have no length limit in a CRD's schema.
"""

import re
from collections.abc import Mapping

from tpu_training_operator.api.validation import Problem

_PREFIX = "TPUJOB_PARAMETER_"
_NOT_IN_A_VARIABLE = re.compile("[^A-Z0-9]")


def variable_of(parameter: str) -> str:
    """The variable that carries the parameter: upper case, and _ for what a shell would not take."""
    return _PREFIX + _NOT_IN_A_VARIABLE.sub("_", parameter.upper())


def variables(parameters: Mapping[str, str]) -> dict[str, str]:
    """By name. Dollar signs are doubled, because the kubelet takes $(NAME) for a reference and $$ for a dollar."""
    return {variable_of(name): value.replace("$", "$$") for name, value in sorted(parameters.items())}


def problems(parameters: Mapping[str, str]) -> list[Problem]:
    """One for every pair of parameters with the same variable."""
    found: list[Problem] = []
    taken: dict[str, str] = {}
    for name in sorted(parameters):
        variable = variable_of(name)
        other = taken.setdefault(variable, name)
        if other != name:
            message = f"{other!r} and {name!r} would both be the variable {variable}; rename one"
            found.append(Problem("spec.recipe.parameters", message))
    return found
