"""`spec.checkpoint` and `spec.report`: what a training leaves behind, and where."""

from pydantic import Field

from tpu_training_operator.api.model import ApiModel, Boolean, Count, LargeCount, StorageUri


class Checkpoint(ApiModel):
    """Steps and minutes are those of the run itself, whatever slice the recipe was tuned on: an interval bounds the
    time that a restart loses."""

    uri: StorageUri = Field(
        description="Where checkpoints are kept, in a place that every worker reaches: gs://bucket/path, or an absolute"
        " path on a shared volume. Jobs may share it: each has the folder NAMESPACE/NAME below it."
    )
    every_steps: LargeCount | None = None
    every_minutes: Count | None = Field(None, description="Default 10 where everySteps is left out, too.")
    keep: Count = Field(3, description="How many of the newest checkpoints stay.")
    resume_from: StorageUri | None = Field(
        None,
        description="Where training begins while this job has no checkpoint of its own: the folder of another job,"
        " whose newest checkpoint is taken, or one checkpoint (.../step-...). Left out, the job begins at step 0.",
    )


class Report(ApiModel):
    uri: StorageUri | None = Field(
        None,
        description="Directory for history.json, from which `tpujob report` makes the report page, and for the event"
        " files of TensorBoard. Without it, a cluster keeps neither.",
    )
    tensor_board: Boolean = Field(False, description="Write event files.")
    gradient_noise_scale: Boolean = Field(
        False, description="Estimate the batch size, in examples, beyond which a larger one buys little."
    )
