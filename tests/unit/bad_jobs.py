"""Everything that can be wrong with a job, as a table: what is changed, which field is named, what is said about it.

Paths are relative to their section; ABSENT removes a field.
"""

import math
from typing import Any

from tests.unit.jobs import ABSENT

Row = tuple[dict[str, Any], str, str]

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

# Read before any schema: an API server refuses these, too, but in words of its own.
_ENVELOPE: list[Row] = [
    ({"apiVersion": ABSENT}, "apiVersion", "is required"),
    ({"apiVersion": "tpu-operator.dev/v1"}, "apiVersion", "did you mean tpu-operator.dev/v1alpha1?"),
    ({"kind": ABSENT}, "kind", "is required"),
    ({"kind": "TPUTrainingJobs"}, "kind", "did you mean TPUTrainingJob?"),
    ({"metadata": ABSENT}, "metadata", "is required"),
    ({"metadata": "digits"}, "metadata", "must be a mapping of fields"),
]

_OBJECT: list[Row] = [
    ({"metadata.name": ABSENT}, "", "metadata.name must be"),
    ({"metadata.name": "a" * 49}, "", "metadata.name must be at most 48 characters"),
    ({"metadata.name": "Digits"}, "", "of a-z, 0-9 and '-'"),
    ({"metadata.name": "digits.v2"}, "", "of a-z, 0-9 and '-'"),
    ({"metadata.name": "2digits"}, "", "beginning with a letter"),
    (
        {
            "metadata.name": "a" * 45,
            "spec.slice": {"generation": "tpu7x", "topology": "16x24x24"},
        },
        "",
        "metadata.name has 45 characters; with 2304 hosts in a slice at most 44 fit",
    ),
    (
        {
            "metadata.name": "a" * 15,
            "spec.slice": {"generation": "tpu8t", "topology": "100x200", "chipsPerHost": 4},
        },
        "",
        "with 5000 hosts in a slice at most 14 fit",
    ),
    ({"metadata.name": "a" * 47, "spec.slice": {TYPE: "v5p-17920"}}, "", "at most 46 fit"),
    ({"spec": ABSENT}, "spec", "is required"),
    ({"spec": None}, "spec", "must be a mapping of fields"),
    ({"spec": []}, "spec", "must be a mapping of fields"),
    ({"spek": {}}, "spek", "unknown field; nearest: spec"),
]

_SPEC: list[Row] = [
    ({"managedBy": "multikueue"}, "managedBy", "is not a controller's name after its domain, such as kueue.x-k8s.io"),
    ({"managedBy": "/multikueue"}, "managedBy", "is not a controller's name after its domain"),
    ({"managedBy": "Kueue.x-k8s.io/"}, "managedBy", "is not a controller's name after its domain"),
    ({"slice": ABSENT}, "slice", "is required"),
    ({"data": {}}, "data.uri", "is required"),
    ({"placement": {}}, "placement", "give alternatives, count or both"),
    ({"placement": {"count": {}}}, "placement.count.min", "is required"),
    ({"placement": {"count": {"min": 0}}}, "placement.count.min", "0 is too small; the minimum is 1"),
    ({"placement": {"count": {"min": 1}}}, "placement.count", "must be below spec.slice.count, the most slices"),
    ({"placement": {"count": {"min": 1, "max": 2}}}, "placement.count.max", "unknown field"),
    ({"placement": {"alternatives": []}}, "placement.alternatives", "at least 1 item"),
    (
        {"placement": {"alternatives": [{"waitForPreviousSeconds": 3600}]}},
        "placement.alternatives[0].slice",
        "is required",
    ),
    (
        {"placement": {"alternatives": [{"slice": {TYPE: "v5litepod-7"}}]}},
        "placement.alternatives[0].slice.acceleratorType",
        "there is no accelerator type 'v5litepod-7'",
    ),
    (
        {"placement": {"alternatives": [{"slice": {TYPE: "v5litepod-8", "hardware": "CPU"}}]}},
        "placement.alternatives",
        "alternatives must have the hardware of spec.slice",
    ),
    (
        {"placement": {"alternatives": [{"slice": {TYPE: "v5litepod-8"}}], "returnToPreferred": "AtCheckpoint"}},
        "placement.returnToPreferred",
        "needs spec.checkpoint",
    ),
    (
        {"slice.provisioning": {"type": "Spot"}, "trainer.nodeSelector": {"cloud.google.com/reservation-name": "r"}},
        "trainer.nodeSelector",
        "leave them out: cloud.google.com/reservation-name",
    ),
    ({"recipie": {}}, "recipie", "unknown field; nearest: recipe"),
    (
        {"trainer.backend": "XLASPMD", "recipe.sharding": "Optimizer"},
        "recipe.sharding",
        "needs a process per replica, and backend XLASPMD runs one per host",
    ),
    ({"slice.count": 2}, "trainer.backend", "several slices need backend XLASPMD"),
    (ON_TORCH_TPU | {"slice.count": 2}, "trainer.backend", "several slices need backend XLASPMD"),
    (
        ON_TORCH_TPU | {"trainer.entrypoint": ABSENT, "trainer.command": ["python"], "slice.count": 2},
        "trainer.backend",
        "TorchTPU is not known to join slices",
    ),
    (ON_TORCH_TPU | {"slice": {TYPE: "v3-32"}}, "trainer.backend", "for v2 and v3, leave backend at XLA"),
    (
        ON_TORCH_TPU | {"slice": {"generation": "v3", "topology": "4x4"}},
        "trainer.backend",
        "for v2 and v3, leave backend at XLA",
    ),
    (
        {
            "slice.hardware": "CPU",
            "trainer.backend": "Torch",
            "trainer.torch": {"compileCache": "gs://bucket/programs"},
        },
        "trainer.torch.compileCache",
        "goes with device tpu",
    ),
    (
        {"report": {}, "trainer.entrypoint": ABSENT, "trainer.command": ["python"]},
        "report",
        "report needs trainer.entrypoint",
    ),
    ({"checkpoints": {"uri": "gs://bucket/a"}}, "checkpoints", "unknown field; nearest: checkpoint"),
]

_CHECKPOINT: list[Row] = [
    ({"keep": 3}, "uri", "is required"),
    (SAVED | {"uri": "gs://bucket"}, "uri", "'gs://bucket' is not gs://bucket/path or an absolute path such as /mnt"),
    (SAVED | {"uri": "gs://bucket/"}, "uri", "is not gs://bucket/path or an absolute path"),
    (SAVED | {"uri": "gs://Bucket/a"}, "uri", "is not gs://bucket/path or an absolute path"),
    (SAVED | {"uri": "s3://bucket/a"}, "uri", "is not gs://bucket/path or an absolute path"),
    (SAVED | {"uri": "runs/digits"}, "uri", "is not gs://bucket/path or an absolute path"),
    (SAVED | {"uri": "/"}, "uri", "is not gs://bucket/path or an absolute path"),
    (SAVED | {"uri": "/" + "a" * 1024}, "uri", "at most 1024 characters"),
    (SAVED | {"everySteps": 0}, "everySteps", "0 is too small; the minimum is 1"),
    (SAVED | {"everySeconds": "10"}, "everySeconds", "'10' is not a whole number"),
    (SAVED | {"keep": 0}, "keep", "0 is too small; the minimum is 1"),
    (SAVED | {"every": 10}, "every", "unknown field; nearest: everySteps"),
    (SAVED | {"keepBest": {"metric": "f1", "mode": "Max"}}, "keepBest", "needs recipe.evaluateEverySteps: without it"),
    (SAVED | {"keepBest": {"metric": "f1"}}, "keepBest.mode", "is required"),
    (SAVED | {"keepBest": {"metric": "", "mode": "Max"}}, "keepBest.metric", "at least 1 character"),
    (SAVED | {"keepBest": {"metric": "f1", "mode": "max"}}, "keepBest.mode", "did you mean Max?"),
    (SAVED | {"initFrom": {"uri": "w.safetensors"}}, "initFrom.uri", "is not gs://bucket/path or an absolute path"),
    (SAVED | {"initFrom": {"uri": "/a"}, "resumeFrom": "/b"}, "initFrom", "give resumeFrom or initFrom, not both"),
]

_REPORT: list[Row] = [
    ({"uri": "report.html"}, "uri", "is not gs://bucket/path or an absolute path"),
    ({"tensorBoard": "yes"}, "tensorBoard", "boolean"),
    ({"gradientNoiseScale": 1}, "gradientNoiseScale", "boolean"),
    ({"tensorboard": True}, "tensorboard", "unknown field; nearest: tensorBoard"),
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
    ({"ladder": {}}, "ladder.rungs", "is required"),
    ({"ladder.rungs": []}, "ladder.rungs", "at least 1 item"),
    ({"ladder.rungs": [RUNG] * 5}, "ladder.rungs", "at most 4 items"),
    ({"ladder.rungs": [RUNG | {"steps": 9}]}, "ladder.rungs[0].steps", "the minimum is 10"),
    ({"ladder.rungs": [RUNG | {"steps": 10_001}]}, "ladder.rungs[0].steps", "the maximum is 10000"),
    ({"ladder.rungs": [{"steps": 50}]}, "ladder.rungs[0].slice", "is required"),
    ({"ladder": {"rungs": [RUNG], "from": "checkpoint"}}, "ladder.from", "did you mean Checkpoint?"),
    ({"ladder": {"rungs": [RUNG], "from": "Checkpoint"}}, "ladder.from", "needs spec.checkpoint"),
    (
        {"ladder": {"rungs": [RUNG], "from": "Checkpoint"}, "checkpoint": SAVED | {"resumeFrom": "/mnt/b"}},
        "ladder.from",
        "needs spec.checkpoint without resumeFrom",
    ),
    (
        {"ladder.rungs": [RUNG | {"gates": {"minEfficiency": "0.9"}}]},
        "ladder.rungs",
        "leave it out of the first rung",
    ),
    ({"ladder.rungs": [{**RUNG, "slice": RUNG["slice"] | CPU}]}, "ladder.rungs", "the hardware of spec.slice"),
    ({"ladder.rungs": [RUNG]} | {f"trainer.{name}": value for name, value in OWN_LOOP.items()}, "ladder", "needs"),
    ({"ladder.rungs": [SECOND, RUNG]}, "ladder.rungs", "the rungs have 8, 4 chips"),
    ({"ladder.rungs": [RUNG, RUNG]}, "ladder.rungs", "the rungs have 4, 4 chips"),
    (
        {"ladder.rungs": [RUNG, {"slice": {"generation": "v4", "topology": "1x1x1"}, "steps": 50}]},
        "ladder.rungs",
        "the rungs have 4, 1 chips",
    ),
    ({"ladder.rungs": [{"slice": {TYPE: "v5litepod-32"}, "steps": 50}]}, "ladder.rungs", "more chips than"),
    ({"ladder.rungs": [{"slice": {TYPE: "v3-64"}, "steps": 50}]}, "ladder.rungs", "more chips than spec.slice"),
    (_gated(minEfficiency="0"), f"{_GATES}.minEfficiency", "a number above 0"),
    (_gated(minEfficiency=0.9), f"{_GATES}.minEfficiency", "write it as a string"),
    (_gated(noFindings=[]), f"{_GATES}.noFindings", "at least 1 item"),
    (_gated(noFindings=["HostSyncs"]), f"{_GATES}.noFindings[0]", "did you mean HostSync?"),
    (_gated(lossFalls="yes"), f"{_GATES}.lossFalls", "valid boolean"),
    (_evaluated(), f"{_GATES}.evaluation", "give min, max or both"),
    (_evaluated(min="0.5", max="0.4"), f"{_GATES}.evaluation.min", "must not be above max"),
    (_evaluated(min="-"), f"{_GATES}.evaluation.min", "a number such as"),
]

_SLICE: list[Row] = [
    ({TYPE: "v5litepod-12"}, TYPE, "there is no accelerator type 'v5litepod-12'; nearest: v5litepod-16, v5litepod-8"),
    ({TYPE: "v5e-16"}, TYPE, "nearest: v5litepod-16"),
    ({TYPE: "tpu"}, TYPE, "there is no accelerator type 'tpu'; nearest:"),
    ({TYPE: "v4-²"}, TYPE, "nearest: v4-8"),
    ({TYPE: "a" * 33}, TYPE, "at most 32 characters"),
    (NO_TYPE, "", "give either acceleratorType (like v5litepod-16) or generation and topology (like v5e and 4x4)"),
    (V5E_4X4, "", "give either acceleratorType (like v5litepod-16) or generation and topology"),
    (NO_TYPE | {"generation": "v5e"}, "", "give either acceleratorType"),
    (NO_TYPE | {"topology": "4x4"}, "", "give either acceleratorType"),
    (NO_TYPE | {"generation": "v5e", "topology": "4x4x4"}, "topology", "v5e has no topology '4x4x4'; nearest: "),
    (NO_TYPE | {"generation": "v4", "topology": "4x4"}, "topology", "v4 has no topology '4x4'; nearest: "),
    (
        NO_TYPE | {"generation": "v5", "topology": "4x4"},
        "generation",
        "'v5' is not known; known generations are v2, v3, v4, v5e",
    ),
    (
        NO_TYPE | {"generation": "tpu8t", "topology": "4x4"},
        "generation",
        "a newer one (like tpu8t) also needs chipsPerHost",
    ),
    (V5E_4X4 | NO_TYPE | {"chipsPerHost": 4}, "chipsPerHost", "only for generations that the catalogue lacks"),
    (NEWER | {"chipsPerHost": 0}, "chipsPerHost", "0 is too small; the minimum is 1"),
    (NEWER | {"chipsPerHost": "4"}, "chipsPerHost", "'4' is not a whole number"),
    (NEWER | {"chipsPerHost": 65}, "chipsPerHost", "65 is too large; the maximum is 64"),
    (NEWER | {"devicesPerChip": True}, "devicesPerChip", "True is not a whole number"),
    (NEWER | {"devicesPerChip": 9}, "devicesPerChip", "9 is too large; the maximum is 8"),
    (NO_TYPE | {"generation": "v4", "topology": "4x8x6"}, "topology", "v4 has no topology '4x8x6'; nearest: "),
    (NO_TYPE | {"generation": "v4", "topology": "8x4x4"}, "topology", "v4 has no topology '8x4x4'; nearest: "),
    (NO_TYPE | {"generation": "v4", "topology": "16x16x24"}, "topology", "v4 has no topology '16x16x24'; nearest: "),
    ({"provisioning": {}}, "provisioning.type", "is required"),
    ({"provisioning": {"type": "flexStart"}}, "provisioning.type", "did you mean FlexStart?"),
    ({"provisioning": {"type": "Reservation", "reservation": ""}}, "provisioning.reservation", "at least 1 character"),
    *(
        (
            {"provisioning": {"type": "Reservation", "reservation": wrong}},
            "provisioning.reservation",
            "give the reservation's name, or",
        )
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
    ({"provisioning": {"type": "Spot", "spot": True}}, "provisioning.spot", "unknown field"),
    ({"provisioning": {"type": "Reservation"}}, "provisioning.reservation", "need each other: give both or neither"),
    ({"provisioning": {"type": "Spot", "reservation": "r"}}, "provisioning.reservation", "need each other"),
    ({TYPE: "v4-16", "provisioning": {"type": "FlexStart"}}, "provisioning", "v3 and v4 have no flex-start"),
    (NO_TYPE | {"generation": "v2", "topology": "2x2"}, "hardware", "GKE has no v2 nodes; use v3"),
    ({TYPE: "v2-8"}, "hardware", "GKE has no v2 nodes; use v3, which also has two cores per chip"),
    ({TYPE: "v5litepod-4", "count": 2}, "count", "several hosts; the smallest of v5e is v5litepod-8 (2x4)"),
    ({TYPE: "v3-8", "count": 2}, "count", "v3 slices cannot be joined: Multislice needs v4 or newer"),
    ({TYPE: "v3-32", "count": 2}, "count", "v3 slices cannot be joined: Multislice needs v4 or newer"),
    ({TYPE: "v5litepod-8", "machineType": "ct5lp-hightpu-8t", "count": 2}, "count", "the smallest of v5e is"),
    (NO_TYPE | {"generation": "v4", "topology": "2x2x1", "count": 2}, "count", "of v4 is v4-16 (2x2x2)"),
    (NO_TYPE | {"generation": "tpu7x", "topology": "2x2x1", "count": 2}, "count", "of tpu7x is tpu7x-16 (2x2x2)"),
    (NEWER | {"chipsPerHost": 16, "count": 2}, "count", "more chips in topology than chipsPerHost"),
    ({TYPE: "v5litepod-128", "count": 157}, "", "5024 hosts are too many: a job can have at most 5000"),
    ({TYPE: "v5p-17920", "count": 3}, "", "6720 hosts are too many"),
    (V3_2048 | {"count": 20}, "", "5120 hosts are too many"),
    (V3_2048 | {"count": 20, "hardware": "CPU"}, "", "5120 hosts are too many"),
    (NO_TYPE | {"generation": "tpu7x", "topology": "16x24x24", "count": 30}, "", "69120 hosts are too many"),
    (NEWER | {"topology": "100x201"}, "", "5025 hosts are too many"),
    (NEWER | {"topology": "5001x1x1", "chipsPerHost": 1}, "", "5001 hosts are too many"),
    (NEWER | {"topology": "9999x9999x9999", "chipsPerHost": 1, "count": 256}, "", "255923207679744 hosts are too"),
    ({"hardware": "cpu"}, "hardware", "'cpu' is not one of TPU, CPU"),
    ({"count": 0}, "count", "0 is too small; the minimum is 1"),
    ({"count": -1}, "count", "-1 is too small; the minimum is 1"),
    ({"count": 257}, "count", "257 is too large; the maximum is 256"),
    ({"count": "2"}, "count", "'2' is not a whole number"),
    ({"machineType": ""}, "machineType", "at least 1 character"),
    ({"acceleratortype": "v3-8"}, "acceleratortype", "unknown field; nearest: acceleratorType"),
]

CODE = {"uri": "secret://code", "sha256": "09af" * 16}

_TRAINER: list[Row] = [
    ({"code": {"uri": CODE["uri"]}}, "code.sha256", "is required"),
    ({"code": CODE | {"sha256": "09af"}}, "code.sha256", "'09af' is not a SHA-256: 64 digits of 0-9 and a-f"),
    ({"code": CODE | {"sha256": "09AF" * 16}}, "code.sha256", "is not a SHA-256: 64 digits of 0-9 and a-f"),
    ({"code": CODE | {"uri": "s3://bucket/x/y"}}, "code.uri", "is not gs://bucket/folder/FILE, an absolute path"),
    ({"code": CODE | {"uri": "gs://bucket/y"}}, "code.uri", "is not gs://bucket/folder/FILE, an absolute path"),
    ({"code": CODE | {"uri": "secret://Code"}}, "code.uri", "or secret://NAME"),
    ({"code": CODE | {"uri": "secret://a/b"}}, "code.uri", "or secret://NAME"),
    ({"code": CODE | {"folder": "."}}, "code.folder", "unknown field"),
    ({"image": ABSENT}, "image", "is required"),
    ({"image": ""}, "image", "at least 1 character"),
    ({"entrypoint": ABSENT}, "", "give either entrypoint"),
    ({"command": ["python"]}, "", "give either entrypoint"),
    ({"args": ["--fast"]}, "args", "args need command"),
    ({"entrypoint": "examples/digits.py"}, "entrypoint", "of the form module:callable, such as"),
    ({"entrypoint": "examples.digits:"}, "entrypoint", "of the form module:callable, such as"),
    ({"backend": "torch"}, "backend", "did you mean Torch?"),
    ({"backend": "XLA-SPMD"}, "backend", "did you mean XLASPMD?"),
    (
        {"backend": "Torch"},
        "",
        "backend Torch needs torch.device tpu on hardware TPU, and another device on CPU",
    ),
    ({"backend": "Torch", "torch": {"device": "cuda"}}, "", "backend Torch needs torch.device tpu on hardware TPU"),
    ({"torch": {}}, "torch", "torch is only for backend: Torch"),
    ({"backend": "XLASPMD", "torch": {}}, "torch", "torch is only for backend: Torch"),
    ({"torch": {"device": "CPU"}}, "torch.device", "'CPU' is not of the form"),
    ({"torch": {"processesPerHost": 0}}, "torch.processesPerHost", "0 is too small; the minimum is 1"),
    ({"torch": {"backend": "nccl"}}, "torch.backend", "unknown field"),
    ({"torch": {"execution": "Jit"}}, "torch.execution", "'Jit'"),
    ({"backend": "Torch", "torch": {"execution": "Fuse"}}, "torch.execution", "it needs device: tpu"),
    (
        {"entrypoint": ABSENT, "command": ["python"], "backend": "Torch", "torch": {"execution": "Compile"}},
        "torch.execution",
        "a command makes its own",
    ),
    (OWN_LOOP | {"command": []}, "command", "at least 1 item"),
    (OWN_LOOP | {"command": "python train.py"}, "command", "must be a list"),
    ({"env": {"A": "b"}}, "env", "must be a list"),
    ({"env": [{"name": "A", "value": 1}]}, "env[0].value", '1 is a number; write it as a string: "1"'),
    ({"env": [{"name": "A"}, {"name": "B", "valu": "1"}]}, "env[1].valu", "unknown field; nearest: value"),
    ({"env": [{"name": "1A"}]}, "env[0].name", "'1A' is not of the form"),
    ({"env": [{"name": "A"}, {"name": "TPUJOB_SEED"}]}, "env", "torch_xla or libtpu: TPUJOB_SEED"),
    ({"resources": {"limits": {"cpu": []}}}, "resources.limits.cpu", 'is not a quantity such as 4, "500m" or "16Gi"'),
    ({"resources": {"limits": {"cpu": True}}}, "resources.limits.cpu", "True is not a quantity"),
    ({"resources": {"limits": {"cpu": 0.5}}}, "resources.limits.cpu", "0.5 is not a quantity"),
    ({"resources": {"requests": {"cpu": "4 cores"}}}, "resources.requests.cpu", "'4 cores' is not a quantity"),
    ({"resources": {"limits": {"memory": "16GB"}}}, "resources.limits.memory", "'16GB' is not a quantity"),
    ({"resources": {"limits": {"memory": "-1Gi"}}}, "resources.limits.memory", "'-1Gi' is not a quantity"),
    ({"resources": {"limits": {"memory": "1,5Gi"}}}, "resources.limits.memory", "'1,5Gi' is not a quantity"),
    ({"volumes": [{"name": "data"}]}, "volumes[0]", "give exactly one of emptyDir, configMap"),
    ({"volumes": [{"name": "data", "emptyDir": {}, "secret": {}}]}, "volumes[0]", "give exactly one of"),
    ({"volumes": [{"name": "data", "hostPath": {}}]}, "volumes[0].hostPath", "unknown field"),
    ({"volumes": [{"name": "My Data", "emptyDir": {}}]}, "volumes[0].name", "a name of a-z, 0-9"),
    ({"volumeMounts": [{"name": "a", "mountPath": "/a", "readOnly": "no"}]}, "volumeMounts[0].readOnly", "boolean"),
    ({"terminationGracePeriodSeconds": 3601}, "terminationGracePeriodSeconds", "the maximum is 3600"),
    ({"imagePullPolicy": "always"}, "imagePullPolicy", "'always' is not of the form"),
    ({"sharedMemory": 16}, "sharedMemory", '16 is a number; write it as a string: "16"'),
    ({"sharedMemory": "16"}, "sharedMemory", "'16' is not a size such as 512Mi or 16Gi"),
    ({"sharedMemory": "0Gi"}, "sharedMemory", "is not a size such as"),
    ({"sharedMemory": "16GB"}, "sharedMemory", "is not a size such as"),
    (
        {"sharedMemory": "1Gi", "volumeMounts": [{"name": "a", "mountPath": "/dev/shm//"}]},
        "sharedMemory",
        "has its own size",
    ),
    ({"hostNetwork": "yes"}, "hostNetwork", "boolean"),
    *(
        (
            {field: {"team": "vision", "tpu-operator.dev/slice-id": "mine"}},
            field,
            "leave out: tpu-operator.dev/slice-id",
        )
        for field in ("podLabels", "podAnnotations")
    ),
    ({"securityContext": {"privileged": True}}, "securityContext.privileged", "unknown field"),
    ({"securityContext": {"runAsUser": -1}}, "securityContext.runAsUser", "-1 is too small; the minimum is 0"),
    ({"securityContext": {"runAsUser": 2**31}}, "securityContext.runAsUser", "is too large"),
    ({"securityContext": {"runAsUser": "root"}}, "securityContext.runAsUser", "'root' is not a whole number"),
    ({"securityContext": {"fsGroup": -1}}, "securityContext.fsGroup", "-1 is too small"),
    ({"securityContext": {"supplementalGroups": [1.5]}}, "securityContext.supplementalGroups[0]", "whole number"),
    (
        {"securityContext": {"runAsUser": 0, "capabilities": {"add": ["SYS_ADMIN"]}}},
        "securityContext.capabilities.add[0]",
        "'SYS_ADMIN' is not one of DAC_OVERRIDE, IPC_LOCK",
    ),
    (
        {"securityContext": {"runAsUser": 0, "capabilities": {"add": []}}},
        "securityContext.capabilities.add",
        "at least 1 item",
    ),
    *(
        ({"securityContext": user | {"capabilities": {"add": ["IPC_LOCK"]}}}, "securityContext.capabilities", "set run")
        for user in ({}, {"runAsUser": 1000})
    ),
    (
        {"nodeSelector": {"pool": "a", "cloud.google.com/gke-tpu-topology": "2x2"}},
        "nodeSelector",
        "leave them out: cloud.google.com/gke-tpu-topology",
    ),
]

_RECIPE: list[Row] = [
    ({"globalBatchSize": 0}, "globalBatchSize", "0 is too small; the minimum is 1"),
    ({"globalBatchSize": -1}, "globalBatchSize", "-1 is too small; the minimum is 1"),
    ({"globalBatchSize": 2**31}, "globalBatchSize", "2147483648 is too large; the maximum is 2147483647"),
    ({"globalBatchSize": 12.5}, "globalBatchSize", "12.5 is not a whole number"),
    ({"globalBatchSize": "128"}, "globalBatchSize", "'128' is not a whole number"),
    ({"trainSteps": True}, "trainSteps", "True is not a whole number"),
    ({"trainSteps": 0}, "trainSteps", "0 is too small; the minimum is 1"),
    ({"trainSteps": ABSENT}, "", "give exactly one of trainSteps and epochs"),
    ({"epochs": 3, "datasetSize": 9}, "", "give exactly one of trainSteps and epochs"),
    (EPOCHS, "datasetSize", "epochs and datasetSize (training examples) need each other"),
    ({"datasetSize": 1000}, "datasetSize", "epochs and datasetSize (training examples) need each other"),
    ({"warmupSteps": -1}, "warmupSteps", "-1 is too small; the minimum is 0"),
    ({"seed": -1}, "seed", "-1 is too small; the minimum is 0"),
    ({"tunedOn": {TYPE: "v9-8"}}, "tunedOn.acceleratorType", "there is no accelerator type 'v9-8'"),
    ({"tunedOn": {TYPE: "v3-8", "hardware": "CPU"}}, "tunedOn.hardware", "unknown field"),
    ({"optimizer": {"name": "sgd"}}, "optimizer.learningRate", "is required"),
    ({"optimizer.learningRate": 0.1}, "optimizer.learningRate", '0.1 is a number; write it as a string: "0.1"'),
    ({"optimizer.learningRate": "fast"}, "optimizer.learningRate", "'fast' is not a number above 0 such as"),
    ({"optimizer.learningRate": "0.0"}, "optimizer.learningRate", "'0.0' is not a number above 0 such as"),
    ({"optimizer.learningRate": "-0.1"}, "optimizer.learningRate", "'-0.1' is not a number above 0 such as"),
    ({"optimizer.learningRate": "nan"}, "optimizer.learningRate", "'nan' is not a number above 0 such as"),
    ({"optimizer.momentum": "1.0"}, "optimizer.momentum", "'1.0' is not a number from 0 to below 1"),
    ({"optimizer.weightDecay": "-1e-4"}, "optimizer.weightDecay", "'-1e-4' is not a number of 0 or more"),
    ({"optimizer.nesterov": True}, "optimizer.nesterov", "unknown field"),
    ({"scaling": {"learningRate": "Sqrt"}}, "scaling.learningRate", "is not one of Auto, Linear, SquareRoot, Unscaled"),
    ({"scaling": {"learningRate": "linear"}}, "scaling.learningRate", "did you mean Linear?"),
    ({"scaling": {"batch": "Constant"}}, "scaling.batch", "is not one of PerCoreConstant, GlobalConstant"),
    ({"scaling": {"betas": "yes"}}, "scaling.betas", "boolean"),
    ({"scaling": {"maxLearningRate": "0"}}, "scaling.maxLearningRate", "'0' is not a number above 0"),
    ({"schedule": {"name": "Exponential"}}, "schedule.name", "is not one of Constant, Linear, Cosine, Step"),
    ({"schedule": {"name": "Step"}}, "schedule.milestones", "(or milestoneEpochs) and schedule Step need each"),
    ({"schedule": {"milestones": [9]}}, "schedule.milestones", "(or milestoneEpochs) and schedule Step need each"),
    ({"schedule": {"name": "Step", "milestones": []}}, "schedule.milestones", "at least 1 item"),
    ({"schedule": {"name": "Step", "milestones": [0]}}, "schedule.milestones[0]", "0 is too small; the minimum is 1"),
    ({"schedule": {"name": "Step", "milestones": ["9"]}}, "schedule.milestones[0]", "'9' is not a whole number"),
    (
        {"schedule": {"milestoneEpochs": [9]}, **IN_EPOCHS},
        "schedule.milestones",
        "(or milestoneEpochs) and schedule Step",
    ),
    ({"schedule": STEP | {"milestoneEpochs": [1]}, **IN_EPOCHS}, "schedule.milestoneEpochs", "or in epochs"),
    ({"schedule": {"name": "Step", "milestoneEpochs": [9]}}, "schedule.milestoneEpochs", "needs epochs and data"),
    ({"schedule": {"name": "Linear", "factor": "-1"}}, "schedule.factor", "'-1' is not a number of 0 or more"),
    ({"schedule": {"name": "Plateau"}, **EVALUATED}, "schedule.metric", "Plateau needs metric, mode and patience"),
    ({"schedule": {"name": "Linear", "patience": 1}}, "schedule.metric", "Plateau needs metric, mode and patience; no"),
    ({"schedule": PLATEAU | {"factor": "0"}, **EVALUATED}, "schedule.factor", "must be above 0 and below 1"),
    ({"schedule": PLATEAU | {"factor": "1.0"}, **EVALUATED}, "schedule.factor", "must be above 0 and below 1"),
    ({"schedule": PLATEAU | {"patience": 0}, **EVALUATED}, "schedule.patience", "0 is too small; the minimum is 1"),
    ({"schedule": PLATEAU}, "evaluateEverySteps", "schedule Plateau needs evaluateEverySteps, because it follows"),
    ({"stopEarly": STOP}, "evaluateEverySteps", "stopEarly needs evaluateEverySteps, because it follows"),
    ({"stopEarly": STOP | {"patience": 0}, **EVALUATED}, "stopEarly.patience", "0 is too small; the minimum is 1"),
    ({"stopEarly": STOP | {"minDelta": "-1"}, **EVALUATED}, "stopEarly.minDelta", "'-1' is not a number of 0 or more"),
    ({"evaluateEverySteps": 0}, "evaluateEverySteps", "0 is too small; the minimum is 1"),
    ({"emaDecay": "1"}, "emaDecay", "'1' is not a number from 0 to below 1"),
    ({"gradientClipNorm": "0"}, "gradientClipNorm", "'0' is not a number above 0"),
    ({"gradientClipNorm": 1.0}, "gradientClipNorm", "write it as a string"),
    ({"precision": "bf16"}, "precision", "is not one of Float32, BFloat16Mixed, BFloat16"),
    ({"sharding": "Full"}, "sharding", "is not one of Replicated, Optimizer"),
    ({"gradientNoiseScale": "0"}, "gradientNoiseScale", "'0' is not a number above 0"),
    ({"parameters": {"hidden": 128}}, "parameters.hidden", '128 is a number; write it as a string: "128"'),
    ({"lr": "0.1"}, "lr", "unknown field"),
]

_ENTRY_CHECK: list[Row] = [
    ({"mode": "Auto", "compiles": "Auto"}, "compiles", "unknown field"),
    ({"compile": "Never"}, "compile", "is not one of Auto, Require, Skip"),
    ({"mode": "Skip", "compile": "Require"}, "compile", "compile Require needs the entry check"),
    ({"mode": "skip"}, "mode", "did you mean Skip?"),
    ({"deadlineSeconds": 0}, "deadlineSeconds", "0 is too small; the minimum is 1"),
    ({"mode": "Skip", "dataInRegion": "Require"}, "dataInRegion", "dataInRegion Require needs the entry check"),
]

_RUN_POLICY: list[Row] = [
    ({"suspend": "yes"}, "suspend", "boolean"),
    ({"startDeadlineSeconds": 0}, "startDeadlineSeconds", "0 is too small; the minimum is 1"),
    ({"startDeadlineSeconds": "60"}, "startDeadlineSeconds", "'60' is not a whole number"),
    ({"suspended": True}, "suspended", "unknown field; nearest: suspend"),
    ({"restart": {"limits": {"Unknown": -2}}}, "restart.limits.Unknown", "-2 is too small; the minimum is -1"),
    ({"restart": {"limits": {"Stuck": 3}}}, "restart.limits.Stuck", "unknown field; known: UserError, Infrastructure"),
    ({"restart": {"backoff": {"maxSeconds": 0}}}, "restart.backoff.maxSeconds", "0 is too small; the minimum is 1"),
]


def _under(section: str, rows: list[Row]) -> list[Row]:
    return [
        ({f"{section}.{path}": value for path, value in changes.items()}, f"{section}.{field}".rstrip("."), fragment)
        for changes, field, fragment in rows
    ]


# What the arithmetic of catalogue and recipe rules out: CEL has no room for it, so the API server takes these jobs and
# the operator stalls them. `tpujob` refuses both kinds alike.
_ARITHMETIC: list[Row] = [
    (
        {"slice.machineType": "ct5lp-hightpu-8t"},
        "slice.machineType",
        "does not have this slice; it exists on ct5lp-hightpu-4t",
    ),
    ({"slice": TWO_HOSTS_AND_A_BIT}, "slice.chipsPerHost", "10 chips (2x5) cannot be divided over hosts of 4"),
    (
        {"slice.hardware": "CPU", "trainer.backend": "XLASPMD"},
        "trainer.backend",
        "XLASPMD on hardware CPU runs on one host, not on 4, because XLA's CPU client cannot connect processes",
    ),
    (
        {"slice.hardware": "CPU", "trainer.backend": "Torch", "trainer.torch": {"processesPerHost": 3}},
        "trainer.torch.processesPerHost",
        "4 replicas per host cannot be divided over 3 processes; possible here: 1, 2, 4",
    ),
    (
        ON_TORCH_TPU,
        "trainer.torch.processesPerHost",
        "TorchTPU runs a process for each device: 4 on each host of v5litepod-16, got 1",
    ),
    (
        {"recipe.parameters": {"drop-out": "0.1", "DROP_OUT": "0.2"}},
        "recipe.parameters",
        "'DROP_OUT' and 'drop-out' would both be the variable TPUJOB_PARAMETER_DROP_OUT; rename one",
    ),
    ({"recipe.globalBatchSize": 100}, "recipe.globalBatchSize", "does not divide over the 16 replicas"),
    (
        {"recipe.tunedOn": {TYPE: "v5litepod-4"}, "recipe.globalBatchSize": 4, "recipe.scaling": GLOBAL_CONSTANT},
        "recipe.globalBatchSize",
        "4 does not divide over the 16 replicas of this slice; nearest: 16",
    ),
    (
        {"recipe.trainSteps": ABSENT, "recipe.epochs": 3, "recipe.datasetSize": 127},
        "recipe.datasetSize",
        "127 examples are fewer than one global batch of 128",
    ),
]

_ARITHMETIC += [
    (
        {"ladder.rungs": [RUNG, {"slice": {TYPE: "v6e-8"}, "steps": 50, "gates": {"minEfficiency": "0.5"}}]},
        "ladder.rungs[1].gates.minEfficiency",
        "v6e has other chips than v5e",
    ),
    (
        {"ladder.rungs": [RUNG], "recipe.tunedOn": {TYPE: "v5litepod-16"}, "recipe.scaling": GLOBAL_CONSTANT}
        | {"slice": {TYPE: "v3-32"}, "recipe.globalBatchSize": 16},
        "recipe.globalBatchSize",
        "16 does not divide over the 32 replicas",
    ),
    (
        {"ladder.rungs": [{"slice": {TYPE: "v3-32"}, "steps": 50}], "recipe.scaling": GLOBAL_CONSTANT}
        | {"recipe.globalBatchSize": 16},
        "ladder.rungs[0].slice",
        "recipe.globalBatchSize: 16 does not divide over the 32 replicas",
    ),
]

# YAML has these numbers, JSON does not: no API server ever reads them.
_NOT_JSON: list[Row] = [
    (
        {"optimizer.learningRate": value},
        "optimizer.learningRate",
        f'{value} is not finite; write a finite decimal as a string, such as "0.1"',
    )
    for value in (math.inf, -math.inf, math.nan)
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
    (
        {"spec.entryCheck": {"compile": "Require"}, "spec.trainer.backend": "XLASPMD"},
        "spec.entryCheck.compile",
        "entryCheck.compile Require needs backend XLA",
    ),
]

BAD_JOBS: list[Row] = [*UNDECODABLE_JOBS, *REFUSED_JOBS]

# What a list may hold once. The API server names the second.
DOUBLED: list[tuple[dict[str, Any], str]] = [
    ({"spec.trainer.env": 2 * [{"name": "A", "value": "b"}]}, "spec.trainer.env"),
    ({"spec.trainer.imagePullSecrets": 2 * [{"name": "key"}]}, "spec.trainer.imagePullSecrets"),
    ({"spec.trainer.volumes": 2 * [{"name": "a", "emptyDir": {}}]}, "spec.trainer.volumes"),
    ({"spec.trainer.volumeMounts": 2 * [{"name": "a", "mountPath": "/a"}]}, "spec.trainer.volumeMounts"),
]
