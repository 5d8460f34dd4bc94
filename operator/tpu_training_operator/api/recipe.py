"""`spec.recipe`: the hyperparameters as they were tuned, and the slice they were tuned on.

`domain.job.recipe.scale` derives from it what the job trains with, which `status.resolved` shows.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.alias_generators import to_snake

from tpu_contract.run_spec import Mode, NotFinitePolicy, Precision, ScheduleName, Sharding
from tpu_training_operator.api.decimals import FractionDecimal, NonNegativeDecimal, PositiveDecimal
from tpu_training_operator.api.model import (
    ApiModel,
    Boolean,
    Count,
    CountOrZero,
    LargeCount,
    MetricName,
    Rule,
)
from tpu_training_operator.api.slice import SliceRef


class BatchScaling(StrEnum):
    PER_CORE_CONSTANT = "PerCoreConstant"
    GLOBAL_CONSTANT = "GlobalConstant"


class LearningRateScaling(StrEnum):
    AUTO = "Auto"
    LINEAR = "Linear"
    SQUARE_ROOT = "SquareRoot"
    UNSCALED = "Unscaled"
    ADA_SCALE = "AdaScale"


class StepsScaling(StrEnum):
    SAME_EXAMPLES = "SameExamples"
    SAME_LOSS = "SameLoss"


class Optimizer(ApiModel):
    name: Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$")] = Field(
        description="sgd, adam, adamw, rmsprop, adafactor or lion; with any other name the task must bring its own"
        " optimizer."
    )
    learning_rate: PositiveDecimal = Field(
        description="Learning rate at globalBatchSize, before scaling, for example 0.1 or 3e-4."
    )
    momentum: FractionDecimal | None = Field(
        None, description="Momentum of sgd or rmsprop, for example 0.9; default 0."
    )
    weight_decay: NonNegativeDecimal | None = Field(
        None, description="Weight decay, for example 0.0001; default 0.01 for adamw, 0 for all others."
    )
    beta1: FractionDecimal | None = Field(
        None,
        description="adam, adamw: decay per step of the gradient average. lion: its weight in an update. Default 0.9.",
    )
    beta2: FractionDecimal | None = Field(
        None,
        description="adam, adamw, rmsprop (its alpha): decay per step of the average of squared gradients; default"
        " 0.999, for rmsprop 0.99. lion: decay per step of the gradient average; default 0.99.",
    )
    epsilon: PositiveDecimal | None = Field(
        None, description="Term that keeps adam, adamw and rmsprop from dividing by zero; default 1e-8."
    )


class Schedule(ApiModel):
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(has(self.milestones) || has(self.milestoneEpochs)) == (self.name == 'Step')",
            message="milestones (or milestoneEpochs) and schedule Step need each other: give both or neither",
            holds=lambda schedule: (
                (schedule.milestones is not None or schedule.milestone_epochs is not None)
                == (schedule.name is ScheduleName.STEP)
            ),
            field="milestones",
        ),
        Rule(
            cel="!(has(self.milestones) && has(self.milestoneEpochs))",
            message="give the milestones in steps (milestones) or in epochs (milestoneEpochs), not both",
            holds=lambda schedule: schedule.milestones is None or schedule.milestone_epochs is None,
            field="milestoneEpochs",
        ),
        Rule(
            cel="[has(self.metric), has(self.mode), has(self.patience)].all(given, given == (self.name == 'Plateau'))",
            message="schedule Plateau needs metric, mode and patience; no other schedule takes them",
            holds=lambda schedule: all(
                is_set == (schedule.name is ScheduleName.PLATEAU)
                for is_set in (schedule.metric is not None, schedule.mode is not None, schedule.patience is not None)
            ),
            field="metric",
        ),
        Rule(
            cel="self.name != 'Plateau' || !has(self.factor)"
            " || (double(self.factor) > 0.0 && double(self.factor) < 1.0)",
            message="factor of schedule Plateau must be above 0 and below 1, such as 0.5",
            holds=lambda schedule: (
                schedule.name is not ScheduleName.PLATEAU or schedule.factor is None or 0 < float(schedule.factor) < 1
            ),
            field="factor",
        ),
    )

    name: ScheduleName = Field(
        ScheduleName.CONSTANT,
        description="How the learning rate changes after warm-up. Linear and Cosine: it falls to factor times its value"
        " at the end. Step: multiplied by factor at each milestone. Plateau: multiplied by factor when metric stops"
        " improving.",
    )
    milestones: Annotated[list[LargeCount], Field(min_length=1, max_length=32)] | None = Field(
        None, description="Steps on tunedOn at which schedule Step multiplies the learning rate by factor."
    )
    milestone_epochs: Annotated[list[Count], Field(min_length=1, max_length=32)] | None = Field(
        None,
        description="Epochs after which schedule Step multiplies the rate by factor, on every slice; instead of"
        " milestones.",
    )
    factor: NonNegativeDecimal | None = Field(
        None, description="Factor of the learning rate; default 0 for Linear and Cosine, 0.1 for Step and Plateau."
    )
    metric: MetricName | None = Field(
        None, description="Metric of the task's evaluation that schedule Plateau follows, for example perplexity."
    )
    mode: Mode | None = Field(None, description="Which values of metric are better: Max or Min.")
    patience: Count | None = Field(
        None, description="Evaluations in a row without a better value after which schedule Plateau lowers the rate."
    )


class StopEarly(ApiModel):
    metric: MetricName = Field(description="Metric of the task's evaluation that is watched, for example perplexity.")
    mode: Mode = Field(description="Which values of metric are better: Max or Min.")
    patience: Count = Field(description="Evaluations in a row without improvement after which the training ends.")
    min_delta: NonNegativeDecimal | None = Field(
        None, description="How much better a value must be to count; default 0."
    )


class Scaling(ApiModel):
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.learningRate != 'AdaScale' || !(has(self.maxLearningRate) || self.weightDecay"
            " || self.steps == 'SameLoss')",
            message="AdaScale sets every step's rate by what the step is worth, and takes neither maxLearningRate nor"
            " weightDecay nor steps SameLoss",
            holds=lambda scaling: (
                scaling.learning_rate is not LearningRateScaling.ADA_SCALE
                or not (scaling.max_learning_rate or scaling.weight_decay or scaling.steps is StepsScaling.SAME_LOSS)
            ),
            field="learningRate",
        ),
    )

    batch: BatchScaling = Field(
        BatchScaling.PER_CORE_CONSTANT,
        description="PerCoreConstant: the global batch grows with the slice. GlobalConstant: it is kept; a smaller"
        " slice accumulates gradients.",
    )
    learning_rate: LearningRateScaling = Field(
        LearningRateScaling.AUTO,
        description="How the learning rate follows the global batch. Auto: by gradientNoiseScale if it is set; else"
        " Linear for sgd, but at most 4 times the rate (except up to 8192 examples of a data set of a million);"
        " SquareRoot for adam, adamw, rmsprop, adafactor, lion and their relatives; Unscaled for others. AdaScale: as"
        " measured in every step, for sgd.",
    )
    max_learning_rate: PositiveDecimal | None = Field(
        None, description="Upper bound for the scaled learning rate; unbounded by default."
    )
    steps: StepsScaling = Field(
        StepsScaling.SAME_EXAMPLES,
        description="SameExamples: the training sees the recipe's examples. SameLoss: as many as the same loss takes by"
        " gradientNoiseScale; all steps and epochs grow with them.",
    )
    betas: Boolean = Field(
        False,
        description="Raise beta2 to the power of the batch's scale factor k, which keeps its memory in examples, and"
        " divide epsilon by the square root of k.",
    )
    weight_decay: Boolean = Field(
        False,
        description="Scale weightDecay so that AdamW keeps its time scale 1/(rate x decay) in epochs. Only for an"
        " optimizer whose decay is not part of the gradient: adamw, adafactor, lion.",
    )
    ema: Boolean = Field(False, description="Raise emaDecay to the power of the batch's scale factor.")


def _users_of_evaluations(recipe: "Recipe") -> Iterator[str]:
    """Yields the fields that need evaluations during the training."""
    if recipe.stop_early is not None:
        yield "stopEarly"
    if recipe.schedule.name is ScheduleName.PLATEAU:
        yield "schedule Plateau"


def _in_steps_or_epochs(name: str) -> tuple[Rule, Rule]:
    """Returns the rules about a number that a recipe gives in steps (`<name>Steps`) or in epochs (`<name>Epochs`)."""
    steps, epochs = f"{name}Steps", f"{name}Epochs"

    def given(recipe: "Recipe", field: str) -> bool:
        return getattr(recipe, to_snake(field)) is not None

    return (
        Rule(
            cel=f"!(has(self.{steps}) && has(self.{epochs}))",
            message=f"give {steps} or {epochs}, not both",
            holds=lambda recipe: not (given(recipe, steps) and given(recipe, epochs)),
            field=epochs,
        ),
        Rule(
            cel=f"has(self.epochs) || !has(self.{epochs})",
            message=f"{epochs} needs epochs and datasetSize, which say how many steps an epoch has; with trainSteps,"
            f" give {steps}",
            holds=lambda recipe: recipe.epochs is not None or not given(recipe, epochs),
            field=epochs,
        ),
    )


class Recipe(ApiModel):
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.scaling) || self.scaling.learningRate != 'AdaScale'"
            " || self.optimizer.name.matches('^[sS][gG][dD]$')",
            message="scaling.learningRate AdaScale is derived for optimizer sgd only; use Auto",
            holds=lambda recipe: (
                recipe.scaling.learning_rate is not LearningRateScaling.ADA_SCALE
                or recipe.optimizer.name.lower() == "sgd"
            ),
            field="scaling.learningRate",
        ),
        Rule(
            cel="has(self.trainSteps) != has(self.epochs)",
            message="give exactly one of trainSteps and epochs",
            holds=lambda recipe: (recipe.train_steps is None) != (recipe.epochs is None),
        ),
        Rule(
            cel="!has(self.epochs) || has(self.datasetSize)",
            message="epochs needs datasetSize, the number of training examples",
            holds=lambda recipe: recipe.epochs is None or recipe.dataset_size is not None,
            field="datasetSize",
        ),
        Rule(
            cel="has(self.epochs) || !has(self.schedule) || !has(self.schedule.milestoneEpochs)",
            message="schedule.milestoneEpochs needs epochs and datasetSize, which say how many steps an epoch has; with"
            " trainSteps, give schedule.milestones in steps",
            holds=lambda recipe: recipe.epochs is not None or recipe.schedule.milestone_epochs is None,
            field="schedule.milestoneEpochs",
        ),
        Rule(
            cel="has(self.evaluateEverySteps) || has(self.evaluateEveryEpochs) || !(has(self.stopEarly)"
            " || (has(self.schedule) && self.schedule.name == 'Plateau'))",
            message="stopEarly and schedule Plateau need evaluateEverySteps (or evaluateEveryEpochs): they follow the"
            " evaluations during the training",
            holds=lambda recipe: recipe.evaluates or not any(_users_of_evaluations(recipe)),
            explain=lambda recipe: (
                f"{' and '.join(_users_of_evaluations(recipe))} needs evaluateEverySteps (or evaluateEveryEpochs),"
                " because it follows the evaluations during the training"
            ),
            field="evaluateEverySteps",
        ),
        *_in_steps_or_epochs("warmup"),
        *_in_steps_or_epochs("evaluateEvery"),
        Rule(
            cel="has(self.gradientNoiseScale) || !has(self.scaling) || !has(self.scaling.steps)"
            " || self.scaling.steps != 'SameLoss'",
            message="scaling.steps SameLoss needs gradientNoiseScale, which says how many examples the same loss takes,"
            " also on the first rung of a ladder; tpujob run --measure-noise measures it",
            holds=lambda recipe: (
                recipe.gradient_noise_scale is not None or recipe.scaling.steps is not StepsScaling.SAME_LOSS
            ),
            field="scaling.steps",
        ),
    )

    tuned_on: SliceRef | None = Field(
        None, description="Slice that the recipe was tuned on. If left out, the recipe is used unchanged."
    )
    global_batch_size: Count = Field(description="Examples per optimizer step over all replicas of tunedOn.")
    train_steps: LargeCount | None = Field(
        None, description="Optimizer steps of the training on tunedOn; the alternative is epochs with datasetSize."
    )
    epochs: Count | None = Field(None, description="Passes over the training data; needs datasetSize.")
    dataset_size: LargeCount | None = Field(
        None,
        description="Number of training examples; needed with epochs. The trainer compares it with the data and fails"
        " if they differ by more than 1 %.",
    )
    optimizer: Optimizer = Field(description="The optimizer and its hyperparameters, as tuned.")
    warmup_steps: CountOrZero | None = Field(
        None,
        description="Steps on tunedOn over which the learning rate rises linearly; 0: none. If left out, a larger batch"
        " adds 5 % of the training, or 5 epochs if that is less.",
    )
    warmup_epochs: CountOrZero | None = Field(
        None, description="Epochs over which the learning rate rises; instead of warmupSteps, for a recipe with epochs."
    )
    schedule: Schedule = Field(default_factory=Schedule, description="How the learning rate changes after warm-up.")
    evaluate_every_steps: LargeCount | None = Field(
        None, description="Steps on tunedOn between evaluations. If left out, there is one at the end."
    )
    evaluate_every_epochs: Count | None = Field(
        None, description="Epochs between evaluations; instead of evaluateEverySteps, for a recipe with epochs."
    )
    stop_early: StopEarly | None = Field(
        None, description="End the training, as succeeded, once a metric of the evaluations no longer improves."
    )
    ema_decay: FractionDecimal | None = Field(
        None,
        description="Decay per step of an average of the weights, which the trainer keeps, evaluates and saves in"
        " checkpoints.",
    )
    on_not_finite: NotFinitePolicy = Field(
        NotFinitePolicy.STOP,
        description="When the loss or gradients of a step are NaN or infinite. Stop: the job fails and keeps its"
        " earlier checkpoints. Skip: the step changes nothing; 100 in a row fail the job. Warn: the step is applied.",
    )
    gradient_clip_norm: PositiveDecimal | None = Field(
        None,
        description="Largest norm of a step's gradient over all parameters; a larger one is scaled down to it. If left"
        " out, gradients are not clipped.",
    )
    precision: Precision = Field(
        Precision.FLOAT32,
        description="Float32: the types that the model was built with. BFloat16Mixed: loss and metrics under autocast"
        " to bfloat16; weights and optimizer state keep their types. BFloat16: float32 weights and buffers, and the"
        " optimizer's state, become bfloat16.",
    )
    sharding: Sharding = Field(
        Sharding.REPLICATED,
        description="Replicated: every replica keeps the whole state of the optimizer. Optimizer: each keeps its part"
        " (ZeRO stage 1), and a step sends 50 % more bytes; not with backend XLASPMD.",
    )
    gradient_noise_scale: PositiveDecimal | None = Field(
        None,
        description="Gradient noise scale measured with this recipe, in examples. With scaling.learningRate Auto the"
        " learning rate follows it.",
    )
    scaling: Scaling = Field(
        default_factory=Scaling, description="Rules for moving the recipe from tunedOn to the job's slice."
    )
    seed: CountOrZero = Field(0, description="Seed for the initial weights and the order of the data.")
    parameters: Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=128)] | None = Field(
        None,
        description="Your own settings, as strings. An entrypoint receives them; every worker has them as"
        " TPUJOB_PARAMETER_NAME.",
    )

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluations during the training."""
        return self.evaluate_every_steps is not None or self.evaluate_every_epochs is not None
