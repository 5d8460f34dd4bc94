"""`spec.recipe`: the hyperparameters as they were tuned, and the slice they were tuned on.

What the job trains with is derived from it by `domain.recipe.scale` and shown in `status.resolved`.
"""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from tpu_training_operator.api.model import (
    ApiModel,
    Boolean,
    Count,
    CountOrZero,
    FractionDecimal,
    LargeCount,
    NonNegativeDecimal,
    PositiveDecimal,
    Rule,
)
from tpu_training_operator.api.slice_ref import SliceRef


class BatchScaling(StrEnum):
    PER_CORE_CONSTANT = "PerCoreConstant"
    GLOBAL_CONSTANT = "GlobalConstant"


class ScheduleName(StrEnum):
    CONSTANT = "Constant"
    LINEAR = "Linear"
    COSINE = "Cosine"
    STEP = "Step"


class LearningRateScaling(StrEnum):
    AUTO = "Auto"
    LINEAR = "Linear"
    SQUARE_ROOT = "SquareRoot"
    NONE = "None"


class OnNotFinite(StrEnum):
    STOP = "Stop"
    SKIP = "Skip"
    WARN = "Warn"


class Optimizer(ApiModel):
    name: Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$")] = Field(
        description="The trainer builds sgd, adam, adamw and rmsprop; for any other the task must build its own."
    )
    learning_rate: PositiveDecimal
    momentum: FractionDecimal | None = None
    weight_decay: NonNegativeDecimal | None = None
    beta1: FractionDecimal | None = None
    beta2: FractionDecimal | None = None
    epsilon: PositiveDecimal | None = None


class Schedule(ApiModel):
    """The learning rate after warm-up: Linear and Cosine fall to `factor` of it by the end of the training, Step
    multiplies it by `factor` at every milestone."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.milestones) == (self.name == 'Step')",
            message="milestones go with name Step, and Step with milestones",
            holds=lambda schedule: (schedule.milestones is not None) == (schedule.name is ScheduleName.STEP),
            field="milestones",
        ),
    )

    name: ScheduleName = ScheduleName.CONSTANT
    milestones: Annotated[list[LargeCount], Field(min_length=1, max_length=32)] | None = Field(
        None, description="Steps on tunedOn at which Step multiplies the learning rate."
    )
    factor: NonNegativeDecimal | None = Field(None, description="Default 0 for Linear and Cosine, 0.1 for Step.")


class Scaling(ApiModel):
    batch: BatchScaling = Field(
        BatchScaling.PER_CORE_CONSTANT,
        description="PerCoreConstant: every replica keeps its batch, the global batch grows with the slice."
        " GlobalConstant: the global batch is kept, on a smaller slice by accumulating gradients.",
    )
    learning_rate: LearningRateScaling = Field(
        LearningRateScaling.AUTO, description="Auto picks Linear or SquareRoot by the optimizer's name."
    )
    max_learning_rate: PositiveDecimal | None = None
    betas: Boolean = Field(
        False, description="Raise beta1 and beta2 to the power of the factor (their memory in examples is kept)."
    )
    weight_decay: Boolean = Field(False, description="Keep AdamW's time scale 1/(rate x decay), in epochs.")
    ema: Boolean = Field(False, description="Raise emaDecay to the power of the factor.")


class Recipe(ApiModel):
    """Batch, steps and warm-up are those on `tunedOn`; without `tunedOn` the recipe is used as it stands."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.trainSteps) != has(self.epochs)",
            message="give exactly one of trainSteps and epochs",
            holds=lambda recipe: (recipe.train_steps is None) != (recipe.epochs is None),
        ),
        Rule(
            cel="has(self.epochs) == has(self.datasetSize)",
            message="epochs and datasetSize (training examples) go together",
            holds=lambda recipe: (recipe.epochs is None) == (recipe.dataset_size is None),
            field="datasetSize",
        ),
    )

    tuned_on: SliceRef | None = Field(None, description="The slice whose hyperparameters these are.")
    global_batch_size: Count = Field(description="Examples per step over all replicas of tunedOn.")
    train_steps: LargeCount | None = Field(None, description="Steps on tunedOn; or epochs and datasetSize.")
    epochs: Count | None = None
    dataset_size: LargeCount | None = Field(
        None, description="Training examples. The trainer compares it with the data and refuses a difference above 1 %."
    )
    optimizer: Optimizer
    warmup_steps: CountOrZero | None = Field(
        None,
        description="Steps on tunedOn over which the learning rate rises linearly. Left out, a larger batch gets one of"
        " 5 % of the training, or of 5 epochs if that is less; 0 means none.",
    )
    schedule: Schedule = Field(default_factory=Schedule)
    evaluate_every_steps: LargeCount | None = Field(
        None, description="Steps on tunedOn between evaluations; left out, there is one at the end."
    )
    ema_decay: FractionDecimal | None = Field(
        None,
        description="Decay per step of an exponential moving average of the weights, which the trainer keeps,"
        " evaluates and saves in checkpoints.",
    )
    on_not_finite: OnNotFinite = Field(
        OnNotFinite.STOP,
        description="What becomes of a step whose loss or gradients are NaN or infinite. Stop: the run ends there, as"
        " failed, and leaves the checkpoints before it. Skip: the step changes nothing; 100 in a row end the run. Warn:"
        " the step is made.",
    )
    gradient_noise_scale: PositiveDecimal | None = Field(
        None, description="Examples, as measured in an earlier run; a larger batch than this buys little."
    )
    scaling: Scaling = Field(default_factory=Scaling)
    seed: CountOrZero = Field(0, description="Seed of the initial weights and of the data order.")
    parameters: Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=128)] | None = Field(
        None, description="Free-form settings, handed to the entrypoint."
    )
