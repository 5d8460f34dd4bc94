"""Runs one replica under Lightning's own Trainer, from the module to the outcome.

Loop, hooks, callbacks and optimizers are Lightning's; gang, order of examples, checkpoints, doctor and reports are the
trainer's (`strategy`, `loaders`, `state`, `callbacks`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tpu_contract.protocol import Phase, StartPhase
from tpu_contract.run_spec import NotFinitePolicy, RunSpec
from tpu_trainer.checkpoint.catalogue import LoadedCheckpoint
from tpu_trainer.checkpoint.handover import fetch_all
from tpu_trainer.checkpoint.resume import Start, document
from tpu_trainer.checkpoint.snapshot import Snapshot, is_from_lightning
from tpu_trainer.contract.errors import TrainerError, UserCodeError, user_code
from tpu_trainer.contract.findings import Finding, NumericalHealth
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.data.order import Order, Position
from tpu_trainer.doctor.last_weights import checksum_of
from tpu_trainer.lightning.lightning_run import LightningRun
from tpu_trainer.lightning.session import overrides
from tpu_trainer.lightning_trainer.callbacks import (
    FirstCallback,
    GangCallback,
    GangTrainer,
    StoppedError,
    log_everywhere,
)
from tpu_trainer.lightning_trainer.gradients import Gradients
from tpu_trainer.lightning_trainer.loaders import Division
from tpu_trainer.lightning_trainer.package import derive, package_of, refuse_mixed
from tpu_trainer.lightning_trainer.rates import OptimizerRates
from tpu_trainer.lightning_trainer.state import HERE, snapshot_of_state, state_of_snapshot
from tpu_trainer.lightning_trainer.strategy import GangAccelerator, GangStrategy, XlaAutocast
from tpu_trainer.loop.checkpoints import CheckpointStorage, describe_nothing_left, report_origin
from tpu_trainer.loop.context import RunContext
from tpu_trainer.loop.ending import (
    keep_last,
    save_result,
    stopped_outcome,
    succeeded_outcome,
    warn_left_out,
    warn_unlearned,
    write_weights,
)
from tpu_trainer.loop.instruments import Instruments
from tpu_trainer.storage import open_store
from tpu_trainer.task.logbook import Logbook
from tpu_trainer.task.task import Hyperparameters

_DECIDED = {
    **dict.fromkeys(("accelerator", "devices", "num_nodes", "strategy", "plugins", "sync_batchnorm"), "the slice"),
    **dict.fromkeys(("max_steps", "max_epochs", "max_time", "min_steps", "min_epochs"), "recipe.trainSteps or epochs"),
    "accumulate_grad_batches": "recipe.globalBatchSize and the slice",
    **dict.fromkeys(("use_distributed_sampler", "limit_train_batches", "overfit_batches"), "the trainer's order"),
    "default_root_dir": "checkpoint.uri",
    **dict.fromkeys(("fast_dev_run", "barebones"), "the run spec"),
}
"""Options of Lightning's Trainer that follow from the recipe or the slice, and from what exactly."""

_LOGGER_FOLDER = "lightning"


def _parts(run: LightningRun) -> Iterator[object]:
    """Yields the data module, callbacks and loggers; an option may be one part or a list."""
    for part in (run.data, run.options.get("callbacks"), run.options.get("logger")):
        yield from part if isinstance(part, list | tuple) else [part]


@dataclass(frozen=True)
class LightningTraining:
    """A replica's training of `asked.module` by Lightning's Trainer."""

    context: RunContext
    asked: LightningRun

    @property
    def module(self) -> Any:
        return self.asked.module

    def check(self) -> Any:
        """Returns the Lightning package that the module derives from.

        Raises:
            UserCodeError: the module is not a LightningModule, or Lightning's Trainer cannot do here what the module or
                the recipe needs.
        """
        lightning = package_of(self.module)
        refuse_mixed(self.module, _parts(self.asked))
        _refuse(self.context.spec, self.asked)
        return lightning

    def run(self) -> Outcome:
        """Runs the training to its outcome.

        Raises:
            UserCodeError: as `check` does, or the module's code raised.
        """
        lightning = self.check()
        hp, backend = self._in_one_pass(Hyperparameters.of(self.context.spec)), self.context.backend
        if hp.evaluate_every_steps is not None and not self._validates:
            text = f"evaluateEverySteps {hp.evaluate_every_steps} is not used: the module has nothing to validate"
            self.context.outputs.add_finding(Finding("Recipe", 0, text))
        self.context.start_times.enter(StartPhase.CHECKPOINT)
        storage = CheckpointStorage.of(self.context.spec, self.module, backend)
        checkpoint = storage.choose(backend, self.context.outputs)
        start = storage.start(checkpoint, hp, self.context.spec)
        if checkpoint is not None and storage.target is not None:
            _check_kind(checkpoint)
            checkpoint = fetch_all(checkpoint, backend)
            report_origin(start, checkpoint, storage.target.author, hp, self.context.outputs)
        self.context.start_times.enter(StartPhase.FIRST_STEP)
        return self._train(lightning, hp, storage, checkpoint, start)

    def _in_one_pass(self, hp: Hyperparameters) -> Hyperparameters:
        """Returns the hyperparameters, without accumulation if the module makes its own steps."""
        if self.module.automatic_optimization or hp.accumulation_steps == 1:
            return hp
        rows = hp.per_replica_batch_size * hp.accumulation_steps
        text = f"manual optimization does not accumulate: a step is one pass of {rows} examples in each replica"
        self.context.outputs.add_finding(Finding("Lightning", 0, text))
        return replace(hp, accumulation_steps=1, per_replica_batch_size=rows)

    def _train(
        self,
        lightning: Any,
        hp: Hyperparameters,
        storage: CheckpointStorage,
        checkpoint: LoadedCheckpoint | None,
        start: Start,
    ) -> Outcome:
        module, backend, outputs = self.module, self.context.backend, self.context.outputs
        rates = OptimizerRates(hp, start.ramp, outputs.add_finding, outputs.progress.say)

        def take(step: int, position: Position, health: NumericalHealth, alone: bool) -> Snapshot:
            entries = document(start, step, position, rates.rate_after(step), hp, health)
            entries |= {"passes": hp.accumulation_steps, "lightningRates": rates.state(), **callback.entries}
            entries |= {**instruments.closing.state(), "trainExamples": division.examples}
            return snapshot_of_state(
                strategy.state,
                module,
                step,
                int(entries["examples"]),
                entries,
                lambda text: outputs.add_finding(Finding("Checkpoint", step, text)),
            )

        checkpoints = storage.checkpoints_of(
            self.context.spec, take, outputs, None if checkpoint is None else start.step
        )
        instruments = self._instruments(checkpoints, hp, start)
        resumed = {} if checkpoint is None else checkpoint.snapshot.document
        gradients = Gradients(
            backend, instruments, self.context.stop, manual=not module.automatic_optimization, last=resumed.get("loss")
        )
        # The passes are the same only with batches of the same size.
        exact = not resumed or (resumed["globalBatch"], resumed["passes"]) == (
            hp.global_batch_size,
            hp.accumulation_steps,
        )
        position = start.position if exact else Position(start.position.epoch)
        callback = derive(lightning.Callback, GangCallback)(
            backend,
            hp,
            instruments,
            gradients,
            lambda: rates.current,
            position,
            resumed,
            keeps=self.context.spec.checkpoint is not None,
        )
        order = Order(hp.global_batch_size, hp.seed, self.context.share, hp.accumulation_steps, position)
        division = Division(
            order,
            backend,
            self.context.clock,
            warn=lambda text: outputs.add_finding(Finding("Lightning", 0, text)),
            note=outputs.progress.say,
            before=resumed.get("trainExamples"),
        )
        strategy = derive(lightning.strategies.Strategy, GangStrategy)(
            backend,
            order.share,
            gradients,
            division,
            hp,
            rates,
            callback,
        )
        if checkpoint is not None:
            strategy.state = state_of_snapshot(checkpoint.snapshot)
            strategy.kept_rates = resumed["lightningRates"]
            callback.begins_epoch = resumed["epochBegins"] or not exact
            callback.ends_batch = not callback.begins_epoch and (resumed.get("inBatch", False) or not position.offset)
            if not exact:
                set_steps(strategy.state, start.step)
            if callback.ends_batch:
                end_batch(strategy.state)
        log_everywhere(module, callback.logged, callback.local)
        self.context.begin(start.step)
        done = describe_nothing_left(start, checkpoint, hp)
        try:
            trainer = partial(self._trainer, lightning, hp, strategy, callback)
            path = HERE if checkpoint is not None else None
            was_stopped = self._fit(trainer, path, instruments, callback, done)
            return self._end(callback, instruments, hp, done, was_stopped)
        except BaseException:
            instruments.leave()
            raise
        finally:
            # Whatever ends the run, a snapshot is worth writing.
            with self.context.clock.during(Phase.CHECKPOINT):
                checkpoints.finish()
            outputs.progress.checkpoint_step = checkpoints.last_step

    def _fit(
        self,
        make: Callable[[LoggerFiles], Any],
        checkpoint_path: str | None,
        instruments: Instruments,
        callback: Any,
        done: str | None,
    ) -> bool:
        """Trains and validates, or only validates if the run is `done`; returns whether the run was stopped. `make`
        returns the Trainer."""
        run = self.asked
        place = self.context.spec.report.uri or _absolute(self.context.environment.report_directory)
        with tempfile.TemporaryDirectory(prefix="tpu-trainer-") as scratch:
            logs = LoggerFiles(place, Path(scratch), self.context.spec.job.attempt)
            trainer = make(logs)
            try:
                with user_code("Lightning's Trainer"), suppress(StoppedError):
                    if done is None:
                        trainer.fit(run.module, datamodule=run.data, ckpt_path=checkpoint_path)
                        # Lightning validates before its last hooks, which may have changed the weights.
                        last = callback.step, instruments.weights()
                        if not self._is_on_lower_rung and self._validates and instruments.evaluated != last:
                            trainer.validate(run.module, datamodule=run.data, verbose=False)
                    elif self._validates:
                        trainer.validate(run.module, datamodule=run.data, ckpt_path=checkpoint_path, verbose=False)
                    return False
                return True
            finally:
                if self.context.outputs.is_reporter:
                    logs.upload()

    def _trainer(self, lightning: Any, hp: Hyperparameters, strategy: Any, callback: Any, logs: LoggerFiles) -> Any:
        kind = self.context.backend.device.type
        manual = not self.module.automatic_optimization
        decided: dict[str, Any] = {
            "strategy": strategy,
            "accelerator": kind if kind in ("cpu", "cuda") else self._accelerator(lightning),
            "devices": 1,
            "num_nodes": self.context.backend.world,
            # With manual optimization Lightning counts every optimizer's steps, `callback` the gang's.
            "max_steps": -1 if manual else hp.train_steps,
            "max_epochs": -1,
            "accumulate_grad_batches": hp.accumulation_steps,
            "use_distributed_sampler": False,
            "enable_progress_bar": False,
            "default_root_dir": self._root(logs),
            # XLA has no inference mode.
            "inference_mode": False,
        }
        if hp.gradient_clip_norm is not None:
            decided["gradient_clip_val"] = hp.gradient_clip_norm
        if hp.evaluate_every_steps is not None:
            decided |= {
                "val_check_interval": hp.evaluate_every_steps * hp.accumulation_steps,
                "check_val_every_n_epoch": None,
            }
        options = dict(self.asked.options)
        callbacks = options.pop("callbacks", None) or []
        callbacks = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
        # Lightning refuses a progress bar beside enable_progress_bar=False.
        callbacks = [part for part in callbacks if not isinstance(part, lightning.callbacks.ProgressBar)]
        defaults: dict[str, Any] = {
            "enable_model_summary": False,
            "num_sanity_val_steps": 1,
            "log_every_n_steps": 10,
            "enable_checkpointing": any(isinstance(part, lightning.callbacks.Checkpoint) for part in callbacks),
        }
        if "logger" not in options:
            defaults["logger"] = logs.logger(lightning)
        if hp.precision == "BFloat16Mixed":
            options["precision"] = "bf16-mixed"
        if kind == "xla" and self._may_copy_resting_weights(lightning, callbacks):
            from tpu_trainer.gang.backends.torch_xla_repairs import repair_copies

            repair_copies()
        if kind == "xla" and (precision := options.pop("precision", None)) is not None:
            decided["plugins"] = [self._precision(lightning, precision)]
        with user_code("the options of Lightning's Trainer"):
            first = derive(lightning.Callback, FirstCallback)(callback)
            trainer_class = derive(lightning.Trainer, GangTrainer)
            return trainer_class(**{**defaults, **options, **decided}, callbacks=[first, *callbacks, callback])

    def _may_copy_resting_weights(self, lightning: Any, callbacks: list[Any]) -> bool:
        """Returns whether the run may copy weights that it does not train: averages and target networks do."""
        averages = any(isinstance(part, lightning.callbacks.WeightAveraging) for part in callbacks)
        return averages or not all(parameter.requires_grad for parameter in self.module.parameters())

    def _accelerator(self, lightning: Any) -> Any:
        return derive(lightning.accelerators.Accelerator, GangAccelerator)()

    def _precision(self, lightning: Any, precision: Any) -> Any:
        if precision not in ("bf16-mixed", "32-true", 32, "32"):
            raise UserCodeError(f'LightningRun: precision {precision!r}: on XLA it must be "32-true" or "bf16-mixed"')
        plain = lightning.plugins.precision.Precision
        return derive(plain, XlaAutocast)() if precision == "bf16-mixed" else plain()

    def _root(self, logs: LoggerFiles) -> str:
        """Returns the directory of the module's own files, such as ModelCheckpoint's."""
        if self.context.spec.checkpoint is None:
            return str(logs.directory)
        return f"{self.context.spec.checkpoint.uri.rstrip('/')}/lightning"

    def _instruments(self, checkpoints: Any, hp: Hyperparameters, start: Start) -> Instruments:
        context = self.context
        logbook = Logbook(context.backend, lambda text: context.outputs.add_finding(Finding("Logging", 0, text)))
        # The module logs to Lightning's loggers, so there are no names to agree on later.
        logbook.agree()
        checksum = partial(checksum_of, self.module, {}, context.backend)
        return Instruments(context, self.module, hp, start, checkpoints, logbook, checksum, known_steps=False)

    @property
    def _validates(self) -> bool:
        loader = any(overrides(part, "val_dataloader") for part in (self.module, self.asked.data))
        return loader and overrides(self.module, "validation_step") and self.module.validation_step is not None

    @property
    def _is_on_lower_rung(self) -> bool:
        return self.context.spec.end_after_steps is not None

    def _end(
        self,
        callback: Any,
        instruments: Instruments,
        hp: Hyperparameters,
        done: str | None,
        was_stopped: bool,
    ) -> Outcome:
        if was_stopped:
            return stopped_outcome(callback.step, callback.loss, instruments)
        warn_left_out(callback.step, callback.metrics, self.context.outputs)
        warn_unlearned(self.context.spec, callback.step, callback.metrics, instruments)
        if done is None:
            if not self._is_on_lower_rung:
                save_result(callback.step, callback.position, instruments)
                write_weights(self.context, callback.step, self.module, {})
            with self.context.clock.during(Phase.CHECKPOINT):
                keep_last(callback.step, callback.position, instruments)
        early = f" of {hp.last_step}, ended early by the module or a callback" if callback.step < hp.last_step else ""
        return succeeded_outcome(
            done or f"trained {callback.step} steps{early}", callback.step, callback.loss, callback.metrics, instruments
        )


class LoggerFiles:
    """The files of a module's logger: beside the report, or in `scratch` without one. `place`: the report's URI or
    path; None without one."""

    def __init__(self, place: str | None, scratch: Path, attempt: int) -> None:
        self._place, self._attempt = place, attempt
        self._local = place is not None and place.startswith("/")
        self.directory = Path(place) if place is not None and self._local else scratch

    def logger(self, lightning: Any) -> Any:
        """Returns the module's logger: TensorBoard's if it is installed, or else one that writes CSV files."""
        options = {"save_dir": str(self.directory), "name": _LOGGER_FOLDER, "version": f"attempt-{self._attempt}"}
        try:
            return lightning.loggers.TensorBoardLogger(**options)
        except ModuleNotFoundError:
            return lightning.loggers.CSVLogger(**options)

    def upload(self) -> None:
        """Uploads the files of a report in a bucket; a failure does not end the run."""
        if self._place is None or self._local:
            return
        try:
            store = open_store(self._place, "report.uri")
            for file in sorted((self.directory / _LOGGER_FOLDER).rglob("*")):
                if file.is_file():
                    store.put(file.relative_to(self.directory).as_posix(), file.read_bytes())
        except (OSError, TrainerError) as error:
            print(f"report: cannot upload the module's logs: {error}", file=sys.stderr, flush=True)


def set_steps(state: dict[str, Any], step: int) -> None:
    """Sets Lightning's own count of steps in `state`, Lightning's checkpoint, in place."""
    loops = state["loops"]["fit_loop"]
    for progress in loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"].values():
        progress["total"] = dict.fromkeys(progress["total"], step)
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step


def end_batch(state: dict[str, Any]) -> None:
    """Makes Lightning's loops resume between a batch and what follows from it. The state was saved within that batch,
    so Lightning would otherwise skip its validation and schedulers, and at an epoch's end the last hooks of this epoch
    and the first of the next one."""
    loops = state["loops"]["fit_loop"]
    for progress in (loops["epoch_loop.batch_progress"][part] for part in ("total", "current")):
        progress["completed"] = progress["processed"]


def _refuse(spec: RunSpec, run: LightningRun) -> None:
    """Raises UserCodeError if the recipe or the entrypoint needs what Lightning's Trainer cannot do here."""
    checkpoint, options = spec.checkpoint, run.options
    # Of the batches, 1 is one and 1.0 all.
    limit = options.get("limit_val_batches")
    of_lightning = "use Lightning's callbacks and schedulers (EarlyStopping, ModelCheckpoint, ReduceLROnPlateau)"
    steps_itself = not getattr(run.module, "automatic_optimization", True)
    for setting, is_set, advice in (
        ("backend XLASPMD", spec.backend == "xla-spmd", "it runs a program for each replica; use XLA or Torch"),
        ("recipe.onNotFinite: Skip", spec.on_not_finite is NotFinitePolicy.SKIP, "use Stop or Warn"),
        ("trainer.torch.execution", spec.torch.execution != "Eager", "call torch.compile in configure_model"),
        ("recipe.emaDecay", spec.ema_decay is not None, "use Lightning's callback EMAWeightAveraging"),
        ("recipe.stopEarly", spec.stop_early, of_lightning),
        ("recipe.schedule Plateau", spec.schedule.name == "Plateau", of_lightning),
        ("checkpoint.keepBest", checkpoint and checkpoint.keep_best, of_lightning),
        ("checkpoint.initFrom", checkpoint and checkpoint.init_from, "load the weights in the entrypoint"),
        ("recipe.precision: BFloat16", spec.precision == "BFloat16", "use BFloat16Mixed or Float32"),
        ("recipe.sharding", spec.sharding != "Replicated", "leave it out"),
        (
            "recipe.gradientClipNorm",
            spec.gradient_clip_norm is not None and steps_itself,
            "automatic_optimization is False, so the module must clip, with self.clip_gradients",
        ),
        (
            "limit_val_batches",
            limit not in (None, 0) and (limit != 1 or isinstance(limit, int)),
            "it counts each process's batches, so the metrics would depend on the slice; let val_dataloader() return "
            "fewer examples",
        ),
        *((name, name in options, f"it follows from {source}; leave it out") for name, source in _DECIDED.items()),
        *(
            (name, name in options and spec.evaluate_every_steps is not None, "recipe.evaluateEverySteps sets it")
            for name in ("val_check_interval", "check_val_every_n_epoch")
        ),
    ):
        if is_set:
            raise UserCodeError(f"{setting}: not with Lightning's own Trainer: {advice}")


def _check_kind(checkpoint: LoadedCheckpoint) -> None:
    if not is_from_lightning(checkpoint.snapshot):
        raise UserCodeError(
            f"checkpoint {checkpoint.folder} was written by the trainer's own loop, and Lightning's Trainer cannot "
            "continue it; choose another checkpoint.uri, or load its model.safetensors in the entrypoint"
        )


def _absolute(directory: Path | None) -> str | None:
    return None if directory is None else str(directory.absolute())
