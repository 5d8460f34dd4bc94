"""Jobs that are right, each for a reason that a rule could get wrong: what is changed in `job_body`."""

from typing import Any

from tests.unit.jobs import ABSENT

_NO_TYPE = {"spec.slice.acceleratorType": ABSENT}
_SPMD = {"spec.trainer.backend": "XLASPMD"}
_OWN_LOOP = {"spec.trainer.entrypoint": ABSENT, "spec.trainer.command": ["python", "train.py"]}

GOOD_JOBS: list[dict[str, Any]] = [
    {},
    # A name with nothing behind it is null, which counts as not given.
    {
        f"spec.{name}": None
        for name in (
            *("ladder", "placement", "data", "checkpoint", "report", "entryCheck", "runPolicy", "managedBy"),
            *("recipe.tunedOn", "recipe.schedule", "recipe.scaling", "recipe.precision", "recipe.parameters"),
            *("slice.count", "slice.provisioning", "trainer.backend", "trainer.env", "trainer.resources"),
        )
    },
    {"spec.runPolicy": {"suspend": None, "restart": {"limits": None, "backoff": None}, "budget": None}},
    {
        "spec.placement": {
            "alternatives": [
                {"slice": {"acceleratorType": kind, "provisioning": {"type": "Spot"}}, "waitForPreviousSeconds": 90}
                for kind in ("v5litepod-8", "v5p-32", "v4-16", "v6e-16")
            ],
            "returnToPreferred": "AtCheckpoint",
        },
        "spec.checkpoint": {"uri": "gs://bucket/digits"},
        "spec.report.profile": {"steps": 5},
    },
    _SPMD | {"spec.slice.count": 256, "spec.placement.count": {"min": 1, "waitForPreviousSeconds": 90}},
    _NO_TYPE | {"spec.slice.generation": "v5e", "spec.slice.topology": "4x4"},
    {"spec.slice.acceleratorType": "v2-8", "spec.slice.hardware": "CPU"},
    _SPMD | {"spec.slice.machineType": "ct5lp-hightpu-4t", "spec.slice.count": 256},
    _NO_TYPE | {"spec.slice.generation": "v4", "spec.slice.topology": "12x16x20"},
    _NO_TYPE | {"spec.slice.generation": "tpu8t", "spec.slice.topology": "4x4", "spec.slice.chipsPerHost": 4},
    # As many hosts as a job may have, and a few fewer.
    _NO_TYPE | {"spec.slice.generation": "tpu8t", "spec.slice.topology": "100x200", "spec.slice.chipsPerHost": 4},
    _NO_TYPE | {"spec.slice.generation": "tpu8t", "spec.slice.topology": "5000x1x1", "spec.slice.chipsPerHost": 1},
    _SPMD | {"spec.slice.acceleratorType": "v5litepod-128", "spec.slice.count": 156},
    {"spec.slice.acceleratorType": "v3-2048", "spec.slice.count": 19, "spec.slice.hardware": "CPU"},
    _SPMD | _NO_TYPE | {"spec.slice.generation": "tpu7x", "spec.slice.topology": "16x24x24", "spec.slice.count": 2},
    {"spec.slice.acceleratorType": "v5litepod-4", "spec.slice.count": 2, "spec.slice.hardware": "CPU"},
    _SPMD | {"spec.slice.acceleratorType": "v5litepod-8", "spec.slice.count": 2},
    _OWN_LOOP | {"spec.slice.acceleratorType": "v5litepod-8", "spec.slice.count": 2},
    {"spec.slice.provisioning": {"type": "FlexStart"}},
    {"spec.slice.formation": "SubSlice"},
    _NO_TYPE | {"spec.slice.generation": "v4", "spec.slice.topology": "2x2x2", "spec.slice.formation": "SubSlice"},
    {"spec.slice.acceleratorType": "tpu7x-16", "spec.slice.formation": "DynamicSlice"},
    _NO_TYPE
    | {
        "spec.slice.generation": "tpu8t",
        "spec.slice.topology": "4x4x4",
        "spec.slice.chipsPerHost": 4,
        "spec.slice.formation": "DynamicSlice",
    },
    # The same slice, formed in another way.
    {"spec.placement.alternatives": [{"slice": {"acceleratorType": "v5litepod-16", "formation": "SubSlice"}}]},
    # An alternative may be smaller than a rung: the ladder leads to the job's own slice.
    {
        "spec.ladder.rungs": [{"slice": {"acceleratorType": "v5litepod-16"}, "steps": 10}],
        "spec.placement.alternatives": [{"slice": {"acceleratorType": "v5litepod-4"}}],
    },
    {"spec.ladder.rungs": [{"slice": {"acceleratorType": "v5litepod-16"}, "steps": 10}]},
    {
        "spec.ladder": {
            "from": "Checkpoint",
            "rungs": [
                {"slice": {"acceleratorType": "v5litepod-4"}, "steps": 10_000, "gates": {"lossFalls": False}},
                {
                    "slice": {"generation": "v5e", "topology": "2x4", "provisioning": {"type": "Spot"}},
                    "steps": 10,
                    "gates": {
                        "minEfficiency": 1.5,
                        "noFindings": ["HostSync", "Padding"],
                        "evaluation": {"metric": "loss/val 1", "min": -1000, "max": 2.5},
                    },
                },
            ],
        },
        "spec.checkpoint": {"uri": "gs://bucket/digits"},
    },
    {"spec.slice.provisioning": {"type": "Reservation", "reservation": "r"}},
    {"spec.slice.provisioning": {"type": "Reservation", "reservation": "a" * 63}},
    {"spec.slice.provisioning": {"type": "Reservation", "reservation": "projects/my-project-1/reservations/r"}},
    {
        "spec.slice.provisioning": {
            "type": "Reservation",
            "reservation": "projects/1234/reservations/r/reservationBlocks/b",
        }
    },
    {"spec.slice.provisioning": {"type": "Reservation", "reservation": "r/reservationBlocks/b/reservationSubBlocks/s"}},
    {"spec.trainer.nodeSelector": {"cloud.google.com/gke-spot": "true"}},
    {
        "spec.slice.hardware": "CPU",
        "spec.trainer.nodeSelector": {"cloud.google.com/gke-tpu-topology": "4x4"},
        "spec.slice.provisioning": {"type": "Spot"},
    },
    {
        "spec.trainer.sharedMemory": "512Mi",
        "spec.trainer.volumeMounts": [{"name": "a", "mountPath": "/dev/shm2"}],
        "spec.trainer.volumes": [{"name": "a", "emptyDir": {}}],
    },
    {"spec.trainer.securityContext": {}},
    {"spec.trainer.securityContext": {"runAsUser": 0, "runAsGroup": 0, "capabilities": {"add": ["SYS_RESOURCE"]}}},
    {"spec.trainer.securityContext": {"runAsUser": 0, "privileged": True}},
    {"spec.trainer.securityContext": {"privileged": False}},
    {"spec.trainer.securityContext": {"runAsUser": 2**31 - 1, "fsGroup": 0, "supplementalGroups": []}},
    {"spec.trainer.hostNetwork": True},
    {"spec.trainer.code": {"uri": "gs://a.bucket_1/x/code.tar.gz", "sha256": "09af" * 16}},
    {"spec.trainer.code": {"uri": "/mnt/my code.tar.gz", "sha256": "09af" * 16}},
    _OWN_LOOP | {"spec.trainer.code": {"uri": "secret://digits.code-1", "sha256": "09af" * 16}},
    {"spec.trainer.backend": "Torch", "spec.slice.hardware": "CPU"},
    {
        "spec.trainer.backend": "Torch",
        "spec.trainer.torch": {
            "device": "tpu",
            "collectives": "tpu_dist",
            "processesPerHost": 4,
            "execution": "Fuse",
            "compileCache": "gs://bucket/programs",
        },
    },
    {
        "spec.trainer.backend": "Torch",
        "spec.slice.hardware": "CPU",
        "spec.trainer.torch": {"execution": "Compile"},
    },
    {
        "spec.trainer.backend": "Torch",
        "spec.slice.hardware": "CPU",
        "spec.trainer.torch": {"device": "cuda", "collectives": "nccl", "processesPerHost": 4},
    },
    {"spec.trainer.backend": "XLASPMD"},
    {"spec.checkpoint": {"uri": "gs://bucket/digits"}},
    {"spec.checkpoint": {"uri": "/mnt/digits 1", "everySteps": 2**53, "everySeconds": 60, "keep": 1}},
    _OWN_LOOP | {"spec.checkpoint": {"uri": "gs://bucket/digits"}},
    {"spec.entryCheck": ABSENT},
    {"spec.entryCheck": {"mode": "Require", "dataInRegion": "Require", "resources": {"requests": {"cpu": 1}}}},
    {"spec.entryCheck": {"compile": "Require", "resources": {"limits": {"memory": "64Gi"}}}},
    _OWN_LOOP | {"spec.entryCheck": {"mode": "Auto", "dataInRegion": "Ignore"}},
    {"spec.report": {}},
    {"spec.report": {"uri": "gs://a.bucket_1/r", "tensorBoard": True, "gradientNoiseScale": False}},
    {"spec.recipe.schedule": {"name": "Step", "milestones": [100, 200]}, "spec.recipe.evaluateEverySteps": 10},
    {
        "spec.recipe.trainSteps": ABSENT,
        "spec.recipe.epochs": 90,
        "spec.recipe.datasetSize": 1_281_167,
        "spec.recipe.schedule": {"name": "Step", "milestoneEpochs": [30, 60, 2**31 - 1]},
    },
    {
        "spec.recipe.trainSteps": ABSENT,
        "spec.recipe.epochs": 90,
        "spec.recipe.datasetSize": 1_281_167,
        "spec.recipe.warmupEpochs": 0,
        "spec.recipe.evaluateEveryEpochs": 1,
        "spec.recipe.stopEarly": {"metric": "f1", "mode": "Max", "patience": 3},
        "spec.checkpoint": {"uri": "/mnt/a", "keepBest": {"metric": "f1", "mode": "Max"}},
    },
    {"spec.recipe.gradientNoiseScale": 420.5, "spec.recipe.scaling": {"steps": "SameLoss"}},
    {
        "spec.checkpoint": {"uri": "/mnt/a", "keepBest": {"metric": "loss/val 1", "mode": "Min"}},
        "spec.recipe.evaluateEverySteps": 10,
    },
    {"spec.checkpoint": {"uri": "/mnt/a", "initFrom": {"uri": "gs://bucket/w.safetensors"}}},
    {
        "spec.recipe.schedule": {"name": "Plateau", "metric": "f1", "mode": "Max", "patience": 1, "factor": 0.99},
        "spec.recipe.stopEarly": {"metric": "f1", "mode": "Max", "patience": 2**31 - 1, "minDelta": 0},
        "spec.recipe.evaluateEverySteps": 1,
    },
    {"spec.recipe.scaling": {"learningRate": "AdaScale"}, "spec.recipe.optimizer.name": "SGD"},
    _OWN_LOOP | {"spec.trainer.args": ["--fast"]},
    {"spec.trainer.env": [{"name": "MY_TPUJOB_", "value": ""}, {"name": "POD", "valueFrom": {"fieldRef": {}}}]},
    {"spec.trainer.resources": {"requests": {"cpu": 4, "memory": "16Gi"}}},
    {"spec.trainer.resources": {"requests": {"cpu": ".5", "memory": "+1.e10"}, "limits": {"cpu": "1500m"}}},
    {"spec.trainer.volumes": [{"name": "data", "emptyDir": {}}]},
    {"spec.recipe.trainSteps": ABSENT, "spec.recipe.epochs": 3, "spec.recipe.datasetSize": 1_281_167},
    {"spec.recipe.datasetSize": 1_281_167},
    {"spec.recipe.trainSteps": 2**53},
    {"spec.recipe.optimizer": {"name": "adamw", "learningRate": 3e-4, "beta1": 0.9, "weightDecay": 0}},
    *({"spec.recipe.optimizer.learningRate": rate} for rate in (1, 10**18, 1e-10, 0.30000000000000004, 5e-324)),
    {"spec.data": {"uri": "gs://bucket/path"}},
    {"spec.trainer.image": f"localhost:5000/a/b.c/d_e:1@sha256:{'09af' * 16}"},
    *({"spec.trainer.sharedMemory": size} for size in ("500M", "1.5Gi", 2**30)),
    {
        "spec.runPolicy": {
            "suspend": True,
            "restart": {
                "limits": [
                    {"class": "Preemption", "max": -1},
                    {"class": "Hang", "max": 0},
                    {"class": "UserError", "max": 2},
                ]
            },
        }
    },
    {"spec.managedBy": "kueue.x-k8s.io/multikueue"},
    {"spec.managedBy": "example.com/A/b~c"},
    {"metadata.name": "a"},
    {"metadata.name": "a" * 48},
    _NO_TYPE | {"metadata.name": "a" * 44, "spec.slice.generation": "tpu7x", "spec.slice.topology": "16x24x24"},
    {"metadata.name": "a" * 48, "spec.slice.acceleratorType": "v4-4096"},
    {"metadata.labels": {"team": "vision"}, "metadata.annotations": {"note": "x"}},
]
