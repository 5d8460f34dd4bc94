"""What deserves a warning before chips are paid for: fields without effect, hosts without peers, lost checkpoints.

Only the trainer knows whether a task builds its own optimizer, and compares it with the recipe when it starts.
"""

import difflib
import re
from collections.abc import Iterator
from decimal import Decimal

from tpu_contract.protocol import OPTIMIZERS, PROGRAM_CHECKS, XLA_CHECKS
from tpu_contract.run_spec import Execution, ScheduleName, Sharding
from tpu_training_operator.api.catalogue import Shape
from tpu_training_operator.api.job import Spec
from tpu_training_operator.api.recipe import Optimizer, Recipe
from tpu_training_operator.api.slice import Hardware, ProvisioningType
from tpu_training_operator.api.trainer import BackendName, Trainer
from tpu_training_operator.api.words import count
from tpu_training_operator.domain.job.recipe.decays import tuned_weight_decay
from tpu_training_operator.domain.job.recipe.optimizers import takes
from tpu_training_operator.domain.job.recipe.pod_parts import pod_part_warnings
from tpu_training_operator.domain.job.recipe.scale import ScaledRecipe
from tpu_training_operator.domain.job.recipe.torchrun import torchrun_warnings
from tpu_training_operator.domain.job.topology import SliceLayout

_SETTINGS = ("momentum", "weight_decay", "beta1", "beta2", "epsilon")
_CLOSE = 0.7
# Fewer bytes are a number of GiB or MiB whose unit was forgotten.
_LEAST_BYTES = 2**20
# Volumes of other kinds end with the pod, or cannot be written to.
_OUTLIVING_VOLUMES = ("persistent_volume_claim", "csi")


def warnings(spec: Spec, layout: SliceLayout, recipe: ScaledRecipe) -> Iterator[str]:
    """Yields the warnings that hold on a cluster and on the user's machine alike."""
    yield from recipe.warnings
    yield from _separate_models(spec, layout.hosts)
    yield from torchrun_warnings(spec, layout.hosts)
    if spec.trainer.entrypoint is not None:
        yield from _unused_optimizer_settings(spec.recipe.optimizer)
        yield from _unused_scaling(spec.recipe)
        yield from _unused_schedule(spec.recipe, recipe)
        yield from _unused_patience(spec.recipe, recipe)
        yield from _undividable_state(spec.recipe)
    yield from _amounts_without_a_unit(spec.trainer)
    yield from _words_in_one(spec.trainer)
    yield from pod_part_warnings(spec.trainer)
    yield from _gates_that_cannot_pass(spec)
    if not layout.shape.verified:
        yield f"only one source lists {layout.shape.topology} on {layout.shape.generation}"
    if spec.slice.hardware is Hardware.TPU:
        yield from _chips_unknown_to_the_image(spec.trainer.backend, layout.shape)


def _chips_unknown_to_the_image(backend: BackendName, shape: Shape) -> Iterator[str]:
    """Yields why the worker image of this version cannot use the slice."""
    if backend is BackendName.TORCH:
        if shape.generation == "v4":
            yield (
                "TorchTPU 0.2 looks for chips in /dev/vfio, and GKE gives v4's as /dev/accel: a worker would find none;"
                " leave trainer.backend at XLA"
            )
    elif shape.generation == "tpu7x":
        yield (
            "the libtpu of torch_xla 2.9 (0.0.21) does not know tpu7x: a worker could not open its chips; use"
            " trainer.backend Torch, or an image with a newer libtpu"
        )
    elif shape.accelerator_type == "v3-16":
        yield "torch_xla 2.9 does not know v3-16 and would fail at every start (KeyError); use v3-8 or v3-32"


def _amounts_without_a_unit(trainer: Trainer) -> Iterator[str]:
    resources = trainer.resources
    sides = {"requests": resources.requests, "limits": resources.limits} if resources is not None else {}
    amounts = {f"resources.{side}.memory": (of or {}).get("memory") for side, of in sides.items()}
    for field, amount in {**amounts, "sharedMemory": trainer.shared_memory}.items():
        if amount is not None and str(amount).isdigit() and int(amount) < _LEAST_BYTES:
            yield f"trainer.{field} is {amount} bytes; a number without a unit is bytes: write {amount}Gi"


def _words_in_one(trainer: Trainer) -> Iterator[str]:
    """Yields a warning about a command line that stands in one item of the list. No shell takes it apart."""
    program, *others = trainer.command or ("",)
    for text in (program, *(word for word in others if re.match(r"\S+\.py\s", word))):
        if len(words := text.split()) > 1 and "/" not in program:
            yield f"trainer.command has {text!r} as one word, which no shell takes apart: write [{', '.join(words)}]"


def _gates_that_cannot_pass(spec: Spec) -> Iterator[str]:
    """Yields a warning for each gate that cannot pass: the job would climb the ladder up to it and no further."""
    if spec.ladder is None or spec.trainer.backend is not BackendName.TORCH:
        return
    compiles = spec.trainer.torch is not None and spec.trainer.torch.execution is Execution.COMPILE
    cannot_see = XLA_CHECKS if compiles else (*XLA_CHECKS, *PROGRAM_CHECKS)
    for index, rung in enumerate(spec.ladder.rungs):
        wanted = (rung.gates and rung.gates.no_findings) or ()
        if unseen := [check for check in wanted if check in cannot_see]:
            yield (
                f"spec.ladder.rungs[{index}].gates.noFindings: with backend Torch nothing can look for "
                f"{', '.join(unseen)}, so this gate fails; leave it out"
            )


def _begins_again(spec: Spec, train_steps: int) -> Iterator[str]:
    """Yields a warning for a job that is bound to lose its slice, and would begin again at step 0."""
    provisioning, checkpoint = spec.slice.provisioning, spec.checkpoint
    spot = provisioning is not None and provisioning.type is ProvisioningType.SPOT
    # A user's own loop may save checkpoints anywhere.
    if spec.trainer.entrypoint is None or not (spot or spec.placement):
        return
    if checkpoint is None and spot:
        yield "GKE may reclaim spot slices at any time; without spec.checkpoint every restart begins at step 0"
    elif checkpoint is None:
        yield "spec.placement lets the job move; without spec.checkpoint every move begins at step 0"
    elif checkpoint.every_seconds is None and (checkpoint.every_steps or 0) >= train_steps:
        yield (
            f"the training ends after {count(train_steps, 'step')}, and spec.checkpoint.everySteps is"
            f" {checkpoint.every_steps}: a slice that is lost without notice takes all steps with it; lower it, or set"
            " everySeconds"
        )


def checkpoint_warnings(spec: Spec, train_steps: int) -> list[str]:
    """Returns warnings about lost or missing checkpoints and reports; none concerns a run on the user's machine."""
    lost = [*_begins_again(spec, train_steps), *_unkept_reports(spec)]
    if spec.checkpoint is None:
        return lost
    weights = spec.checkpoint.init_from
    places = {
        "uri": spec.checkpoint.uri,
        "resumeFrom": spec.checkpoint.resume_from,
        "initFrom.uri": weights.uri if weights else None,
    }
    return lost + [
        f"spec.checkpoint.{field} {place} is inside the worker and is lost with it; mount a shared volume there"
        " (persistentVolumeClaim or csi) or use gs://bucket/path"
        for field, place in places.items()
        if place is not None
        and place.startswith("/")
        and not any(_is_inside(place, mount) for mount in _outliving_mounts(spec))
    ]


def _unkept_reports(spec: Spec) -> Iterator[str]:
    """Yields a warning for each part of the report that needs a place and has none."""
    if (report := spec.report) is not None and report.uri is None:
        wanted = {"profile": report.profile, "tensorBoard": report.tensor_board}
        for part in (part for part, value in wanted.items() if value):
            yield f"spec.report.{part} has no effect on a cluster without spec.report.uri, the place to keep it"


def _outliving_mounts(spec: Spec) -> list[str]:
    names = {v.name for v in spec.trainer.volumes or () if v.model_fields_set & set(_OUTLIVING_VOLUMES)}
    return [mount.mount_path for mount in spec.trainer.volume_mounts or () if mount.name in names]


def _is_inside(path: str, mount: str) -> bool:
    return f"{path}/".startswith(f"{mount.rstrip('/')}/")


def _separate_models(spec: Spec, hosts: int) -> Iterator[str]:
    """Yields a warning if the hosts of a user's own loop do not train one model, or do so only with torch_xla."""
    trainer = spec.trainer
    if trainer.command is None or hosts == 1 or trainer.backend is BackendName.TORCH:
        return
    if spec.slice.hardware is Hardware.TPU:
        yield (
            f"the {hosts} hosts train one model only if the program of trainer.command joins them, as torch_xla.launch"
            " does: a loop of plain torch trains a model of its own on the CPU of each host"
        )
    else:
        yield (
            f"each of the {hosts} hosts trains its own model: on hardware CPU torch_xla cannot connect hosts, and the"
            " trainer does not join the processes of trainer.command; with backend Torch, torchrun joins them"
        )


def _unused_optimizer_settings(optimizer: Optimizer) -> Iterator[str]:
    name = optimizer.name.lower()
    if name not in OPTIMIZERS:
        nearest = difflib.get_close_matches(name.rpartition(".")[2], OPTIMIZERS, n=1, cutoff=_CLOSE)
        hint = f" (did you mean {nearest[0]}?)" if nearest else ""
        yield (
            f"the trainer builds {', '.join(sorted(OPTIMIZERS))}, but not {optimizer.name}{hint}; unless the task"
            " brings its own optimizer, the run fails when it starts"
        )
        return
    for field in _SETTINGS:
        if getattr(optimizer, field) is not None and not takes(optimizer, field):
            yield f"recipe.optimizer.{Optimizer.model_fields[field].alias} has no effect: {name} does not take it"


def _undividable_state(recipe: Recipe) -> Iterator[str]:
    if recipe.sharding is not Sharding.REPLICATED and recipe.optimizer.name.lower() == "adafactor":
        yield (
            f"recipe.sharding {recipe.sharding} needs an optimizer that updates each element by itself, and adafactor"
            " does not: the run fails when it starts; leave sharding out, or use adamw or sgd"
        )


def _unused_scaling(recipe: Recipe) -> Iterator[str]:
    scaling, optimizer = recipe.scaling, recipe.optimizer
    if scaling.betas and not takes(optimizer, "beta2"):
        why = f"{optimizer.name} does not take betas" if optimizer.name.lower() in OPTIMIZERS else "beta2 is not set"
        yield f"recipe.scaling.betas has no effect: {why}"
    if scaling.weight_decay and tuned_weight_decay(recipe) is None:
        yield "recipe.scaling.weightDecay has no effect: recipe.optimizer.weightDecay is not set"
    if scaling.ema and recipe.ema_decay is None:
        yield "recipe.scaling.ema has no effect: recipe.emaDecay is not set"


def _unused_patience(recipe: Recipe, scaled: ScaledRecipe) -> Iterator[str]:
    every = scaled.evaluate_every_steps or 0
    if every > scaled.train_steps:
        field = "evaluateEverySteps" if recipe.evaluate_every_epochs is None else "evaluateEveryEpochs"
        yield (
            f"recipe.{field} has no effect: the first evaluation would be after {count(every, 'step')}, and the"
            f" training ends after {scaled.train_steps}"
        )
    patiences = {"recipe.schedule": scaled.plateau_patience, "recipe.stopEarly": scaled.stop_patience}
    for field, patience in patiences.items():
        if patience is not None and patience * every >= scaled.train_steps:
            yield (
                f"{field} has no effect: {count(patience, 'evaluation')} without improvement take"
                f" {count(patience * every, 'step')}, and the training ends after {scaled.train_steps}"
            )


def _unused_schedule(recipe: Recipe, scaled: ScaledRecipe) -> Iterator[str]:
    if recipe.schedule.factor is not None and recipe.schedule.name is ScheduleName.CONSTANT:
        yield "recipe.schedule.factor has no effect: schedule Constant keeps the learning rate"
    steps = count(scaled.train_steps, "step")
    late = [milestone for milestone in scaled.milestones if milestone >= scaled.train_steps]
    if late:
        yield f"milestones {', '.join(map(str, late))} are not reached: the training ends after {steps}"
    way = "; set recipe.scaling.ema" if scaled.factor > 1 and not recipe.scaling.ema else ""
    if scaled.ema_decay is not None and (1 - Decimal(scaled.ema_decay)) * scaled.train_steps < 1:
        yield (
            f"emaDecay {scaled.ema_decay} averages over more than the {steps} of the training; the average, which is"
            f" what is evaluated, stays close to the initial weights{way}"
        )
