"""Any job that the API server accepts, drawn from the definition's own schema: every number at its bounds, next to
them, and in between.

Slices are drawn separately, because a random string hardly ever names one.
"""

from collections.abc import Iterator
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from tests.unit.jobs import job_body
from tpu_training_operator.api.catalogue import generations
from tpu_training_operator.api.crd import structural_schema
from tpu_training_operator.api.job import Spec
from tpu_training_operator.api.slice import SliceRef
from tpu_training_operator.api.validation import InvalidJob, parse_job
from tpu_training_operator.domain.job.topology import layout_of

Schema = dict[str, Any]
Path = tuple[str, ...]

_SCHEMA = structural_schema(Spec)
# The fields that the planner and the rules compute with. The rest of `trainer` is passed on unchanged.
_SECTIONS = ("recipe", "runPolicy", "checkpoint", "trainer.torch", "trainer.terminationGracePeriodSeconds")
_MORE_HOSTS_THAN_A_TEST_HAS_TIME_FOR = 8

# The largest, the smallest, neighbours of 0 and 1, and what decimal and binary numbers do not share.
_DECIMALS = [0, 1, 0.1, 3e-4, 5e-324, 1e-100, 1e18, 0.9, 0.999, 1 - 2**-53, 2**-53, 1e-7, 0.30000000000000004, 1250]


def _number(schema: Schema) -> st.SearchStrategy[int]:
    least, most = schema["minimum"], schema["maximum"]
    near = sorted({n for bound in (least, most) for n in (bound - 1, bound, bound + 1) if least <= n <= most})
    powers = [2**n for n in range(64) if least <= 2**n <= most]
    return st.sampled_from(near) | st.sampled_from(powers or near) | st.integers(least, most)


def _decimal(schema: Schema) -> st.SearchStrategy[float]:
    least, most = float(schema["minimum"]), float(schema["maximum"])
    is_open = {
        "exclude_min": schema.get("exclusiveMinimum", False),
        "exclude_max": schema.get("exclusiveMaximum", False),
    }
    near = [
        number
        for number in _DECIMALS
        if least < number < most or (number in (least, most) and not any(is_open.values()))
    ]
    drawn = st.floats(least, most, allow_nan=False, **is_open)
    return st.sampled_from(near) | drawn


def _value(schema: Schema) -> st.SearchStrategy[Any] | None:
    match schema.get("type"):
        case "number":
            return _decimal(schema)
        case "integer":
            return _number(schema)
        case "boolean":
            return st.booleans()
        case "string" if "enum" in schema:
            return st.sampled_from(schema["enum"])
        case "array" if (item := _value(schema["items"])) is not None:
            return st.lists(item, min_size=schema.get("minItems", 0), max_size=schema["maxItems"])
    return None


def _leaves(schema: Schema, path: Path) -> Iterator[tuple[Path, st.SearchStrategy[Any]]]:
    if path[-1:] == ("tunedOn",):
        return
    if "properties" in schema:
        for name, below in schema["properties"].items():
            yield from _leaves(below, (*path, name))
    elif (strategy := _value(schema)) is not None:
        yield path, strategy


def _section(path: str) -> Iterator[tuple[Path, st.SearchStrategy[Any]]]:
    schema = _SCHEMA
    for part in path.split("."):
        schema = schema["properties"][part]
    yield from _leaves(schema, tuple(path.split(".")))


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    ".".join(path): strategy for section in _SECTIONS for path, strategy in _section(section)
}

_FEW_FIELDS = st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=8)
# Fields of one computation, which are rarely drawn together by chance.
_WHOLE_SECTIONS = st.sampled_from(["recipe.", "recipe.optimizer", "runPolicy.", "runPolicy.restart"]).map(
    lambda section: [path for path in sorted(FIELDS) if path.startswith(section)]
)
_KNOWN = [{"generation": g.name, "topology": s.topology} for g in generations().values() for s in g.shapes]
_DEVICES = SliceRef.model_fields["devices_per_chip"]
_SIDES = st.sampled_from([1, 2, 3, 4, 9967, 9973, 9999]) | st.integers(1, 9999)


@st.composite
def _newer(draw: st.DrawFn) -> dict[str, Any]:
    """A slice of a generation newer than the catalogue, as the user describes it."""
    sides = draw(st.lists(_SIDES, min_size=2, max_size=3))
    described: dict[str, Any] = {"generation": "tpu8t", "topology": "x".join(map(str, sides))}
    for name in ("chipsPerHost", "devicesPerChip"):
        schema = _SCHEMA["properties"]["slice"]["properties"][name]
        if name == "chipsPerHost" or draw(st.booleans()):
            described[name] = draw(_number(schema))
    return described


REFERENCES = st.sampled_from(_KNOWN) | _newer()


@st.composite
def any_job(draw: st.DrawFn, most_hosts: int = _MORE_HOSTS_THAN_A_TEST_HAS_TIME_FOR) -> dict[str, Any]:
    """An object that obeys the schema and every rule. What only arithmetic excludes is left to the operator."""
    hardware = draw(st.sampled_from(["TPU", "CPU", "CPU"]))
    reference = draw(REFERENCES) | {"hardware": hardware, "count": draw(st.sampled_from([1, 1, 2]))}
    # Several slices on TPUs need another backend than the default.
    spread = hardware == "TPU" and reference["count"] > 1
    body = job_body({"spec.slice": reference} | ({"spec.trainer.backend": "XLASPMD"} if spread else {}))
    assume(_hosts(reference) <= most_hosts)
    for path in draw(_FEW_FIELDS | _WHOLE_SECTIONS):
        _put(body["spec"], path, draw(FIELDS[path]))
    _make_whole(draw, body["spec"])
    assume(_is_valid(body))
    return body


def _is_valid(body: dict[str, Any]) -> bool:
    try:
        parse_job(body)
    except InvalidJob:
        return False
    return True


def _hosts(reference: dict[str, Any]) -> int:
    try:
        return layout_of(SliceRef(**{k: v for k, v in reference.items() if k != "hardware"}), "spec.slice").hosts
    except InvalidJob:
        return 1


def _put(spec: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for part in above:
        spec = spec.setdefault(part, {})
    spec[last] = value


def _make_whole(draw: st.DrawFn, spec: dict[str, Any]) -> None:
    """Adds what the drawn fields require, so that few jobs are refused."""
    recipe = spec["recipe"]
    schedule = recipe.get("schedule", {})
    if "epochs" in recipe or "milestoneEpochs" in schedule:
        recipe.pop("trainSteps", None)
        for name in ("epochs", "datasetSize"):
            recipe.setdefault(name, draw(FIELDS[f"recipe.{name}"]))
        for name in ("warmup", "evaluateEvery"):
            if f"{name}Epochs" in recipe:
                recipe.pop(f"{name}Steps", None)
    else:
        recipe.pop("warmupEpochs", None)
        recipe.pop("evaluateEveryEpochs", None)
    if recipe.get("scaling", {}).get("steps") == "SameLoss":
        recipe.setdefault("gradientNoiseScale", 100)
    if "milestoneEpochs" in schedule:
        schedule.pop("milestones", None)
        schedule["name"] = "Step"
    elif "milestones" in schedule or schedule.get("name") == "Step":
        schedule |= {"name": "Step", "milestones": schedule.get("milestones", [100])}
    if "checkpoint" in spec:
        spec["checkpoint"]["uri"] = "gs://bucket/digits"
    if "torch" in spec["trainer"]:
        spec["trainer"]["backend"] = "Torch"
        spec["trainer"]["torch"] |= {"device": "tpu" if spec["slice"]["hardware"] == "TPU" else "cpu"}
    if draw(st.booleans()):
        recipe["tunedOn"] = draw(REFERENCES)
    if draw(st.integers(0, 3)):
        _divide(draw, recipe, spec["slice"])


def _divide(draw: st.DrawFn, recipe: dict[str, Any], reference: dict[str, Any]) -> None:
    """A batch that divides over the replicas it was tuned on, and often over the job's own."""
    replicas = _replicas(recipe.get("tunedOn") or reference)
    if recipe.get("scaling", {}).get("batch") == "GlobalConstant":
        replicas *= _replicas(reference)
    most: int = _SCHEMA["properties"]["recipe"]["properties"]["globalBatchSize"]["maximum"]
    if replicas <= most:
        recipe["globalBatchSize"] = replicas * draw(
            st.sampled_from([1, most // replicas]) | st.integers(1, most // replicas)
        )


def _replicas(reference: dict[str, Any]) -> int:
    try:
        return layout_of(SliceRef(**{k: v for k, v in reference.items() if k != "hardware"}), "slice").replicas
    except InvalidJob:
        return 1
