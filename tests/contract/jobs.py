"""Jobs for the tests of this layer and of local mode: a valid job to modify, one of every kind, and any recipe."""

import copy
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from tpu_training_operator.api.job import TPUTrainingJob
from tpu_training_operator.api.validation import parse_job
from tpu_training_operator.domain.job.naming import parameter_variable

Object = dict[str, Any]

_SPEC: Object = {
    "slice": {"acceleratorType": "v5litepod-16"},
    "trainer": {"image": "registry.example/digits:1", "entrypoint": "examples.digits:task"},
    "recipe": {
        "globalBatchSize": 128,
        "trainSteps": 300,
        "optimizer": {"name": "sgd", "learningRate": 0.4},
    },
}


def job_body(changes: Mapping[str, Any] | None = None, *, name: str = "digits", namespace: str = "default") -> Object:
    """A valid TPUTrainingJob of 4 hosts and 16 replicas; `changes` by path below spec; ... removes a field."""
    spec = copy.deepcopy(_SPEC)
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        place = spec
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is ...:
            del place[last]
        else:
            place[last] = copy.deepcopy(value)
    return {
        "apiVersion": "tpu-operator.dev/v1alpha1",
        "kind": "TPUTrainingJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


def stored_job(changes: Mapping[str, Any] | None = None) -> TPUTrainingJob:
    """The same job as an API server has it: with a uid."""
    body = job_body(changes)
    body["metadata"] |= {"uid": "0b9e5a3c-2a55-4f0e-8f1a-3f6f6f5b7c11", "generation": 1}
    return parse_job(body)


EVERY_OPTIMIZER_FIELD = {
    "name": "adamw",
    "learningRate": "3e-4",
    "momentum": "0.9",
    "weightDecay": "1e-2",
    "beta1": "0.9",
    "beta2": "0.95",
    "epsilon": "1e-8",
}

KINDS_OF_JOBS: dict[str, Mapping[str, Any]] = {
    "torch_xla on TPU": {},
    "torch_xla on CPU": {"slice.hardware": "CPU"},
    "torch on CPU": {"slice.hardware": "CPU", "trainer.backend": "Torch"},
    "torch on GPUs": {
        "slice.hardware": "CPU",
        "trainer.backend": "Torch",
        "trainer.torch": {"device": "cuda", "collectives": "nccl", "processesPerHost": 4},
    },
    "torch on TPU": {
        "trainer.backend": "Torch",
        "trainer.torch": {"device": "tpu", "collectives": "tpu_dist", "processesPerHost": 4},
    },
    "SPMD on TPU": {"trainer.backend": "XLASPMD"},
    "SPMD on CPU": {
        "slice": {"acceleratorType": "v5litepod-4", "hardware": "CPU"},
        "trainer.backend": "XLASPMD",
    },
    "Lightning's own Trainer": {"trainer.loop": "Lightning"},
    "multislice": {"slice.count": 2, "trainer.backend": "XLASPMD"},
    "one host": {"slice.acceleratorType": "v5litepod-4"},
    "two replicas per chip": {"slice.acceleratorType": "v3-32"},
    "a slice that GKE forms": {"slice": {"acceleratorType": "tpu7x-32", "formation": "DynamicSlice"}},
    "by topology": {"slice": {"generation": "v4", "topology": "2x2x4"}},
    "tuned on a smaller slice": {"recipe.tunedOn": {"acceleratorType": "v5litepod-4"}, "recipe.warmupSteps": 30},
    "tuned on a larger slice": {"recipe.tunedOn": {"acceleratorType": "v5litepod-64"}},
    "epochs": {"recipe.trainSteps": ..., "recipe.epochs": 3, "recipe.datasetSize": 5000},
    "every optimizer field": {"recipe.optimizer": EVERY_OPTIMIZER_FIELD},
    "an optimizer of the task's own": {"recipe.optimizer.name": "Lamb"},
    "data": {"data": {"uri": "gs://bucket/digits"}},
    "parameters": {"recipe.parameters": {"hidden": "128", "empty": "", "text": 'größer: "1"\n'}},
    "code in a bucket": {"trainer.code": {"uri": "gs://bucket/digits/code.tar.gz", "sha256": "0a" * 32}},
    "code in a Secret": {"trainer.code": {"uri": "secret://digits-code", "sha256": "0a" * 32}},
    "checkpoints": {"checkpoint": {"uri": "gs://bucket/run"}},
    "checkpoints of another job": {"checkpoint": {"uri": "gs://bucket/run", "resumeFrom": "gs://bucket/run/a/b"}},
    "weights of another job, and the best kept": {
        "recipe.evaluateEverySteps": 50,
        "checkpoint": {
            "uri": "gs://bucket/run",
            "initFrom": {"uri": "gs://bucket/run/a/b"},
            "keepBest": {"metric": "loss/val", "mode": "Min"},
        },
    },
    "checkpoints by step": {"checkpoint": {"uri": "/mnt/run", "everySteps": 500, "keep": 1}},
    "checkpoints by step and time": {
        "checkpoint": {"uri": "gs://bucket/run", "everySteps": 500, "everySeconds": 1800},
    },
    "a slice that is checked first": {"runPolicy.sliceCheck": "Check"},
    "report": {"report": {}},
    "report elsewhere": {"report": {"uri": "gs://bucket/run", "tensorBoard": True, "gradientNoiseScale": True}},
    "report with a profile": {"report": {"uri": "gs://bucket/run", "profile": {"steps": 5}}},
    "accumulation": {
        "recipe.tunedOn": {"acceleratorType": "v5litepod-64"},
        "recipe.scaling": {"batch": "GlobalConstant"},
    },
    "schedule, evaluation and average": {
        "recipe.tunedOn": {"acceleratorType": "v5litepod-4"},
        "recipe.schedule": {"name": "Step", "milestones": [100, 200], "factor": "0.2"},
        "recipe.evaluateEverySteps": 50,
        "recipe.emaDecay": "0.999",
    },
    "milestones in epochs": {
        "recipe.tunedOn": {"acceleratorType": "v5litepod-4"},
        "recipe.trainSteps": ...,
        "recipe.epochs": 90,
        "recipe.datasetSize": 1_281_167,
        "recipe.schedule": {"name": "Step", "milestoneEpochs": [30, 60, 80]},
    },
    "rate and end by evaluations": {
        "recipe.tunedOn": {"acceleratorType": "v5litepod-4"},
        "recipe.schedule": {"name": "Plateau", "metric": "accuracy", "mode": "Max", "patience": 2},
        "recipe.stopEarly": {"metric": "perplexity", "mode": "Min", "patience": 5, "minDelta": "1e-3"},
        "recipe.evaluateEverySteps": 50,
    },
    "every scaling rule": {
        "recipe.tunedOn": {"acceleratorType": "v5litepod-4"},
        "recipe.optimizer": EVERY_OPTIMIZER_FIELD,
        "recipe.emaDecay": "0.999",
        "recipe.scaling": {"betas": True, "weightDecay": True, "ema": True},
    },
    "seed": {"recipe.seed": 2**31 - 1},
    "steps that are not finite are skipped": {"recipe.onNotFinite": "Skip"},
    "steps that are not finite are made": {"recipe.onNotFinite": "Warn"},
    "clipped gradients": {"recipe.gradientClipNorm": "0.5"},
    "mixed precision": {"recipe.precision": "BFloat16Mixed"},
    "a divided optimizer": {"recipe.sharding": "Optimizer"},
    "a model in bfloat16": {"recipe.precision": "BFloat16"},
}

_WHOLE = st.integers(0, 999).map(str)
_FRACTION = st.sampled_from(["", ".0", ".5", ".125", ".001"])
_EXPONENT = st.sampled_from(["", "e0", "e-4", "E+3", "e-99", "e15"])
_NON_NEGATIVE = st.tuples(_WHOLE, _FRACTION, _EXPONENT).map("".join)
_POSITIVE = _NON_NEGATIVE.filter(lambda text: float(text) > 0)
_BELOW_ONE = st.integers(0, 10**6 - 1).map(lambda millionths: f"0.{millionths:06}")

_OPTIMIZERS = st.fixed_dictionaries(
    {"name": st.sampled_from(["sgd", "Adam", "adamw", "my.Own_optimizer-2"]), "learningRate": _POSITIVE},
    optional={
        "momentum": _BELOW_ONE,
        "weightDecay": _NON_NEGATIVE,
        "beta1": _BELOW_ONE,
        "beta2": _BELOW_ONE,
        "epsilon": _POSITIVE,
    },
)

# On one replica, for a recipe tuned on 64, these become 2**53 steps, the maximum.
_MOST_STEPS = 2**47
_SCHEDULES = st.fixed_dictionaries(
    {"name": st.sampled_from(["Constant", "Linear", "Cosine"])}, optional={"factor": _NON_NEGATIVE}
) | st.fixed_dictionaries(
    {"name": st.just("Step"), "milestones": st.lists(st.integers(1, _MOST_STEPS), min_size=1, max_size=32)},
    optional={"factor": _NON_NEGATIVE},
)

# No two names map to the same variable.
_PARAMETERS = st.lists(
    st.tuples(st.text(max_size=8), st.text(max_size=8)),
    max_size=3,
    unique_by=lambda entry: parameter_variable(entry[0]),
).map(dict)

_SLICES = st.sampled_from(["v2-8", "v3-32", "v4-16", "v5litepod-1", "v5litepod-16", "v5p-128", "v6e-8", "tpu7x-16"])
_REPLICAS_OF_TUNED = {"v5litepod-1": 1, "v5litepod-4": 4, "v2-8": 8, "v5litepod-64": 64}


@st.composite
def any_recipe(draw: st.DrawFn) -> Object:
    """Changes for `job_body`: any recipe, tuned anywhere, on any slice."""
    tuned_on = draw(st.sampled_from(sorted(_REPLICAS_OF_TUNED)))
    changes: Object = {
        "slice": {"acceleratorType": draw(_SLICES), "count": draw(st.integers(1, 4)), "hardware": "CPU"},
        "recipe.tunedOn": {"acceleratorType": tuned_on},
        "recipe.globalBatchSize": _REPLICAS_OF_TUNED[tuned_on] * draw(st.integers(1, 64)),
        "recipe.optimizer": draw(_OPTIMIZERS),
        "recipe.warmupSteps": draw(st.integers(0, 10**4)),
        "recipe.seed": draw(st.integers(0, 2**31 - 1)),
        "recipe.parameters": draw(_PARAMETERS),
        "recipe.scaling": {
            "learningRate": draw(st.sampled_from(["Auto", "Linear", "SquareRoot", "Unscaled"])),
            "betas": draw(st.booleans()),
            "weightDecay": draw(st.booleans()),
            "ema": draw(st.booleans()),
        },
        "recipe.schedule": draw(_SCHEDULES),
        "recipe.emaDecay": draw(_BELOW_ONE),
        "recipe.evaluateEverySteps": draw(st.integers(1, _MOST_STEPS)),
    }
    if draw(st.booleans()):
        # At least one global batch of the largest slice above.
        data = {
            "recipe.epochs": draw(st.integers(1, 90)),
            "recipe.datasetSize": draw(st.integers(10**6, _MOST_STEPS // 2)),
        }
        if changes["recipe.schedule"]["name"] == "Step" and draw(st.booleans()):
            epochs = draw(st.lists(st.integers(1, 90), min_size=1, max_size=32))
            data["recipe.schedule"] = {"name": "Step", "milestoneEpochs": epochs}
        for steps, least in (("warmup", 0), ("evaluateEvery", 1)):
            if draw(st.booleans()):
                changes.pop(f"recipe.{steps}Steps")
                data[f"recipe.{steps}Epochs"] = draw(st.integers(least, 90))
        return changes | {"recipe.trainSteps": ..., **data}
    return changes | {"recipe.trainSteps": draw(st.integers(1, _MOST_STEPS))}
