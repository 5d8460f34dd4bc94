"""Parts of a pod that the definition takes as they are, so that a mistake there shows only when the job has its slice.

What is found are warnings: a newer Kubernetes may know more fields.
"""

import difflib
from collections.abc import Iterator, Mapping

from tpu_training_operator.api.trainer import Trainer

_KEY_OF = "name key optional"
_FIELDS = {
    part: fields.split()
    for part, fields in {
        "emptyDir": "medium sizeLimit",
        "persistentVolumeClaim": "claimName readOnly",
        "secret": "secretName items defaultMode optional",
        "configMap": "name items defaultMode optional",
        "secretRef": "name optional",
        "configMapRef": "name optional",
        "valueFrom": "secretKeyRef configMapKeyRef fieldRef resourceFieldRef fileKeyRef",
        "secretKeyRef": _KEY_OF,
        "configMapKeyRef": _KEY_OF,
        "fieldRef": "fieldPath apiVersion",
    }.items()
}


def pod_part_warnings(trainer: Trainer) -> Iterator[str]:
    """Yields what the API server will refuse in the parts of the workers' pods that the definition does not know."""
    for field, items in (("env", trainer.env), ("envFrom", trainer.env_from), ("volumes", trainer.volumes)):
        for index, item in enumerate(items or ()):
            for part, value in item.model_dump(by_alias=True, exclude_none=True).items():
                yield from _find_unknown(f"trainer.{field}[{index}].{part}", part, value)


def _find_unknown(path: str, part: str, value: object) -> Iterator[str]:
    if (known := _FIELDS.get(part)) is None:
        return
    if not isinstance(value, Mapping):
        yield f"{path} is {value!r:.60}; Kubernetes wants a mapping with {', '.join(known)}, and would refuse the pods"
        return
    for name, inner in value.items():
        if name in known:
            yield from _find_unknown(f"{path}.{name}", name, inner)
            continue
        near = difflib.get_close_matches(str(name), known, n=1)
        right = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        yield f"{path}.{name}: Kubernetes knows no such field, and would refuse the pods; {right}"
