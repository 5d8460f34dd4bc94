"""A callback for Hugging Face's Trainer: Trainer(..., callbacks=[TPUJobCallback()]).

When the job is asked to stop, the Trainer saves a checkpoint and the process exits with code 75, so nothing after
`train()` runs. Continue with `trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from tpu_trainer.callbacks.session import Session, session

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

_NOT_METRICS = ("_runtime", "_per_second", "epoch")
"""Ends of the names that are not metrics of the model."""


class TPUJobCallback(TrainerCallback):
    """Reports a training to its job, and stops it on request. Outside of a job it does nothing."""

    def __init__(self) -> None:
        self._run: Session = session()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._run = session(state.max_steps, global_batch_size=batch).begin()
        if state.global_step:
            self._run.checkpoint(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._run.step(state.global_step)
        if self._run.should_stop:
            control.should_training_stop = control.should_save = True
            # An evaluation would use up part of the grace period.
            control.should_evaluate = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs and "loss" in logs:
            self._run.record(state.global_step, logs["loss"], learning_rate=logs.get("learning_rate"))

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._run.evaluation_goes_on()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        metrics_of_model = {name: value for name, value in (metrics or {}).items() if not name.endswith(_NOT_METRICS)}
        self._run.evaluated(state.global_step, metrics_of_model)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._run.checkpoint(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._run.end()
