"""One replica's run under Lightning's own Trainer, from the module to the outcome.

Lightning has its loop, hooks, callbacks and optimizers; gang, order of examples, checkpoints, doctor and reports are
the trainer's (`strategy`, `loaders`, `state`, `watch`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tpu_trainer.checkpoint.catalogue import LoadedCheckpoint
from tpu_trainer.checkpoint.handover import fetch_all
from tpu_trainer.checkpoint.resume import Start, document
from tpu_trainer.checkpoint.snapshot import Snapshot, is_from_lightning
from tpu_trainer.contract.clock import Phase
from tpu_trainer.contract.errors import UserCodeError, user_code
from tpu_trainer.contract.findings import Finding, NumericalHealth
from tpu_trainer.contract.outcome import Outcome
from tpu_trainer.contract.spec import NotFinitePolicy, RunSpec
from tpu_trainer.data.loading import Order, Position
from tpu_trainer.doctor.doctor import Doctor
from tpu_trainer.doctor.last_weights import checksum_of
from tpu_trainer.lightning.choice import may_skip
from tpu_trainer.lightning.needs import LightningRun, only_alone
from tpu_trainer.lightning.session import overridden
from tpu_trainer.lightning_trainer.gradients import Gradients
from tpu_trainer.lightning_trainer.loaders import Division, Place
from tpu_trainer.lightning_trainer.logs import Logs
from tpu_trainer.lightning_trainer.package import as_kind_of, package_of, refuse_mixed
from tpu_trainer.lightning_trainer.rates import Rates
from tpu_trainer.lightning_trainer.state import snapshot_of_state, state_of_snapshot
from tpu_trainer.lightning_trainer.strategy import HERE, GangAccelerator, GangStrategy, XlaAutocast
from tpu_trainer.lightning_trainer.watch import First, GangTrainer, StoppedError, Watch, log_everywhere
from tpu_trainer.loop.buffers import Buffers
from tpu_trainer.loop.checkpoints import CheckpointStorage, describe_nothing_left, report_origin, start_of
from tpu_trainer.loop.context import RunContext
from tpu_trainer.loop.ending import (
    keep_last,
    save_result,
    stopped_outcome,
    succeeded_outcome,
    warn_left_out,
    write_weights,
)
from tpu_trainer.loop.entrypoint import load_lightning
from tpu_trainer.loop.instruments import Instruments
from tpu_trainer.reporting.throughput import Throughput, Utilisation
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
"""Options of Lightning's Trainer that follow from something else."""

_DIFFERENT = (
    "Steps are slower than in the trainer's own loop, and a run that continues with another global batch begins its "
    "epoch again; docs/lightning.md has the differences"
)


def _parts(run: LightningRun) -> Iterator[object]:
    """What comes to the Trainer beside the module; an option may be one part or a list of them."""
    for part in (run.data, run.options.get("callbacks"), run.options.get("logger")):
        yield from part if isinstance(part, list | tuple) else [part]


@dataclass(frozen=True)
class OwnTrainer:
    context: RunContext

    def whole(self, why: str | None) -> Outcome:
        """`why`: what the module needs that only Lightning's Trainer does; None if the entrypoint asks for it.

        Raises:
            UserCodeError: the module or the recipe asks for what Lightning's Trainer cannot do here, or the module's
                code raised.
        """
        hp, backend = Hyperparameters.of(self.context.spec), self.context.backend
        run = self._load(hp)
        lightning = package_of(run.module, why or "the entrypoint returns a LightningRun")
        refuse_mixed(run.module, _parts(run))
        if why is not None:
            text = f"trains with Lightning's own Trainer: {why}. {_DIFFERENT}"
            self.context.outputs.add_finding(Finding("Lightning", 0, text))
        _refuse(self.context.spec, hp, run)
        if hp.evaluate_every_steps is not None and not _validates(run):
            text = f"evaluateEverySteps {hp.evaluate_every_steps} is not used: the module has nothing to validate"
            self.context.outputs.add_finding(Finding("Recipe", 0, text))
        if backend.world > 1 and run.module.automatic_optimization and may_skip(run.module):
            said = "training_step may return None, and the first time that it does ends the run"
            self.context.outputs.add_finding(Finding("Lightning", 0, f"{said}. {only_alone(backend.world)}"))
        hp = self._in_one_pass(run.module, hp)
        storage = CheckpointStorage.of(self.context.spec, run.module, backend)
        found = storage.choose(backend, self.context.outputs)
        start = replace(start_of(found, hp, self.context.spec, None), ended=storage.ended(found))
        if found is not None and storage.target is not None:
            _check_kind(found)
            found = fetch_all(found, backend)
            report_origin(start, found, storage.target.author, hp, self.context.outputs)
        return self._train(lightning, run, hp, storage, found, start)

    def _load(self, hp: Hyperparameters) -> LightningRun:
        with self.context.seeded(hp.seed):
            return load_lightning(self.context.spec.entrypoint, hp)

    def _in_one_pass(self, module: Any, hp: Hyperparameters) -> Hyperparameters:
        """Without accumulation if the module makes its own steps: only it could accumulate."""
        if module.automatic_optimization or hp.accumulation_steps == 1:
            return hp
        rows = hp.per_replica_batch_size * hp.accumulation_steps
        self.context.outputs.add_finding(
            Finding(
                "Lightning", 0, f"manual optimization does not accumulate: a replica takes its {rows} examples at once"
            )
        )
        return replace(hp, accumulation_steps=1, per_replica_batch_size=rows)

    def _train(
        self,
        lightning: Any,
        run: LightningRun,
        hp: Hyperparameters,
        storage: CheckpointStorage,
        found: LoadedCheckpoint | None,
        start: Start,
    ) -> Outcome:
        module, backend, outputs = run.module, self.context.backend, self.context.outputs
        rates = Rates(hp, start.ramp, outputs.add_finding)

        def take(step: int, position: Position, health: NumericalHealth, alone: bool) -> Snapshot:
            own = document(start, step, position, rates.rate_after(step), hp, health)
            own |= {"passes": hp.accumulation_steps, "lightningRates": rates.state(), **watch.kept}
            own |= {**instruments.closing.state(), "trainExamples": division.examples}
            return snapshot_of_state(
                strategy.state,
                module,
                step,
                int(own["examples"]),
                own,
                lambda text: outputs.add_finding(Finding("Checkpoint", step, text)),
            )

        checkpoints = storage.checkpoints_of(self.context.spec, take, outputs, None if found is None else start.step)
        instruments = self._instruments(module, checkpoints, hp, start)
        kept = {} if found is None else found.snapshot.document
        gradients = Gradients(
            backend, instruments, self.context.stop, manual=not module.automatic_optimization, last=kept.get("loss")
        )
        place, exact = _place(kept, hp)
        watch = as_kind_of(lightning.Callback, Watch)(
            backend,
            hp,
            instruments,
            gradients,
            lambda: rates.current,
            place,
            kept,
            keeps=self.context.spec.checkpoint is not None,
        )
        order = Order(hp.global_batch_size, hp.seed, self.context.share, hp.accumulation_steps)
        rows = hp.global_batch_size // backend.world // hp.accumulation_steps
        division = Division(
            order,
            rows,
            place,
            backend,
            self.context.clock,
            warn=lambda text: outputs.add_finding(Finding("Lightning", 0, text)),
            note=outputs.progress.say,
            before=kept.get("trainExamples"),
        )
        strategy = as_kind_of(lightning.strategies.Strategy, GangStrategy)(
            backend,
            order.share,
            gradients,
            division,
            hp,
            rates,
            lambda: watch.step,
            watch.ended,
        )
        if found is not None:
            strategy.state = state_of_snapshot(found.snapshot)
            strategy.kept_rates = kept["lightningRates"]
            if kept["epochBegins"] or not exact:
                begin_epoch(strategy.state, None if exact else start.step)
            elif not place.batches:
                end_epoch(strategy.state)
                watch.ends_epoch = True
        log_everywhere(module, watch.logged, watch.own)
        self.context.begin(start.step)
        done = describe_nothing_left(start, found, hp)
        try:
            trainer = partial(self._trainer, lightning, run, hp, strategy, watch)
            was_stopped = self._fit(trainer, run, HERE if found is not None else None, instruments, watch, done)
            return self._end(module, watch, instruments, hp, done, was_stopped)
        except BaseException:
            instruments.leave()
            raise
        finally:
            # However the run ends, a snapshot that was taken is worth writing.
            with self.context.clock.during(Phase.CHECKPOINT):
                checkpoints.finish()
            outputs.progress.set_checkpoint(checkpoints.last_step)

    def _fit(
        self,
        make: Callable[[Logs], Any],
        run: LightningRun,
        checkpoint: str | None,
        instruments: Instruments,
        watch: Any,
        done: str | None,
    ) -> bool:
        """`make` makes the Trainer; `done`: what is left of the run is to validate. Returns whether it was stopped."""
        place = self.context.spec.report.uri or _absolute(self.context.environment.report_directory)
        with tempfile.TemporaryDirectory(prefix="tpu-trainer-") as scratch:
            logs = Logs(place, Path(scratch), self.context.spec.job.attempt)
            trainer = make(logs)
            try:
                with user_code("Lightning's Trainer"), suppress(StoppedError):
                    if done is None:
                        trainer.fit(run.module, datamodule=run.data, ckpt_path=checkpoint)
                        # Lightning validates before the hooks of the end, which may have changed the weights.
                        last = watch.step, instruments.weights()
                        if not self._is_on_lower_rung and _validates(run) and instruments.evaluated != last:
                            trainer.validate(run.module, datamodule=run.data, verbose=False)
                    elif _validates(run):
                        trainer.validate(run.module, datamodule=run.data, ckpt_path=checkpoint, verbose=False)
                    return False
                return True
            finally:
                if self.context.outputs.is_reporter:
                    logs.upload()

    def _trainer(
        self, lightning: Any, run: LightningRun, hp: Hyperparameters, strategy: Any, watch: Any, logs: Logs
    ) -> Any:
        kind = self.context.backend.device.type
        manual = not run.module.automatic_optimization
        own: dict[str, Any] = {
            "strategy": strategy,
            "accelerator": kind if kind in ("cpu", "cuda") else self._accelerator(lightning),
            "devices": 1,
            "num_nodes": self.context.backend.world,
            # With manual optimization Lightning counts every optimizer's steps; `watch` counts the gang's.
            "max_steps": -1 if manual else hp.train_steps,
            "max_epochs": -1,
            "accumulate_grad_batches": hp.accumulation_steps,
            "use_distributed_sampler": False,
            "enable_progress_bar": False,
            "default_root_dir": self._root(logs),
        }
        if hp.gradient_clip_norm is not None:
            own["gradient_clip_val"] = hp.gradient_clip_norm
        if hp.evaluate_every_steps is not None:
            own |= {
                "val_check_interval": hp.evaluate_every_steps * hp.accumulation_steps,
                "check_val_every_n_epoch": None,
            }
        given = dict(run.options)
        callbacks = given.pop("callbacks", None) or []
        callbacks = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
        # Nobody would see them, and Lightning takes none where it is to show none.
        callbacks = [one for one in callbacks if not isinstance(one, lightning.callbacks.ProgressBar)]
        usual: dict[str, Any] = {
            "enable_model_summary": False,
            "num_sanity_val_steps": 1,
            "log_every_n_steps": 10,
            "enable_checkpointing": any(isinstance(one, lightning.callbacks.Checkpoint) for one in callbacks),
        }
        if "logger" not in given:
            usual["logger"] = logs.logger(lightning)
        if hp.precision == "BFloat16Mixed":
            given["precision"] = "bf16-mixed"
        if kind == "xla" and (precision := given.pop("precision", None)) is not None:
            own["plugins"] = [self._precision(lightning, precision)]
        with user_code("the options of Lightning's Trainer"):
            kind_of_trainer = as_kind_of(lightning.Trainer, GangTrainer)
            first = as_kind_of(lightning.Callback, First)(watch)
            return kind_of_trainer(**{**usual, **given, **own}, callbacks=[first, *callbacks, watch])

    def _accelerator(self, lightning: Any) -> Any:
        return as_kind_of(lightning.accelerators.Accelerator, GangAccelerator)()

    def _precision(self, lightning: Any, precision: Any) -> Any:
        if precision not in ("bf16-mixed", "32-true", 32, "32"):
            raise UserCodeError(f'LightningRun: precision {precision!r}: on XLA "32-true" and "bf16-mixed" are known')
        plain = lightning.plugins.precision.Precision
        return as_kind_of(plain, XlaAutocast)() if precision == "bf16-mixed" else plain()

    def _root(self, logs: Logs) -> str:
        """Where files of the module's own go, such as ModelCheckpoint's."""
        if self.context.spec.checkpoint is None:
            return str(logs.directory)
        return f"{self.context.spec.checkpoint.uri.rstrip('/')}/lightning"

    def _instruments(self, module: Any, checkpoints: Any, hp: Hyperparameters, start: Start) -> Instruments:
        spec = self.context.spec
        batch = replace(spec.batch, accumulation=hp.accumulation_steps, per_replica=hp.per_replica_batch_size)
        spec = replace(spec, batch=batch)
        doctor = Doctor(
            spec,
            self.context.backend,
            self.context.clock,
            self.context.outputs.add_finding,
            model=module,
            host=self.context.environment.host_index,
            pace=self.context.pace,
            health=start.health,
            known_steps=False,
        )
        logbook = Logbook(
            self.context.backend, lambda text: self.context.outputs.add_finding(Finding("Logging", 0, text))
        )
        # What the module logs goes to Lightning's loggers: there are no names to agree on later.
        logbook.agree()
        return Instruments(
            backend=self.context.backend,
            clock=self.context.clock,
            doctor=doctor,
            checkpoints=checkpoints,
            throughput=Throughput(hp.global_batch_size, start.step),
            utilisation=Utilisation(spec, self.context.backend.terms),
            noise=None,
            outputs=self.context.outputs,
            logbook=logbook,
            buffers=Buffers(module, self.context.backend),
            first=start.step,
            checksum=lambda: checksum_of(module, {}, self.context.backend),
        )

    @property
    def _is_on_lower_rung(self) -> bool:
        return self.context.spec.end_after_steps is not None

    def _end(
        self,
        module: Any,
        watch: Any,
        instruments: Instruments,
        hp: Hyperparameters,
        done: str | None,
        was_stopped: bool,
    ) -> Outcome:
        if was_stopped:
            return stopped_outcome(watch.step, watch.loss, instruments)
        warn_left_out(watch.step, watch.metrics, self.context.outputs)
        if done is None:
            if not self._is_on_lower_rung:
                save_result(watch.step, watch.position, instruments)
                write_weights(self.context, module)
            with self.context.clock.during(Phase.CHECKPOINT):
                keep_last(watch.step, watch.position, instruments)
        early = f" of {hp.last_step}, ended early by the module or a callback" if watch.step < hp.last_step else ""
        said = done or f"trained {watch.step} steps{early}"
        return succeeded_outcome(said, watch.step, watch.loss, watch.metrics, instruments)


def begin_epoch(state: dict[str, Any], step: int | None = None) -> None:
    """Lets Lightning's loops go on at the beginning of an epoch, where they would take the last one's batches for this
    one's. `step`: the steps that count as done, if batches have had another size; None if their number stands.

    Optimizers, callbacks and schedulers keep their state. `state`: Lightning's checkpoint, changed in place.
    """
    loops = state["loops"]["fit_loop"]
    loops["epoch_loop.batch_progress"]["is_last_batch"] = False
    steps = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for progress in (
        loops["epoch_loop.batch_progress"],
        loops["epoch_loop.scheduler_progress"],
        loops["epoch_loop.manual_optimization.optim_step_progress"],
        *steps.values(),
    ):
        progress["current"] = dict.fromkeys(progress["current"], 0)
    if step is not None:
        for progress in steps.values():
            progress["total"] = dict.fromkeys(progress["total"], step)
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step


def end_epoch(state: dict[str, Any]) -> None:
    """Lets Lightning's loops go on with the end of an epoch whose last batch is done: of a state that was saved within
    that batch, Lightning takes the epoch for over, and calls neither its last hooks nor the first of the next one."""
    loops = state["loops"]["fit_loop"]
    for progress in (loops["epoch_loop.batch_progress"][part] for part in ("total", "current")):
        progress["completed"] = progress["processed"]


def _refuse(spec: RunSpec, hp: Hyperparameters, run: LightningRun) -> None:
    """Raises UserCodeError: the recipe or the entrypoint asks for what there is not with Lightning's Trainer."""
    if spec.backend == "xla-spmd":
        raise UserCodeError(
            "backend XLASPMD: Lightning's Trainer knows one program per replica, not one for all; use XLA or Torch"
        )
    if spec.on_not_finite is NotFinitePolicy.SKIP:
        raise UserCodeError(
            "recipe.onNotFinite: Skip: under Lightning's Trainer a step cannot be undone; Stop and Warn are known"
        )
    if spec.torch.execution != "Eager":
        raise UserCodeError(
            f"trainer.torch.execution: {spec.torch.execution}: Lightning's Trainer makes its own steps, so there "
            "is Eager only; call torch.compile in the module's configure_model"
        )
    if hp.ema_decay is not None:
        raise UserCodeError(
            "recipe.emaDecay: under Lightning's Trainer a callback averages the weights: EMAWeightAveraging of "
            "pytorch_lightning.callbacks"
        )
    for setting, value in {
        "recipe.stopEarly": spec.stop_early,
        "checkpoint.keepBest": spec.checkpoint and spec.checkpoint.keep_best,
        "recipe.schedule Plateau": spec.schedule.name == "Plateau",
    }.items():
        if value:
            raise UserCodeError(
                f"{setting}: under Lightning's Trainer evaluations are the module's: use its own callbacks and "
                "schedulers (EarlyStopping, ModelCheckpoint, ReduceLROnPlateau)"
            )
    if spec.checkpoint is not None and spec.checkpoint.init_from is not None:
        raise UserCodeError(
            "checkpoint.initFrom: under Lightning's Trainer the entrypoint loads the weights, with safetensors.torch"
        )
    if hp.precision == "BFloat16":
        raise UserCodeError("recipe.precision: BFloat16: with Lightning's Trainer use BFloat16Mixed or Float32")
    if spec.sharding != "Replicated":
        raise UserCodeError("recipe.sharding: Lightning's Trainer keeps optimizers whole; leave it out")
    if hp.gradient_clip_norm is not None and not getattr(run.module, "automatic_optimization", True):
        raise UserCodeError(
            "recipe.gradientClipNorm: the module makes its own steps (automatic_optimization = False) and must clip"
            " them itself, with self.clip_gradients"
        )
    if decided := [name for name in run.options if name in _DECIDED]:
        raise UserCodeError(f"LightningRun: {decided[0]} follows from {_DECIDED[decided[0]]}; leave it out")
    # 1 is one batch, 1.0 all of them.
    if (limit := run.options.get("limit_val_batches")) not in (None, 0) and (limit != 1 or isinstance(limit, int)):
        raise UserCodeError(
            "LightningRun: limit_val_batches counts the batches of each process, so the metrics would depend on the "
            "slice; let val_dataloader() return fewer examples"
        )
    if hp.evaluate_every_steps is not None:
        for name in ("val_check_interval", "check_val_every_n_epoch"):
            if name in run.options:
                raise UserCodeError(f"LightningRun: {name}: recipe.evaluateEverySteps says when to evaluate, too")


def _check_kind(found: LoadedCheckpoint) -> None:
    if not is_from_lightning(found.snapshot):
        raise UserCodeError(
            f"checkpoint {found.folder} was written by the trainer's own loop, and Lightning's Trainer cannot continue "
            "it; choose another checkpoint.uri, or load its model.safetensors in the entrypoint"
        )


def _place(kept: Mapping[str, Any], hp: Hyperparameters) -> tuple[Place, bool]:
    """Where the data stands, and whether that is exact: only with the same batches. `kept`: the checkpoint's document,
    empty without one."""
    if not kept:
        return Place(), True
    same = kept["globalBatch"] == hp.global_batch_size and kept["passes"] == hp.accumulation_steps
    return Place(int(kept["place"]["epoch"]), int(kept["place"]["batches"]) if same else 0), same


def _validates(run: LightningRun) -> bool:
    loader = any(one is not None and overridden(one, "val_dataloader") for one in (run.module, run.data))
    return loader and overridden(run.module, "validation_step") and run.module.validation_step is not None


def _absolute(directory: Path | None) -> str | None:
    return None if directory is None else str(directory.absolute())
