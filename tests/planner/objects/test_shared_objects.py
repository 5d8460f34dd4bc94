"""What the workers of a gang share: the Service, the host lists, the run spec."""

import json
from typing import Any

from tests.unit.jobs import resolved
from tpu_training_operator.domain.objects.shared import config_map, service

Object = dict[str, Any]

OWNER = {
    "apiVersion": "tpu-operator.dev/v1alpha1",
    "kind": "TPUTrainingJob",
    "name": "digits",
    "uid": "8b6b0c5e-1f7a-4c39-9d11-0242ac120002",
    "controller": True,
    "blockOwnerDeletion": True,
}


def run_spec(changes: Object | None = None) -> Object:
    document: Object = json.loads(config_map(*resolved(changes), 3)["data"]["run.json"])
    return document


def test_nobody_but_the_operator_writes_the_addresses_behind_the_service() -> None:
    made = service(resolved()[0])
    assert made["spec"] == {"clusterIP": "None"}
    assert (made["metadata"]["name"], made["metadata"]["ownerReferences"]) == ("digits", [OWNER])


def test_the_config_map_lists_the_hosts_of_every_slice_in_the_order_of_their_ids() -> None:
    made = config_map(*resolved({"spec.slice.count": 2, "spec.trainer.backend": "XLASPMD"}), 3)
    assert made["data"]["hosts-1"] == ",".join(f"3-{host}.digits" for host in range(4, 8))
    assert sorted(made["data"]) == ["hosts-0", "hosts-1", "run.json"]
    assert (made["immutable"], made["metadata"]["ownerReferences"]) == (True, [OWNER])


def test_the_run_spec_in_full() -> None:
    changes = {
        "spec.recipe.tunedOn": {"acceleratorType": "v5litepod-4"},
        "spec.recipe.warmupSteps": 20,
        "spec.recipe.seed": 7,
        "spec.recipe.parameters": {"width": "2", "hidden": "128"},
        "spec.recipe.optimizer": {"name": "sgd", "learningRate": "0.1", "momentum": "0.9", "weightDecay": "0.0001"},
    }
    assert run_spec(changes) == {
        "schema": "runspec/v1",
        "job": {"namespace": "default", "name": "digits", "uid": OWNER["uid"], "attempt": 3},
        "entrypoint": "examples.digits:task",
        "backend": "xla",
        "hardware": "TPU",
        "slice": {"generation": "v5e", "topology": "4x4", "slices": 1, "hosts": 4, "replicas": 16},
        "batch": {"global": 512, "perReplica": 32, "accumulation": 1},
        "trainSteps": 75,
        "warmupSteps": 5,
        "schedule": {"name": "Constant", "milestones": []},
        "seed": 7,
        "optimizer": {"name": "sgd", "learningRate": "0.4", "momentum": "0.9", "weightDecay": "0.0001"},
        "parameters": {"hidden": "128", "width": "2"},
        "recipe": {
            "recipe.tunedOn.acceleratorType": "v5litepod-4",
            "recipe.globalBatchSize": "128",
            "recipe.trainSteps": "300",
            "recipe.warmupSteps": "20",
            "recipe.optimizer.name": "sgd",
            "recipe.optimizer.learningRate": "0.1",
            "recipe.optimizer.momentum": "0.9",
            "recipe.optimizer.weightDecay": "0.0001",
            "recipe.seed": "7",
        },
        "scaling": [
            {"name": "slice", "tunedOn": "v5litepod-4", "runsOn": "v5litepod-16", "rule": ""},
            {"name": "topology", "tunedOn": "2x2", "runsOn": "4x4", "rule": ""},
            {"name": "hosts", "tunedOn": "1", "runsOn": "4", "rule": "4 chips each"},
            {"name": "chips", "tunedOn": "4", "runsOn": "16", "rule": ""},
            {"name": "replicas", "tunedOn": "4", "runsOn": "16", "rule": "one per XLA device"},
            {"name": "batch per replica", "tunedOn": "32", "runsOn": "32", "rule": ""},
            {
                "name": "global batch",
                "tunedOn": "128",
                "runsOn": "512",
                "rule": "32 per replica x 16 replicas = 512 (was 128 on 4; the per-replica batch is kept)",
            },
            {
                "name": "train steps",
                "tunedOn": "300",
                "runsOn": "75",
                "rule": "300 x 128 / 512 = 75 (38400 examples, as in the recipe)",
            },
            {
                "name": "warm-up steps",
                "tunedOn": "20",
                "runsOn": "5",
                "rule": "20 x 1/4 = 5 (the same examples, rounded up)",
            },
            {
                "name": "learning rate",
                "tunedOn": "0.1",
                "runsOn": "0.4",
                "rule": "0.1 x 4 = 0.4 (linear rule, the usual one for sgd)",
            },
            {"name": "weight decay", "tunedOn": "0.0001", "runsOn": "0.0001", "rule": "as in the recipe"},
        ],
    }


def test_the_run_spec_of_a_recipe_that_asks_for_everything() -> None:
    changes = {
        "spec.recipe.tunedOn": {"acceleratorType": "v5litepod-64"},
        "spec.recipe.scaling": {"batch": "GlobalConstant"},
        "spec.recipe.schedule": {"name": "Step", "milestones": [100, 200], "factor": "0.2"},
        "spec.recipe.evaluateEverySteps": 50,
        "spec.recipe.emaDecay": "0.999",
    }
    found = run_spec(changes)
    assert found["batch"] == {"global": 128, "perReplica": 2, "accumulation": 4}
    assert found["schedule"] == {"name": "Step", "milestones": [100, 200], "factor": "0.2"}
    assert (found["evaluateEverySteps"], found["emaDecay"]) == (50, "0.999")
    scaling = {row["name"]: (row["tunedOn"], row["runsOn"]) for row in found["scaling"]}
    assert scaling["accumulation"] == ("1", "4")
    assert scaling["warm-up steps"] == ("-", "0")
    assert scaling["milestones"] == ("100, 200", "100, 200")
    assert scaling["evaluate every"] == ("50", "50")
    assert scaling["EMA decay"] == ("0.999", "0.999")


def test_the_data_is_named_in_the_run_spec() -> None:
    assert run_spec({"spec.data": {"uri": "gs://bucket/digits"}})["dataUri"] == "gs://bucket/digits"
