"""Everything that can be wrong with a job, as a table: what is changed, and which field is named.

Paths are relative to their section; ABSENT removes a field.
"""

import math
from typing import Any

from tests.unit.jobs import ABSENT

Row = tuple[dict[str, Any], str]

TYPE = "acceleratorType"
NO_TYPE = {TYPE: ABSENT}
V5E_4X4 = {"generation": "v5e", "topology": "4x4"}
TWO_HOSTS_AND_A_BIT = {"generation": "tpu8t", "topology": "2x5", "chipsPerHost": 4}
GLOBAL_CONSTANT = {"batch": "GlobalConstant"}
NEWER = NO_TYPE | {"generation": "tpu8t", "topology": "4x4", "chipsPerHost": 4}
V3_2048 = {TYPE: "v3-2048"}
OWN_LOOP = {"entrypoint": ABSENT, "command": ["python", "train.py"]}
SAVED = {"uri": "gs://bucket/digits"}
ON_TORCH_TPU = {"trainer.backend": "Torch", "trainer.torch": {"device": "tpu", "collectives": "tpu_dist"}}
EPOCHS = {"trainSteps": ABSENT, "epochs": 3}
IN_EPOCHS = EPOCHS | {"datasetSize": 5000}
EVALUATED = {"evaluateEverySteps": 10}
STOP = {"metric": "f1", "mode": "Max", "patience": 3}
STEP = {"name": "Step", "milestones": [9]}
PLATEAU = {"name": "Plateau", **STOP}
ADA_SCALE = {"learningRate": "AdaScale"}
ADAPTIVE = {"recipe.scaling": ADA_SCALE}
SIXTEEN_TIMES = ADAPTIVE | {"recipe.tunedOn": {TYPE: "v5litepod-1"}}

# Read before any schema: an API server refuses these, too, but in words of its own.
_ENVELOPE: list[Row] = [
    ({"apiVersion": ABSENT}, "apiVersion"),
    ({"apiVersion": "tpu-operator.dev/v1"}, "apiVersion"),
    ({"kind": ABSENT}, "kind"),
    ({"kind": "TPUTrainingJobs"}, "kind"),
    ({"metadata": ABSENT}, "metadata"),
    ({"metadata": "digits"}, "metadata"),
]

_OBJECT: list[Row] = [
    ({"metadata.name": ABSENT}, ""),
    ({"metadata.name": "a" * 49}, ""),
    ({"metadata.name": "Digits"}, ""),
    ({"metadata.name": "digits.v2"}, ""),
    ({"metadata.name": "2digits"}, ""),
    (
        {
            "metadata.name": "a" * 45,
            "spec.slice": {"generation": "tpu7x", "topology": "16x24x24"},
        },
        "",
    ),
    (
        {
            "metadata.name": "a" * 15,
            "spec.slice": {"generation": "tpu8t", "topology": "100x200", "chipsPerHost": 4},
        },
        "",
    ),
    ({"metadata.name": "a" * 47, "spec.slice": {TYPE: "v5p-17920"}}, ""),
    ({"spec": ABSENT}, "spec"),
    ({"spec": None}, "spec"),
    ({"spec": []}, "spec"),
    ({"spek": {}}, "spek"),
]

_SPEC: list[Row] = [
    ({"managedBy": "multikueue"}, "managedBy"),
    ({"managedBy": "/multikueue"}, "managedBy"),
    ({"managedBy": "Kueue.x-k8s.io/"}, "managedBy"),
    ({"slice": ABSENT}, "slice"),
    ({"data": {}}, "data.uri"),
    ({"placement": {}}, "placement"),
    ({"placement": {"count": {}}}, "placement.count.min"),
    ({"placement": {"count": {"min": 0}}}, "placement.count.min"),
    ({"placement": {"count": {"min": 1}}}, "placement.count"),
    ({"placement": {"count": {"min": 1, "max": 2}}}, "placement.count.max"),
    ({"placement": {"alternatives": []}}, "placement.alternatives"),
    ({"placement": {"alternatives": [{"waitForPreviousSeconds": 3600}]}}, "placement.alternatives[0].slice"),
    (
        {"placement": {"alternatives": [{"slice": {TYPE: "v5litepod-7"}}]}},
        "placement.alternatives[0].slice.acceleratorType",
    ),
    ({"placement": {"alternatives": [{"slice": {TYPE: "v5litepod-8", "hardware": "CPU"}}]}}, "placement.alternatives"),
    (
        {"placement": {"alternatives": [{"slice": {TYPE: "v5litepod-8"}}], "returnToPreferred": "AtCheckpoint"}},
        "placement.returnToPreferred",
    ),
    (
        {"slice.provisioning": {"type": "Spot"}, "trainer.nodeSelector": {"cloud.google.com/reservation-name": "r"}},
        "trainer.nodeSelector",
    ),
    ({"recipie": {}}, "recipie"),
    ({"trainer.backend": "XLASPMD", "recipe.sharding": "Optimizer"}, "recipe.sharding"),
    (ADAPTIVE | {"trainer.loop": "Lightning"}, "recipe.scaling.learningRate"),
    (ADAPTIVE | {"trainer.entrypoint": ABSENT, "trainer.command": ["python"]}, "recipe.scaling.learningRate"),
    ({"trainer.entrypoint": ABSENT, "trainer.command": ["python"], "trainer.loop": "Lightning"}, "trainer.loop"),
    ({"trainer.backend": "XLASPMD", "trainer.loop": "Lightning"}, "trainer.loop"),
    ({"entryCheck": {"compile": "Require"}, "trainer.loop": "Lightning"}, "entryCheck.compile"),
    ({"slice.count": 2}, "trainer.backend"),
    (ON_TORCH_TPU | {"slice.count": 2}, "trainer.backend"),
    (ON_TORCH_TPU | {"trainer.entrypoint": ABSENT, "trainer.command": ["python"], "slice.count": 2}, "trainer.backend"),
    (ON_TORCH_TPU | {"slice": {TYPE: "v3-32"}}, "trainer.backend"),
    (ON_TORCH_TPU | {"slice": {"generation": "v3", "topology": "4x4"}}, "trainer.backend"),
    (
        {
            "slice.hardware": "CPU",
            "trainer.backend": "Torch",
            "trainer.torch": {"compileCache": "gs://bucket/programs"},
        },
        "trainer.torch.compileCache",
    ),
    ({"report": {}, "trainer.entrypoint": ABSENT, "trainer.command": ["python"]}, "report"),
    ({"checkpoints": {"uri": "gs://bucket/a"}}, "checkpoints"),
]

_CHECKPOINT: list[Row] = [
    ({"keep": 3}, "uri"),
    (SAVED | {"uri": "gs://bucket"}, "uri"),
    (SAVED | {"uri": "gs://bucket/"}, "uri"),
    (SAVED | {"uri": "gs://Bucket/a"}, "uri"),
    (SAVED | {"uri": "s3://bucket/a"}, "uri"),
    (SAVED | {"uri": "runs/digits"}, "uri"),
    (SAVED | {"uri": "/"}, "uri"),
    (SAVED | {"uri": "/" + "a" * 1024}, "uri"),
    (SAVED | {"everySteps": 0}, "everySteps"),
    (SAVED | {"everySeconds": "10"}, "everySeconds"),
    (SAVED | {"keep": 0}, "keep"),
    (SAVED | {"every": 10}, "every"),
    (SAVED | {"keepBest": {"metric": "f1", "mode": "Max"}}, "keepBest"),
    (SAVED | {"keepBest": {"metric": "f1"}}, "keepBest.mode"),
    (SAVED | {"keepBest": {"metric": "", "mode": "Max"}}, "keepBest.metric"),
    (SAVED | {"keepBest": {"metric": "f1", "mode": "max"}}, "keepBest.mode"),
    (SAVED | {"initFrom": {"uri": "w.safetensors"}}, "initFrom.uri"),
    (SAVED | {"initFrom": {"uri": "/a"}, "resumeFrom": "/b"}, "initFrom"),
]

_REPORT: list[Row] = [
    ({"uri": "report.html"}, "uri"),
    ({"tensorBoard": "yes"}, "tensorBoard"),
    ({"gradientNoiseScale": 1}, "gradientNoiseScale"),
    ({"tensorboard": True}, "tensorboard"),
]

CPU = {"hardware": "CPU"}
RUNG = {"slice": {TYPE: "v5litepod-4"}, "steps": 50}
SECOND = {"slice": {TYPE: "v5litepod-8"}, "steps": 50}


def _gated(**gates: Any) -> dict[str, Any]:
    return {"ladder.rungs": [RUNG, SECOND | {"gates": gates}]}


def _evaluated(**bounds: Any) -> dict[str, Any]:
    return _gated(evaluation={"metric": "accuracy", **bounds})


_GATES = "ladder.rungs[1].gates"
_LADDER: list[Row] = [
    ({"ladder": {}}, "ladder.rungs"),
    ({"ladder.rungs": []}, "ladder.rungs"),
    ({"ladder.rungs": [RUNG] * 5}, "ladder.rungs"),
    ({"ladder.rungs": [RUNG | {"steps": 9}]}, "ladder.rungs[0].steps"),
    ({"ladder.rungs": [RUNG | {"steps": 10_001}]}, "ladder.rungs[0].steps"),
    ({"ladder.rungs": [{"steps": 50}]}, "ladder.rungs[0].slice"),
    ({"ladder": {"rungs": [RUNG], "from": "checkpoint"}}, "ladder.from"),
    ({"ladder": {"rungs": [RUNG], "from": "Checkpoint"}}, "ladder.from"),
    (
        {"ladder": {"rungs": [RUNG], "from": "Checkpoint"}, "checkpoint": SAVED | {"resumeFrom": "/mnt/b"}},
        "ladder.from",
    ),
    ({"ladder.rungs": [RUNG | {"gates": {"minEfficiency": 0.9}}]}, "ladder.rungs"),
    ({"ladder.rungs": [{**RUNG, "slice": RUNG["slice"] | CPU}]}, "ladder.rungs"),
    ({"ladder.rungs": [RUNG]} | {f"trainer.{name}": value for name, value in OWN_LOOP.items()}, "ladder"),
    ({"ladder.rungs": [SECOND, RUNG]}, "ladder.rungs"),
    ({"ladder.rungs": [RUNG, RUNG]}, "ladder.rungs"),
    ({"ladder.rungs": [RUNG, {"slice": {"generation": "v4", "topology": "1x1x1"}, "steps": 50}]}, "ladder.rungs"),
    ({"ladder.rungs": [{"slice": {TYPE: "v5litepod-32"}, "steps": 50}]}, "ladder.rungs"),
    ({"ladder.rungs": [{"slice": {TYPE: "v3-64"}, "steps": 50}]}, "ladder.rungs"),
    ({"ladder.rungs": [RUNG | {"gates": {"lossFollows": {"tolerance": 0.1}}}]}, "ladder.rungs"),
    (_gated(lossFollows={}), f"{_GATES}.lossFollows.tolerance"),
    (_gated(lossFollows={"tolerance": -1}), f"{_GATES}.lossFollows.tolerance"),
    (_gated(minExamplesPerSecondPerChip=0), f"{_GATES}.minExamplesPerSecondPerChip"),
    (
        {"ladder": {"rungs": [RUNG], "top": {"gates": {"evaluation": {"metric": "accuracy", "min": 0.5}}}}},
        "ladder.top.gates.evaluation",
    ),
    ({"ladder": {"rungs": [RUNG], "top": {"steps": 9}}}, "ladder.top.steps"),
    ({"report": {"profile": {}}}, "report.profile.steps"),
    ({"report": {"profile": {"steps": 0}}}, "report.profile.steps"),
    (_gated(minUtilisation=1), f"{_GATES}.minUtilisation"),
    (_gated(minEfficiency=-1), f"{_GATES}.minEfficiency"),
    (_gated(minEfficiency=95), f"{_GATES}.minEfficiency"),
    ({"ladder": {"rungs": [RUNG], "top": {"gates": {"minEfficiency": 80}}}}, "ladder.top.gates.minEfficiency"),
    (_gated(minEfficiency="high"), f"{_GATES}.minEfficiency"),
    (_gated(noFindings=[]), f"{_GATES}.noFindings"),
    (_gated(noFindings=["HostSyncs"]), f"{_GATES}.noFindings[0]"),
    (_gated(lossFalls="yes"), f"{_GATES}.lossFalls"),
    (_evaluated(), f"{_GATES}.evaluation"),
    (_evaluated(min=0.5, max=0.4), f"{_GATES}.evaluation.min"),
    (_evaluated(min="-"), f"{_GATES}.evaluation.min"),
]

_SLICE: list[Row] = [
    ({TYPE: "v5litepod-12"}, TYPE),
    ({TYPE: "v5e-16"}, TYPE),
    ({TYPE: "tpu"}, TYPE),
    ({TYPE: "v4-²"}, TYPE),
    ({TYPE: "a" * 33}, TYPE),
    (NO_TYPE, ""),
    (V5E_4X4, ""),
    (NO_TYPE | {"generation": "v5e"}, ""),
    (NO_TYPE | {"topology": "4x4"}, ""),
    (NO_TYPE | {"generation": "v5e", "topology": "4x4x4"}, "topology"),
    (NO_TYPE | {"generation": "v4", "topology": "4x4"}, "topology"),
    (NO_TYPE | {"generation": "v5", "topology": "4x4"}, "generation"),
    (NO_TYPE | {"generation": "tpu8t", "topology": "4x4"}, "generation"),
    (V5E_4X4 | NO_TYPE | {"chipsPerHost": 4}, "chipsPerHost"),
    (NEWER | {"chipsPerHost": 0}, "chipsPerHost"),
    (NEWER | {"chipsPerHost": "4"}, "chipsPerHost"),
    (NEWER | {"chipsPerHost": 65}, "chipsPerHost"),
    (NEWER | {"devicesPerChip": True}, "devicesPerChip"),
    (NEWER | {"devicesPerChip": 9}, "devicesPerChip"),
    (NO_TYPE | {"generation": "v4", "topology": "4x8x6"}, "topology"),
    (NO_TYPE | {"generation": "v4", "topology": "8x4x4"}, "topology"),
    (NO_TYPE | {"generation": "v4", "topology": "16x16x24"}, "topology"),
    ({"provisioning": {}}, "provisioning.type"),
    ({"provisioning": {"type": "flexStart"}}, "provisioning.type"),
    ({"provisioning": {"type": "Reservation", "reservation": ""}}, "provisioning.reservation"),
    *(
        ({"provisioning": {"type": "Reservation", "reservation": wrong}}, "provisioning.reservation")
        for wrong in (
            "My-Reservation",
            "r_1",
            "r ",
            "r\n",
            "a" * 64,
            "projects/p/reservations/",
            "projects/p/r",
            "projects/example.com:p/reservations/r",
            "https://www.googleapis.com/compute/v1/projects/p/zones/z/reservations/r",
            "r/reservationBlocks/",
            "r/reservationSubBlocks/s",
        )
    ),
    ({"provisioning": {"type": "Spot", "spot": True}}, "provisioning.spot"),
    ({"provisioning": {"type": "Reservation"}}, "provisioning.reservation"),
    ({"provisioning": {"type": "Spot", "reservation": "r"}}, "provisioning.reservation"),
    ({TYPE: "v4-16", "provisioning": {"type": "FlexStart"}}, "provisioning"),
    ({"formation": "Pool"}, "formation"),
    ({"formation": "DynamicSlice"}, "formation"),
    ({TYPE: "tpu7x-16", "formation": "SubSlice"}, "formation"),
    ({TYPE: "v3-32", "formation": "SubSlice"}, "formation"),
    (NEWER | {"formation": "SubSlice"}, "formation"),
    (NO_TYPE | {"generation": "v2", "topology": "2x2"}, "hardware"),
    ({TYPE: "v2-8"}, "hardware"),
    ({TYPE: "v5litepod-4", "count": 2}, "count"),
    ({TYPE: "v3-8", "count": 2}, "count"),
    ({TYPE: "v3-32", "count": 2}, "count"),
    ({TYPE: "v5litepod-8", "machineType": "ct5lp-hightpu-8t", "count": 2}, "count"),
    (NO_TYPE | {"generation": "v4", "topology": "2x2x1", "count": 2}, "count"),
    (NO_TYPE | {"generation": "tpu7x", "topology": "2x2x1", "count": 2}, "count"),
    (NEWER | {"chipsPerHost": 16, "count": 2}, "count"),
    ({TYPE: "v5litepod-128", "count": 157}, ""),
    ({TYPE: "v5p-17920", "count": 3}, ""),
    (V3_2048 | {"count": 20}, ""),
    (V3_2048 | {"count": 20, "hardware": "CPU"}, ""),
    (NO_TYPE | {"generation": "tpu7x", "topology": "16x24x24", "count": 30}, ""),
    (NEWER | {"topology": "100x201"}, ""),
    (NEWER | {"topology": "5001x1x1", "chipsPerHost": 1}, ""),
    (NEWER | {"topology": "9999x9999x9999", "chipsPerHost": 1, "count": 256}, ""),
    ({"hardware": "cpu"}, "hardware"),
    ({"count": 0}, "count"),
    ({"count": -1}, "count"),
    ({"count": 257}, "count"),
    ({"count": "2"}, "count"),
    ({"machineType": ""}, "machineType"),
    ({"acceleratortype": "v3-8"}, "acceleratortype"),
]

CODE = {"uri": "secret://code", "sha256": "09af" * 16}

_TRAINER: list[Row] = [
    ({"code": {"uri": CODE["uri"]}}, "code.sha256"),
    ({"code": CODE | {"sha256": "09af"}}, "code.sha256"),
    ({"code": CODE | {"sha256": "09AF" * 16}}, "code.sha256"),
    ({"code": CODE | {"uri": "s3://bucket/x/y"}}, "code.uri"),
    ({"code": CODE | {"uri": "gs://bucket/y"}}, "code.uri"),
    ({"code": CODE | {"uri": "secret://Code"}}, "code.uri"),
    ({"code": CODE | {"uri": "secret://a/b"}}, "code.uri"),
    ({"code": CODE | {"folder": "."}}, "code.folder"),
    ({"image": ABSENT}, "image"),
    ({"image": ""}, "image"),
    ({"image": "$REGISTRY/digits:1"}, "image"),
    ({"image": "https://registry.example/digits:1"}, "image"),
    ({"entrypoint": ABSENT}, ""),
    ({"command": ["python"]}, ""),
    ({"args": ["--fast"]}, "args"),
    ({"entrypoint": "examples/digits.py"}, "entrypoint"),
    ({"entrypoint": "examples.digits:"}, "entrypoint"),
    ({"entrypoint": "examples/digits.py:task"}, "entrypoint"),
    ({"entrypoint": "digits.py:task"}, "entrypoint"),
    ({"backend": "torch"}, "backend"),
    ({"backend": "XLA-SPMD"}, "backend"),
    ({"backend": "Torch"}, ""),
    ({"backend": "Torch", "torch": {"device": "cuda"}}, ""),
    ({"torch": {}}, "torch"),
    ({"backend": "XLASPMD", "torch": {}}, "torch"),
    ({"torch": {"device": "CPU"}}, "torch.device"),
    ({"torch": {"processesPerHost": 0}}, "torch.processesPerHost"),
    ({"torch": {"backend": "nccl"}}, "torch.backend"),
    ({"torch": {"execution": "Jit"}}, "torch.execution"),
    ({"backend": "Torch", "torch": {"execution": "Fuse"}}, "torch.execution"),
    (
        {"entrypoint": ABSENT, "command": ["python"], "backend": "Torch", "torch": {"execution": "Compile"}},
        "torch.execution",
    ),
    (OWN_LOOP | {"command": []}, "command"),
    (OWN_LOOP | {"command": ["torchrun", "train.py"]}, "command"),
    (OWN_LOOP | {"command": ["/opt/bin/accelerate", "launch"], "args": ["train.py"]}, "command"),
    (OWN_LOOP | {"command": ["python", "-m"], "args": ["torch.distributed.run", "train.py"]}, "command"),
    (OWN_LOOP | {"command": "python train.py"}, "command"),
    ({"env": {"A": "b"}}, "env"),
    ({"env": [{"name": "A", "value": 1}]}, "env[0].value"),
    ({"env": [{"name": "A"}, {"name": "B", "valu": "1"}]}, "env[1].valu"),
    ({"env": [{"name": "1A"}]}, "env[0].name"),
    ({"env": [{"name": "A"}, {"name": "TPUJOB_SEED"}]}, "env"),
    ({"resources": {"limits": {"cpu": []}}}, "resources.limits.cpu"),
    ({"resources": {"limits": {"cpu": True}}}, "resources.limits.cpu"),
    ({"resources": {"limits": {"cpu": 0.5}}}, "resources.limits.cpu"),
    ({"resources": {"requests": {"cpu": "4 cores"}}}, "resources.requests.cpu"),
    ({"resources": {"limits": {"memory": "16GB"}}}, "resources.limits.memory"),
    ({"resources": {"limits": {"memory": "-1Gi"}}}, "resources.limits.memory"),
    ({"resources": {"limits": {"memory": "1,5Gi"}}}, "resources.limits.memory"),
    *(({"resources": {kind: {"google.com/tpu": 4}}}, "resources") for kind in ("limits", "requests")),
    *(({"resources": {kind: {"nvidia.com/gpu": 8}}}, "resources") for kind in ("limits", "requests")),
    (
        {"volumes": [{"name": "data", "emptyDir": {}}], "volumeMounts": [{"name": "dat", "mountPath": "/a"}]},
        "volumeMounts",
    ),
    ({"volumeMounts": [{"name": "data", "mountPath": "/a"}]}, "volumeMounts"),
    ({"volumes": [{"name": "data"}]}, "volumes[0]"),
    ({"volumes": [{"name": "data", "emptyDir": None}]}, "volumes[0]"),
    ({"volumes": [{"name": "data", "emptyDir": {}, "secret": {}}]}, "volumes[0]"),
    ({"volumes": [{"name": "data", "hostPath": {}}]}, "volumes[0].hostPath"),
    ({"volumes": [{"name": "My Data", "emptyDir": {}}]}, "volumes[0].name"),
    ({"volumeMounts": [{"name": "a", "mountPath": "/a", "readOnly": "no"}]}, "volumeMounts[0].readOnly"),
    ({"terminationGracePeriodSeconds": 3601}, "terminationGracePeriodSeconds"),
    ({"imagePullPolicy": "always"}, "imagePullPolicy"),
    ({"sharedMemory": "16GB"}, "sharedMemory"),
    ({"sharedMemory": "1Gi", "volumeMounts": [{"name": "a", "mountPath": "/dev/shm//"}]}, "sharedMemory"),
    ({"hostNetwork": "yes"}, "hostNetwork"),
    *(
        ({field: {"team": "vision", "tpu-operator.dev/slice-id": "mine"}}, field)
        for field in ("podLabels", "podAnnotations")
    ),
    ({"securityContext": {"privileged": True}}, "securityContext.privileged"),
    ({"securityContext": {"runAsUser": -1}}, "securityContext.runAsUser"),
    ({"securityContext": {"runAsUser": 2**31}}, "securityContext.runAsUser"),
    ({"securityContext": {"runAsUser": "root"}}, "securityContext.runAsUser"),
    ({"securityContext": {"fsGroup": -1}}, "securityContext.fsGroup"),
    ({"securityContext": {"supplementalGroups": [1.5]}}, "securityContext.supplementalGroups[0]"),
    (
        {"securityContext": {"runAsUser": 0, "capabilities": {"add": ["SYS_ADMIN"]}}},
        "securityContext.capabilities.add[0]",
    ),
    ({"securityContext": {"runAsUser": 0, "capabilities": {"add": []}}}, "securityContext.capabilities.add"),
    *(
        ({"securityContext": user | {"capabilities": {"add": ["IPC_LOCK"]}}}, "securityContext.capabilities")
        for user in ({}, {"runAsUser": 1000})
    ),
    *(
        ({"securityContext": user | {"privileged": True}}, "securityContext.privileged")
        for user in ({}, {"runAsUser": 1000})
    ),
    (
        {"securityContext": {"runAsUser": 0, "privileged": True, "capabilities": {"add": ["IPC_LOCK"]}}},
        "securityContext.capabilities",
    ),
    ({"nodeSelector": {"pool": "a", "cloud.google.com/gke-tpu-topology": "2x2"}}, "nodeSelector"),
]

_RECIPE: list[Row] = [
    ({"globalBatchSize": 0}, "globalBatchSize"),
    ({"globalBatchSize": -1}, "globalBatchSize"),
    ({"globalBatchSize": 2**31}, "globalBatchSize"),
    ({"globalBatchSize": 12.5}, "globalBatchSize"),
    ({"globalBatchSize": "128"}, "globalBatchSize"),
    ({"trainSteps": True}, "trainSteps"),
    ({"trainSteps": 0}, "trainSteps"),
    ({"trainSteps": ABSENT}, ""),
    ({"epochs": 3, "datasetSize": 9}, ""),
    (EPOCHS, "datasetSize"),
    ({"warmupSteps": -1}, "warmupSteps"),
    ({"warmupEpochs": 1}, "warmupEpochs"),
    ({"warmupEpochs": 1, "warmupSteps": 0, **IN_EPOCHS}, "warmupEpochs"),
    ({"warmupEpochs": 0.5, **IN_EPOCHS}, "warmupEpochs"),
    ({"evaluateEveryEpochs": 1}, "evaluateEveryEpochs"),
    ({"evaluateEveryEpochs": 1, **EVALUATED, **IN_EPOCHS}, "evaluateEveryEpochs"),
    ({"evaluateEveryEpochs": 0, **IN_EPOCHS}, "evaluateEveryEpochs"),
    ({"seed": -1}, "seed"),
    ({"tunedOn": {TYPE: "v9-8"}}, "tunedOn.acceleratorType"),
    ({"tunedOn": {TYPE: "v3-8", "hardware": "CPU"}}, "tunedOn.hardware"),
    ({"optimizer": {"name": "sgd"}}, "optimizer.learningRate"),
    ({"optimizer.learningRate": "fast"}, "optimizer.learningRate"),
    ({"optimizer.learningRate": 0.0}, "optimizer.learningRate"),
    ({"optimizer.learningRate": -0.1}, "optimizer.learningRate"),
    ({"optimizer.learningRate": 0}, "optimizer.learningRate"),
    ({"optimizer.learningRate": 1e19}, "optimizer.learningRate"),
    ({"optimizer.learningRate": 10**120}, "optimizer.learningRate"),
    ({"optimizer.learningRate": True}, "optimizer.learningRate"),
    ({"optimizer.learningRate": [0.1]}, "optimizer.learningRate"),
    ({"optimizer.learningRate": "nan"}, "optimizer.learningRate"),
    ({"optimizer.momentum": 1.0}, "optimizer.momentum"),
    ({"optimizer.momentum": 1}, "optimizer.momentum"),
    ({"optimizer.weightDecay": -1e-4}, "optimizer.weightDecay"),
    ({"optimizer.nesterov": True}, "optimizer.nesterov"),
    ({"scaling": {"learningRate": "Sqrt"}}, "scaling.learningRate"),
    ({"scaling": {"learningRate": "linear"}}, "scaling.learningRate"),
    ({"scaling": {"batch": "Constant"}}, "scaling.batch"),
    ({"scaling": {"steps": "SameTime"}}, "scaling.steps"),
    ({"scaling": {"steps": "SameLoss"}}, "scaling.steps"),
    ({"scaling": {"steps": "SameLoss", "learningRate": "AdaScale"}, "gradientNoiseScale": 9}, "scaling.learningRate"),
    ({"scaling": {"betas": "yes"}}, "scaling.betas"),
    ({"scaling": {"maxLearningRate": 0}}, "scaling.maxLearningRate"),
    ({"schedule": {"name": "Exponential"}}, "schedule.name"),
    ({"schedule": {"name": "Step"}}, "schedule.milestones"),
    ({"schedule": {"milestones": [9]}}, "schedule.milestones"),
    ({"schedule": {"name": "Step", "milestones": []}}, "schedule.milestones"),
    ({"schedule": {"name": "Step", "milestones": [0]}}, "schedule.milestones[0]"),
    ({"schedule": {"name": "Step", "milestones": ["9"]}}, "schedule.milestones[0]"),
    ({"schedule": {"milestoneEpochs": [9]}, **IN_EPOCHS}, "schedule.milestones"),
    ({"schedule": STEP | {"milestoneEpochs": [1]}, **IN_EPOCHS}, "schedule.milestoneEpochs"),
    ({"schedule": {"name": "Step", "milestoneEpochs": [9]}}, "schedule.milestoneEpochs"),
    ({"schedule": {"name": "Linear", "factor": -1}}, "schedule.factor"),
    ({"schedule": {"name": "Plateau"}, **EVALUATED}, "schedule.metric"),
    ({"schedule": {"name": "Linear", "patience": 1}}, "schedule.metric"),
    ({"schedule": PLATEAU | {"factor": 0}, **EVALUATED}, "schedule.factor"),
    ({"schedule": PLATEAU | {"factor": 1.0}, **EVALUATED}, "schedule.factor"),
    ({"schedule": PLATEAU | {"patience": 0}, **EVALUATED}, "schedule.patience"),
    ({"schedule": PLATEAU}, "evaluateEverySteps"),
    ({"stopEarly": STOP}, "evaluateEverySteps"),
    ({"stopEarly": STOP | {"patience": 0}, **EVALUATED}, "stopEarly.patience"),
    ({"stopEarly": STOP | {"minDelta": -1}, **EVALUATED}, "stopEarly.minDelta"),
    ({"evaluateEverySteps": 0}, "evaluateEverySteps"),
    ({"emaDecay": 1}, "emaDecay"),
    ({"gradientClipNorm": 0}, "gradientClipNorm"),
    ({"precision": "bf16"}, "precision"),
    ({"sharding": "Full"}, "sharding"),
    ({"gradientNoiseScale": 0}, "gradientNoiseScale"),
    ({"scaling": ADA_SCALE, "optimizer": {"name": "adamw", "learningRate": 0.1}}, "scaling.learningRate"),
    ({"scaling": ADA_SCALE | {"maxLearningRate": 1}}, "scaling.learningRate"),
    ({"scaling": ADA_SCALE | {"weightDecay": True}}, "scaling.learningRate"),
    ({"parameters": {"hidden": 128}}, "parameters.hidden"),
    ({"lr": "0.1"}, "lr"),
]

_ENTRY_CHECK: list[Row] = [
    ({"mode": "Auto", "compiles": "Auto"}, "compiles"),
    ({"compile": "Never"}, "compile"),
    ({"mode": "Skip", "compile": "Require"}, "compile"),
    ({"mode": "skip"}, "mode"),
    ({"deadlineSeconds": 0}, "deadlineSeconds"),
    ({"mode": "Skip", "dataInRegion": "Require"}, "dataInRegion"),
]

_RUN_POLICY: list[Row] = [
    ({"suspend": "yes"}, "suspend"),
    ({"startDeadlineSeconds": 0}, "startDeadlineSeconds"),
    ({"startDeadlineSeconds": "60"}, "startDeadlineSeconds"),
    ({"suspended": True}, "suspended"),
    ({"restart": {"limits": [{"class": "Hang", "max": 1}] * 2}}, "restart.limits"),
    ({"restart": {"limits": {"Hang": 1}}}, "restart.limits"),
    ({"restart": {"limits": [{"class": "Unknown", "max": -2}]}}, "restart.limits[0].max"),
    ({"restart": {"limits": [{"class": "Stuck", "max": 3}]}}, "restart.limits[0].class"),
    ({"restart": {"backoff": {"maxSeconds": 0}}}, "restart.backoff.maxSeconds"),
]


def _under(section: str, rows: list[Row]) -> list[Row]:
    return [
        ({f"{section}.{path}": value for path, value in changes.items()}, f"{section}.{field}".rstrip("."))
        for changes, field in rows
    ]


# What the arithmetic of catalogue and recipe rules out: CEL has no room for it, so the API server takes these jobs and
# the operator stalls them. `tpujob` refuses both kinds alike.
_ARITHMETIC: list[Row] = [
    ({"slice.machineType": "ct5lp-hightpu-8t"}, "slice.machineType"),
    ({"slice": TWO_HOSTS_AND_A_BIT}, "slice.chipsPerHost"),
    ({"slice.hardware": "CPU", "trainer.backend": "XLASPMD"}, "trainer.backend"),
    (
        {"slice.hardware": "CPU", "trainer.backend": "Torch", "trainer.torch": {"processesPerHost": 3}},
        "trainer.torch.processesPerHost",
    ),
    (ON_TORCH_TPU, "trainer.torch.processesPerHost"),
    ({"recipe.parameters": {"drop-out": "0.1", "DROP_OUT": "0.2"}}, "recipe.parameters"),
    ({"recipe.parameters": {"d" * 237: "0.1"}}, "recipe.parameters"),
    ({"recipe.globalBatchSize": 100}, "recipe.globalBatchSize"),
    (
        {"recipe.tunedOn": {TYPE: "v5litepod-4"}, "recipe.globalBatchSize": 4, "recipe.scaling": GLOBAL_CONSTANT},
        "recipe.globalBatchSize",
    ),
    ({"recipe.trainSteps": ABSENT, "recipe.epochs": 3, "recipe.datasetSize": 127}, "recipe.datasetSize"),
    (SIXTEEN_TIMES | {"trainer.backend": "XLASPMD"}, "recipe.scaling.learningRate"),
    (
        SIXTEEN_TIMES | {"slice": {TYPE: "v5litepod-4", "hardware": "CPU"}, "trainer.backend": "Torch"},
        "recipe.scaling.learningRate",
    ),
    (ADAPTIVE | {"recipe.tunedOn": {TYPE: "v5litepod-32"}}, "recipe.scaling.learningRate"),
    (SIXTEEN_TIMES | {"recipe.trainSteps": 2**24 + 1}, "recipe.scaling.learningRate"),
]

_ARITHMETIC += [
    (
        {"ladder.rungs": [RUNG, {"slice": {TYPE: "v6e-8"}, "steps": 50, "gates": {"minEfficiency": 0.5}}]},
        "ladder.rungs[1].gates.minEfficiency",
    ),
    (
        {"ladder": {"rungs": [RUNG], "top": {"gates": {"minEfficiency": 0.8}}}, "slice": {TYPE: "v6e-16"}},
        "ladder.top.gates.minEfficiency",
    ),
    (
        {"ladder.rungs": [RUNG], "recipe.tunedOn": {TYPE: "v5litepod-16"}, "recipe.scaling": GLOBAL_CONSTANT}
        | {"slice": {TYPE: "v3-32"}, "recipe.globalBatchSize": 16},
        "recipe.globalBatchSize",
    ),
    (
        {"ladder.rungs": [{"slice": {TYPE: "v3-32"}, "steps": 50}], "recipe.scaling": GLOBAL_CONSTANT}
        | {"recipe.globalBatchSize": 16},
        "ladder.rungs[0].slice",
    ),
]

# YAML has these numbers, JSON does not: no API server ever reads them.
_NOT_JSON: list[Row] = [
    ({"optimizer.learningRate": value}, "optimizer.learningRate") for value in (math.inf, -math.inf, math.nan)
]

UNDECODABLE_JOBS = [*_ENVELOPE, *_under("spec.recipe", _NOT_JSON)]
IMPOSSIBLE_JOBS = _under("spec", _ARITHMETIC)

REFUSED_JOBS: list[Row] = [
    *_OBJECT,
    *_under("spec", _SPEC),
    *_under("spec", _LADDER),
    *_under("spec.checkpoint", _CHECKPOINT),
    *_under("spec.report", _REPORT),
    *_under("spec.slice", _SLICE),
    *_under("spec.trainer", _TRAINER),
    *_under("spec.recipe", _RECIPE),
    *_under("spec.runPolicy", _RUN_POLICY),
    *_under("spec.entryCheck", _ENTRY_CHECK),
    ({"spec.entryCheck": {"compile": "Require"}, "spec.trainer.backend": "XLASPMD"}, "spec.entryCheck.compile"),
]

BAD_JOBS: list[Row] = [*UNDECODABLE_JOBS, *REFUSED_JOBS]

# What a list may hold once. The API server names the second.
DOUBLED: list[tuple[dict[str, Any], str]] = [
    ({"spec.trainer.env": 2 * [{"name": "A", "value": "b"}]}, "spec.trainer.env"),
    ({"spec.trainer.imagePullSecrets": 2 * [{"name": "key"}]}, "spec.trainer.imagePullSecrets"),
    ({"spec.trainer.volumes": 2 * [{"name": "a", "emptyDir": {}}]}, "spec.trainer.volumes"),
    ({"spec.trainer.volumeMounts": 2 * [{"name": "a", "mountPath": "/a"}]}, "spec.trainer.volumeMounts"),
]
